/* disk_faults: loaded into a real program with LD_PRELOAD, it makes the store's segment files fail the way that the file named by TANDEM_DISK_FAULTS
 * says, looked at again for each operation, so that a test can begin and end a fault while the program serves:
 *
 *     read eio | read short | read slow | write eio | write enospc | sync eio | sync hang
 *
 * Of a sync that hangs it says so: FILE.hung.
 *
 * io_uring is refused, so that every read comes through here; the store then uses pread, as in containers that forbid it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define SLOW_S     4 /* longer than the store waits for a block */
#define HANG_NS    20000000L
#define READ_LARGE 16384 /* bodies, not heads */
#define SHORT_SIZE 100000

static ssize_t (*real_pread)(int fd, void *data, size_t size, off64_t offset);
static ssize_t (*real_pwrite)(int fd, const void *data, size_t size, off64_t offset);
static int (*real_fdatasync)(int fd);
static long (*real_syscall)(long number, ...);

__attribute__((constructor)) static void find_real(void)
{
    *(void **)&real_pread = dlsym(RTLD_NEXT, "pread64");
    *(void **)&real_pwrite = dlsym(RTLD_NEXT, "pwrite64");
    *(void **)&real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
    *(void **)&real_syscall = dlsym(RTLD_NEXT, "syscall");
}

static bool is_segment(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size > 0 ? size : 0] = '\0';
    return strstr(path, "/seg-") != NULL;
}

/* Is this fault wanted now? */
static bool wanted(int fd, const char *fault)
{
    char text[64];
    const char *name = getenv("TANDEM_DISK_FAULTS");
    int control = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t size = control < 0 ? 0 : read(control, text, sizeof text - 1);
    if (control >= 0)
        close(control);
    text[size > 0 ? size : 0] = '\0';
    return strncmp(text, fault, strlen(fault)) == 0 && is_segment(fd);
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset)
{
    if (wanted(fd, "read eio")) {
        errno = EIO;
        return -1;
    }
    if (size > SHORT_SIZE && wanted(fd, "read short"))
        size = SHORT_SIZE;
    if (size >= READ_LARGE && wanted(fd, "read slow"))
        nanosleep(&(struct timespec){.tv_sec = SLOW_S}, NULL);
    return real_pread(fd, data, size, offset);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    bool full = wanted(fd, "write enospc");
    if (full || wanted(fd, "write eio")) {
        errno = full ? ENOSPC : EIO;
        return -1;
    }
    return real_pwrite(fd, data, size, offset);
}

/* A file beside the one that named the fault. */
static void say_hung(void)
{
    char name[4096];
    snprintf(name, sizeof name, "%s.hung", getenv("TANDEM_DISK_FAULTS"));
    int fd = open(name, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
}

int fdatasync(int fd)
{
    if (wanted(fd, "sync eio")) {
        errno = EIO;
        return -1;
    }
    if (wanted(fd, "sync hang"))
        say_hung();
    while (wanted(fd, "sync hang"))
        nanosleep(&(struct timespec){.tv_nsec = HANG_NS}, NULL);
    return real_fdatasync(fd);
}

long syscall(long number, ...)
{
    va_list list;
    long a[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_io_uring_setup) {
        errno = ENOSYS;
        return -1;
    }
    return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
