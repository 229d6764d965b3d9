/* new_file: see new_file.h. */
#include "shared/new_file.h"
#include "shared/base.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SUFFIX ".part-XXXXXX"

static int failed(const char *what, const char *path, struct td_error *err)
{
    int why = errno ? errno : EIO;
    bool full = why == ENOSPC || why == EDQUOT || why == EFBIG;
    if (why == EEXIST)
        return td_fail(err, -TD_ERR_EXISTS, "cannot write %s: it is there already; choose another name",
                       path);
    return td_fail(err, full ? -TD_ERR_DISKFULL : -TD_ERR_IO, "cannot %s %s: %s", what, path, strerror(why));
}

int new_file_failed(const struct new_file *f, struct td_error *err)
{
    return failed("write", f->path, err);
}

static void forget(struct new_file *f)
{
    free(f->path);
    free(f->temporary);
    *f = (struct new_file){0};
}

static void remove_name(const struct new_file *f)
{
    if (f->temporary[0])
        unlink(f->temporary);
}

/* The folder of the path; the name's part of f->temporary is written over. */
static const char *folder_of(const struct new_file *f)
{
    char *slash = strrchr(strcpy(f->temporary, f->path), '/');
    if (slash)
        slash[slash == f->temporary] = '\0';
    return slash ? f->temporary : ".";
}

static const char *descriptor_path(int fd, char out[32])
{
    snprintf(out, 32, "/proc/self/fd/%d", fd);
    return out;
}

/* -1: not here. Its name comes through /proc, as no other way is everybody's. */
static int open_nameless(const struct new_file *f)
{
    char path[32];
    int fd = open(folder_of(f), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd >= 0 && access(descriptor_path(fd, path), F_OK) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

int new_file_create(struct new_file *f, const char *path, struct td_error *err)
{
    struct stat there;
    if (lstat(path, &there) == 0) {
        errno = EEXIST;
        return failed("make", path, err);
    }
    *f = (struct new_file){.path = strdup(path), .temporary = malloc(strlen(path) + sizeof SUFFIX)};
    if (!f->path || !f->temporary) {
        forget(f);
        return td_fail(err, -TD_ERR_NOMEM, "cannot write %s: out of memory", path);
    }
    int fd = open_nameless(f);
    f->temporary[0] = '\0';
    if (fd < 0) {
        sprintf(f->temporary, "%s" SUFFIX, path);
        fd = mkostemp(f->temporary, O_CLOEXEC);
    }
    int rc = fd < 0 ? failed("make", path, err) : 0;
    f->stream = fd < 0 ? NULL : fdopen(fd, "wb");
    if (fd >= 0 && !f->stream) {
        close(fd);
        remove_name(f);
        rc = td_fail(err, -TD_ERR_NOMEM, "cannot write %s: out of memory", path);
    }
    if (rc < 0)
        forget(f);
    return rc;
}

void new_file_discard(struct new_file *f)
{
    if (!f->stream)
        return;
    fclose(f->stream);
    remove_name(f);
    forget(f);
}

/* The name must not be another file's. Not every file system renames on that condition, but those link. */
static int give_name(const struct new_file *f)
{
    char path[32];
    if (!f->temporary[0])
        return linkat(AT_FDCWD, descriptor_path(fileno(f->stream), path), AT_FDCWD, f->path,
                      AT_SYMLINK_FOLLOW);
    if (renameat2(AT_FDCWD, f->temporary, AT_FDCWD, f->path, RENAME_NOREPLACE) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS)
        return -1;
    int rc = link(f->temporary, f->path);
    if (rc == 0)
        unlink(f->temporary);
    return rc;
}

/* A folder that may not be read, or a file system that does not sync folders, says nothing of the file. */
static int sync_folder(const struct new_file *f)
{
    int fd = open(folder_of(f), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = fd < 0 ? 0 : fsync(fd), why = errno;
    if (fd >= 0)
        close(fd);
    errno = why;
    return rc < 0 && why != EINVAL && why != ENOTSUP ? -1 : 0;
}

int new_file_finish(struct new_file *f, struct td_error *err)
{
    errno = 0;
    if (ferror(f->stream) || fflush(f->stream) != 0 || fsync(fileno(f->stream)) != 0 || give_name(f) != 0) {
        int rc = new_file_failed(f, err);
        new_file_discard(f);
        return rc;
    }
    fclose(f->stream);
    int rc = sync_folder(f) < 0 ? new_file_failed(f, err) : 0;
    if (rc < 0)
        unlink(f->path);
    forget(f);
    return rc;
}
