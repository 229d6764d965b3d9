/* io_posix: the operations of io.h on the real file system. */
#include "store/io.h"
#include "store/uring.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static int result(int rc)
{
    return rc < 0 ? -errno : rc;
}

static int posix_open(struct io *io, const char *path, int flags)
{
    (void)io;
    return result(open(path, flags | O_CLOEXEC | O_NOFOLLOW, 0600));
}

static void posix_close(struct io *io, int fd)
{
    (void)io;
    close(fd);
}

static int64_t posix_pread(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    (void)io;
    int64_t many = size > URING_PIECE_SIZE ? uring_read(fd, data, size, offset) : -ENOSYS;
    if (many != -ENOSYS)
        return many;
    ssize_t got = pread(fd, data, size, (off_t)offset);
    return got < 0 ? -errno : got;
}

static int64_t posix_pwrite(struct io *io, int fd, const void *data, size_t size, uint64_t offset)
{
    (void)io;
    ssize_t put = pwrite(fd, data, size, (off_t)offset);
    return put < 0 ? -errno : put;
}

static int64_t posix_size(struct io *io, int fd)
{
    (void)io;
    struct stat st;
    return fstat(fd, &st) < 0 ? -errno : (int64_t)st.st_size;
}

static int64_t posix_allocated(struct io *io, int fd)
{
    (void)io;
    struct stat st;
    return fstat(fd, &st) < 0 ? -errno : (int64_t)st.st_blocks * 512;
}

/* fdatasync writes what is needed to read the data back, the length included. A file that somebody has removed is on the disk, too, until it is
 * closed: nobody will find it. */
static int posix_fsync(struct io *io, int fd)
{
    (void)io;
    struct stat st;
    int rc = result(fdatasync(fd));
    rc = rc < 0 ? rc : result(fstat(fd, &st));
    return rc < 0 ? rc : st.st_nlink == 0 ? -ENOENT : 0;
}

static int posix_truncate(struct io *io, int fd, uint64_t size)
{
    (void)io;
    return result(ftruncate(fd, (off_t)size));
}

static int posix_allocate(struct io *io, int fd, uint64_t offset, uint64_t size)
{
    (void)io;
    return -posix_fallocate(fd, (off_t)offset, (off_t)size);
}

static int posix_punch(struct io *io, int fd, uint64_t offset, uint64_t size)
{
    (void)io;
    return result(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)size));
}

static void posix_advise(struct io *io, int fd, uint64_t offset, uint64_t size, enum io_advice advice)
{
    (void)io;
    posix_fadvise(fd, (off_t)offset, (off_t)size,
                  advice == IO_FORGET ? POSIX_FADV_DONTNEED : POSIX_FADV_WILLNEED);
}

static int posix_rename(struct io *io, const char *from, const char *to)
{
    (void)io;
    return result(rename(from, to));
}

static int posix_unlink(struct io *io, const char *path)
{
    (void)io;
    return result(unlink(path));
}

static int posix_make_directory(struct io *io, const char *path)
{
    (void)io;
    return result(mkdir(path, 0700));
}

static int posix_sync_directory(struct io *io, const char *path)
{
    (void)io;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = result(fsync(fd));
    close(fd);
    return rc;
}

static int posix_list(struct io *io, const char *path, void (*fn)(void *ctx, const char *name), void *ctx)
{
    (void)io;
    DIR *directory = opendir(path);
    if (!directory)
        return -errno;
    errno = 0;
    for (struct dirent *entry; (entry = readdir(directory));)
        fn(ctx, entry->d_name);
    int rc = -errno;
    closedir(directory);
    return rc;
}

static int posix_space(struct io *io, const char *path, uint64_t *total_size, uint64_t *free_size)
{
    (void)io;
    struct statvfs st;
    if (statvfs(path, &st) < 0)
        return -errno;
    *total_size = (uint64_t)st.f_blocks * st.f_frsize;
    *free_size = (uint64_t)st.f_bavail * st.f_frsize;
    return 0;
}

static pid_t read_holder(int fd)
{
    char text[32] = "";
    ssize_t got = pread(fd, text, sizeof text - 1, 0);
    return got > 0 ? (pid_t)strtol(text, NULL, 10) : 0;
}

static int posix_lock(struct io *io, const char *path, bool read_only, pid_t *holder)
{
    (void)io;
    *holder = 0;
    int fd = open(path, (read_only ? O_RDONLY : O_RDWR | O_CREAT) | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return -errno;
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        int rc = -errno;
        *holder = read_holder(fd);
        close(fd);
        return rc;
    }
    if (!read_only) {
        char text[32];
        int size = snprintf(text, sizeof text, "%ld\n", (long)getpid());
        /* The process id only serves the other side's error message; the lock holds without it. */
        if (ftruncate(fd, 0) < 0 || pwrite(fd, text, (size_t)size, 0) != size)
            *holder = getpid();
    }
    return fd;
}

static int posix_lock_directory(struct io *io, const char *path)
{
    (void)io;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0)
        return result(fd);
    int rc = -errno;
    close(fd);
    return rc;
}

struct io io_posix = {
    .open = posix_open,
    .close = posix_close,
    .pread = posix_pread,
    .pwrite = posix_pwrite,
    .size = posix_size,
    .allocated = posix_allocated,
    .fsync = posix_fsync,
    .truncate = posix_truncate,
    .allocate = posix_allocate,
    .punch = posix_punch,
    .advise = posix_advise,
    .rename = posix_rename,
    .unlink = posix_unlink,
    .make_directory = posix_make_directory,
    .sync_directory = posix_sync_directory,
    .list = posix_list,
    .space = posix_space,
    .lock = posix_lock,
    .lock_directory = posix_lock_directory,
};
