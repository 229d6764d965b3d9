/* io: whole transfers and the safe replacement of a small file, over the table of operations. */
#include "store/io.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

int io_status(int64_t negative_errno)
{
    switch (-negative_errno) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return -TD_ERR_DISKFULL;
    case ENOENT:
        return -TD_ERR_NOTFOUND;
    case EEXIST:
        return -TD_ERR_EXISTS;
    case ENOMEM:
        return -TD_ERR_NOMEM;
    default:
        return -TD_ERR_IO;
    }
}

int io_read_all(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    for (size_t at = 0; at < size;) {
        int64_t got = io->pread(io, fd, (uint8_t *)data + at, size - at, offset + at);
        if (got == -EINTR)
            continue;
        if (got < 0)
            return io_status(got);
        if (got == 0)
            return -TD_ERR_TRUNCATED;
        at += (size_t)got;
    }
    return 0;
}

int io_write_all(struct io *io, int fd, const void *data, size_t size, uint64_t offset)
{
    for (size_t at = 0; at < size;) {
        int64_t put = io->pwrite(io, fd, (const uint8_t *)data + at, size - at, offset + at);
        if (put == -EINTR)
            continue;
        if (put <= 0)
            return put < 0 ? io_status(put) : -TD_ERR_IO;
        at += (size_t)put;
    }
    return 0;
}

bool io_path(char out[IO_PATH_MAX], const char *directory, const char *name)
{
    int size = snprintf(out, IO_PATH_MAX, "%s/%s", directory, name);
    return size > 0 && size < IO_PATH_MAX;
}

int io_read_file(struct io *io, const char *path, size_t size_max, uint8_t **data, size_t *size)
{
    int fd = io->open(io, path, O_RDONLY);
    if (fd < 0)
        return io_status(fd);
    int rc = 0;
    uint8_t *bytes = NULL;
    int64_t length = io->size(io, fd);
    if (length < 0)
        rc = io_status(length);
    else if ((uint64_t)length > size_max)
        rc = -TD_ERR_LIMIT;
    else if (!(bytes = malloc((size_t)length + 1)))
        rc = -TD_ERR_NOMEM;
    else
        rc = io_read_all(io, fd, bytes, (size_t)length, 0);
    io->close(io, fd);
    if (rc < 0) {
        free(bytes);
        return rc;
    }
    *data = bytes;
    *size = (size_t)length;
    return 0;
}

/* Write and fsync a new file at `path`, over whatever an earlier attempt left there. */
static int write_new_file(struct io *io, const char *path, const void *data, size_t size)
{
    int rc = io->unlink(io, path);
    if (rc < 0 && rc != -ENOENT)
        return io_status(rc);
    int fd = io->open(io, path, O_RDWR | O_CREAT | O_EXCL);
    if (fd < 0)
        return io_status(fd);
    rc = io_write_all(io, fd, data, size, 0);
    if (rc == 0) {
        rc = io->fsync(io, fd);
        rc = rc < 0 ? io_status(rc) : 0;
    }
    io->close(io, fd);
    if (rc < 0)
        io->unlink(io, path);
    return rc;
}

int io_replace_file(struct io *io, const char *directory, const char *name, const void *data, size_t size)
{
    char path[IO_PATH_MAX], temporary[IO_PATH_MAX], temporary_name[256];
    snprintf(temporary_name, sizeof temporary_name, "%s.tmp", name);
    if (!io_path(path, directory, name) || !io_path(temporary, directory, temporary_name))
        return -TD_ERR_ARG;
    int rc = write_new_file(io, temporary, data, size);
    if (rc < 0)
        return rc;
    rc = io->rename(io, temporary, path);
    if (rc < 0) {
        io->unlink(io, temporary);
        return io_status(rc);
    }
    rc = io->sync_directory(io, directory);
    return rc < 0 ? io_status(rc) : 0;
}
