/* slow_disk: a disk of a given speed, between a program and its files, for tests and measurements. Preloaded (LD_PRELOAD): what is read of the store's
 * segments takes as long as the rate allows, all threads together, and io_uring is said not to be there, so that every read passes here.
 *
 *   TANDEM_SLOW_DISK   a file that holds the rate in bytes a second as text; 0 or empty: as fast as it is. It is looked at before each read. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double free_s; /* when the disk has done all that was asked for; under the lock */

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double rate_now(void)
{
    const char *path = getenv("TANDEM_SLOW_DISK");
    char text[32] = "";
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        ssize_t n = read(fd, text, sizeof text - 1);
        close(fd);
        text[n > 0 ? n : 0] = '\0';
    }
    return strtod(text, NULL);
}

static int is_segment(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = '\0';
    return strstr(path, "/seg-") != NULL;
}

static void wait_for_disk(int fd, size_t size)
{
    double rate = is_segment(fd) ? rate_now() : 0;
    if (rate <= 0)
        return;
    pthread_mutex_lock(&lock);
    double now = now_s();
    free_s = (free_s > now ? free_s : now) + (double)size / rate;
    double left = free_s - now;
    pthread_mutex_unlock(&lock);
    struct timespec t = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
    while (nanosleep(&t, &t) < 0 && errno == EINTR)
        ;
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset)
{
    static ssize_t (*next)(int, void *, size_t, off64_t);
    if (!next)
        next = (ssize_t(*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
    ssize_t n = next(fd, data, size, offset);
    if (n > 0)
        wait_for_disk(fd, (size_t)n);
    return n;
}

long syscall(long number, ...)
{
    static long (*next)(long, ...);
    va_list list;
    long a[6];
    if (number == SYS_io_uring_setup) {
        errno = ENOSYS;
        return -1;
    }
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    if (!next)
        next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
