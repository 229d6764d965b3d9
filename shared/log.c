/* log: formats a line on the stack and hands it to stderr in one write(2), so that lines of threads, and of
 * processes that share a pipe, never mix. Control characters become '?': a peer cannot forge a line or drive
 * a terminal. A line that is too long is cut and ends with "...". */
#include "shared/log.h"
#include "shared/base.h"
#include "shared/status.h"
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* with head, colours and newline; below PIPE_BUF, so a write to a pipe is atomic */
#define LOG_LINE_SIZE 2048

static const struct {
    const char *option, *shown, *colour;
} levels[] = {
    [LOG_INFO] = {"info", "INFO ", "\033[32m"},
    [LOG_WARN] = {"warn", "WARN ", "\033[33m"},
    [LOG_ERROR] = {"error", "ERROR", "\033[31m"},
};

static atomic_int level_least = LOG_INFO;
static bool colours;
static pthread_once_t colours_once = PTHREAD_ONCE_INIT;

void log_set_level(enum log_level level)
{
    atomic_store_explicit(&level_least, (int)level, memory_order_relaxed);
}

int log_level_parse(const char *text, enum log_level *out)
{
    for (size_t i = 0; i < TD_COUNT(levels); i++)
        if (strcmp(text, levels[i].option) == 0) {
            *out = (enum log_level)i;
            return 0;
        }
    return -TD_ERR_ARG;
}

/* NO_COLOR: see no-color.org; any non-empty value counts. */
static void detect_colours(void)
{
    const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
    colours = isatty(STDERR_FILENO) && !(no_color && *no_color) && !(term && strcmp(term, "dumb") == 0);
}

/* "2026-01-31T12:00:00.123Z INFO  cloud: "; returns its length. */
static size_t format_head(char *out, size_t size, enum log_level level, const char *module)
{
    uint64_t now_us = clock_wall_us();
    time_t seconds = (time_t)(now_us / 1000000);
    struct tm utc;
    gmtime_r(&seconds, &utc);
    char date[32];
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &utc);
    int length =
        snprintf(out, size, "%s.%03uZ %s%s%s %s: ", date, (unsigned)(now_us / 1000 % 1000),
                 colours ? levels[level].colour : "", levels[level].shown, colours ? "\033[0m" : "", module);
    return length < 0 ? 0 : TD_MIN((size_t)length, size - 1);
}

static void write_line(const char *line, size_t size)
{
    ssize_t written;
    do
        written = write(STDERR_FILENO, line, size);
    while (written < 0 && errno == EINTR);
    /* A lost or short log line has nobody to be reported to. */
}

void log_write(enum log_level level, const char *module, const char *format, ...)
{
    if ((int)level < atomic_load_explicit(&level_least, memory_order_relaxed))
        return;
    int saved_errno = errno; /* so that a caller may log first and look at errno afterwards */
    pthread_once(&colours_once, detect_colours);
    char line[LOG_LINE_SIZE];
    size_t capacity = sizeof line - 1; /* the newline always fits */
    size_t head = format_head(line, capacity, level, module);
    va_list args;
    va_start(args, format);
    errno = saved_errno; /* for %m */
    int length = vsnprintf(line + head, capacity - head, format, args);
    va_end(args);
    size_t size = head + (length < 0 ? 0 : (size_t)length);
    if (size >= capacity) {
        size = capacity - 1;
        memcpy(line + size - 3, "...", 3);
    }
    for (size_t i = head; i < size; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f)
            line[i] = '?';
    line[size++] = '\n';
    write_line(line, size);
    errno = saved_errno;
}
