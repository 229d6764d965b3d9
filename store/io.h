/* io: the file operations that the store uses, as a table of functions, so that tests can put a failing disk or a power loss
 * behind them. io_posix is the real one. All paths are absolute or relative to the process; new files are 0600.
 *
 * Functions return 0, a descriptor or a count, or -errno. A short count is only possible at the end of a file. All are thread-safe. */
#ifndef TANDEM_STORE_IO_H
#define TANDEM_STORE_IO_H
#include "shared/base.h"
#include "shared/status.h"
#include <sys/types.h>

#define IO_PATH_MAX 4096

enum io_advice {
    IO_WILL_READ, /* start reading these bytes */
    IO_FORGET,    /* drop them from the page cache, so that the next read asks the disk */
};

struct io {
    int (*open)(struct io *io, const char *path, int flags); /* O_RDONLY, O_RDWR, O_CREAT, O_EXCL, O_DIRECT */
    void (*close)(struct io *io, int fd);
    int64_t (*pread)(struct io *io, int fd, void *data, size_t size, uint64_t offset);
    int64_t (*pwrite)(struct io *io, int fd, const void *data, size_t size, uint64_t offset);
    int64_t (*size)(struct io *io, int fd);
    int64_t (*allocated)(struct io *io, int fd); /* bytes that take space: holes are not counted */
    int (*fsync)(struct io *io, int fd);
    int (*truncate)(struct io *io, int fd, uint64_t size);
    int (*allocate)(struct io *io, int fd, uint64_t offset,
                    uint64_t size); /* reserve space; the file grows to have these bytes */
    int (*punch)(struct io *io, int fd, uint64_t offset,
                 uint64_t size); /* give the space back; reads as zeros */
    void (*advise)(struct io *io, int fd, uint64_t offset, uint64_t size, enum io_advice advice);
    int (*rename)(struct io *io, const char *from, const char *to);
    int (*unlink)(struct io *io, const char *path);
    int (*make_directory)(struct io *io, const char *path); /* 0700; -EEXIST when something is there */
    int (*sync_directory)(struct io *io, const char *path);
    int (*list)(struct io *io, const char *path, void (*fn)(void *ctx, const char *name), void *ctx);
    int (*space)(struct io *io, const char *path, uint64_t *total_size, uint64_t *free_size);
    /* Take the exclusive lock on a file that is made if need be (not when read_only) and holds the holder's process id.
     * Returns a descriptor that keeps the lock until it is closed; -EWOULDBLOCK with *holder (0: unknown) when taken. */
    int (*lock)(struct io *io, const char *path, bool read_only, pid_t *holder);
    /* The same on a directory, which nobody removes by mistake. Not every file system has it: other codes than -EWOULDBLOCK say nothing. */
    int (*lock_directory)(struct io *io, const char *path);
};
extern struct io io_posix;

/* -errno as the project's code: no space and quota are -TD_ERR_DISKFULL, absence is -TD_ERR_NOTFOUND, the rest -TD_ERR_IO. */
int io_status(int64_t negative_errno);
/* Whole transfers. Reading less than size is -TD_ERR_TRUNCATED. Codes of the project, not errno. */
int io_read_all(struct io *io, int fd, void *data, size_t size, uint64_t offset);
int io_write_all(struct io *io, int fd, const void *data, size_t size, uint64_t offset);
/* directory ‖ "/" ‖ name; false when it does not fit. */
bool io_path(char out[IO_PATH_MAX], const char *directory, const char *name);
/* Read a whole file of at most size_max bytes; malloc'ed, the caller's. -TD_ERR_NOTFOUND, -TD_ERR_LIMIT, -TD_ERR_IO, … */
int io_read_file(struct io *io, const char *path, size_t size_max, uint8_t **data, size_t *size);
/* Make or replace directory/name so that after a power loss it is the old file or the new one, whole: write name.tmp, fsync,
 * rename, fsync the directory. After a failure the file may be either; it is never a mixture. */
int io_replace_file(struct io *io, const char *directory, const char *name, const void *data, size_t size);

#endif
