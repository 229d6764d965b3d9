/* log: what reaches stderr, through a pipe and through a terminal. Each case logs in a child process, because
 * whether to use colours is decided once a process. */
#include "shared/base.h"
#include "shared/log.h"
#include "shared/status.h"
#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <pty.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

static char captured[1 << 20];

/* Run `body` in a child whose stderr is a pipe or a terminal; what it wrote is in `captured`. */
static void capture(void (*body)(void), bool terminal)
{
    int reading, writing, ends[2];
    if (terminal) {
        assert_int_equal(openpty(&reading, &writing, NULL, NULL, NULL), 0);
    } else {
        assert_int_equal(pipe(ends), 0);
        reading = ends[0], writing = ends[1];
    }
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(reading);
        dup2(writing, STDERR_FILENO);
        body();
        _exit(0);
    }
    close(writing);
    size_t size = 0;
    ssize_t got;
    while ((got = read(reading, captured + size, sizeof captured - 1 - size)) >
           0) /* a terminal ends with EIO */
        size += (size_t)got;
    captured[size] = '\0';
    close(reading);
    int status;
    waitpid(child, &status, 0);
    assert_int_equal(status, 0);
}

static void log_one(void)
{
    log_info("cloud", "served %d of %s", 3, "four");
}

static void test_form_of_a_line(void **state)
{
    (void)state;
    time_t before = time(NULL);
    capture(log_one, false);
    static const char form[] = "dddd-dd-ddTdd:dd:dd.dddZ INFO  cloud: served 3 of four\n";
    assert_int_equal(strlen(captured), strlen(form));
    for (size_t i = 0; i < 24; i++)
        assert_true(form[i] == 'd' ? isdigit((unsigned char)captured[i]) != 0 : captured[i] == form[i]);
    assert_string_equal(captured + 24, form + 24);
    struct tm t = {0};
    assert_non_null(strptime(captured, "%Y-%m-%dT%H:%M:%S", &t));
    assert_in_range(timegm(&t), before, time(NULL));
}

static void log_all_levels(void)
{
    log_info("m", "1");
    log_set_level(LOG_WARN);
    log_info("m", "2");
    log_warn("m", "3");
    log_error("m", "4");
    log_set_level(LOG_INFO);
    log_info("m", "5");
}

static void test_levels(void **state)
{
    (void)state;
    capture(log_all_levels, false);
    char seen[256] = "";
    for (char *line = strtok(captured, "\n"); line; line = strtok(NULL, "\n")) {
        strcat(seen, line + 25);
        strcat(seen, "|");
    }
    assert_string_equal(seen, "INFO  m: 1|WARN  m: 3|ERROR m: 4|INFO  m: 5|");
    enum log_level level = LOG_ERROR;
    assert_int_equal(log_level_parse("info", &level), 0);
    assert_int_equal(level, LOG_INFO);
    assert_int_equal(log_level_parse("error", &level), 0);
    assert_int_equal(level, LOG_ERROR);
    assert_int_equal(log_level_parse("loud", &level), -TD_ERR_ARG);
    assert_int_equal(log_level_parse("", &level), -TD_ERR_ARG);
    assert_int_equal(level, LOG_ERROR);
}

static void log_no_color(void)
{
    setenv("NO_COLOR", "1", 1);
    log_one();
}

static void log_dumb(void)
{
    setenv("TERM", "dumb", 1);
    log_one();
}

static void test_colours(void **state)
{
    (void)state;
    unsetenv("NO_COLOR");
    setenv("TERM", "xterm", 1);
    capture(log_one, true);
    assert_non_null(strstr(captured, "Z \033[32mINFO \033[0m cloud: served"));
    capture(log_one, false);
    assert_null(strchr(captured, '\033'));
    capture(log_no_color, true);
    assert_non_null(strstr(captured, "Z INFO  cloud: served"));
    assert_null(strchr(captured, '\033'));
    capture(log_dumb, true);
    assert_null(strchr(captured, '\033'));
}

static void log_hostile(void)
{
    log_info("net", "peer said %s", "x\n2026-01-01T00:00:00.000Z INFO  cloud: forged\r\033[2J\x7f \xc3\xa9");
}

static void test_control_characters(void **state)
{
    (void)state;
    capture(log_hostile, false);
    assert_non_null(
        strstr(captured, "peer said x?2026-01-01T00:00:00.000Z INFO  cloud: forged??[2J? \xc3\xa9\n"));
    assert_int_equal(strcspn(captured, "\n"), strlen(captured) - 1);
}

static void log_long(void)
{
    char text[5000];
    memset(text, 'y', sizeof text);
    text[sizeof text - 1] = '\0';
    log_info("m", "%s", text);
    log_info("m", "%s", "next");
}

static void test_long_line_is_cut(void **state)
{
    (void)state;
    capture(log_long, false);
    char *newline = strchr(captured, '\n');
    assert_non_null(newline);
    assert_in_range(newline - captured, 2000, 2047);
    assert_memory_equal(newline - 5, "yy...", 5);
    assert_non_null(strstr(newline + 1, "INFO  m: next\n"));
}

static void log_errno(void)
{
    errno = ENOENT;
    log_info("m", "%m");
    log_info("m", "errno %d", errno == ENOENT);
}

static void test_errno_survives(void **state)
{
    (void)state;
    capture(log_errno, false);
    assert_non_null(strstr(captured, "m: No such file or directory\n"));
    assert_non_null(strstr(captured, "m: errno 1\n"));
}

#define THREADS 4
#define LINES   300

static void *log_main(void *arg)
{
    for (int i = 0; i < LINES; i++)
        log_info("thread", "<%s%s%s%s>", (char *)arg, (char *)arg, (char *)arg, (char *)arg);
    return NULL;
}

static void log_from_threads(void)
{
    static char texts[THREADS][17] = {"aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc",
                                      "dddddddddddddddd"};
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, log_main, texts[i]);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

static void test_lines_do_not_mix(void **state)
{
    (void)state;
    capture(log_from_threads, false);
    int count = 0;
    for (char *line = strtok(captured, "\n"); line; line = strtok(NULL, "\n"), count++) {
        char *begin = strchr(line, '<');
        assert_non_null(begin);
        assert_int_equal(strlen(begin), 66);
        assert_int_equal(strspn(begin + 1, (char[]){begin[1], '\0'}), 64);
        assert_int_equal(begin[65], '>');
    }
    assert_int_equal(count, THREADS * LINES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_form_of_a_line),   cmocka_unit_test(test_levels),
        cmocka_unit_test(test_colours),          cmocka_unit_test(test_control_characters),
        cmocka_unit_test(test_long_line_is_cut), cmocka_unit_test(test_errno_survives),
        cmocka_unit_test(test_lines_do_not_mix),
    };
    return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
