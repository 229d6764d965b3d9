/* stop: a program that does not stop in time ends; so does one that is asked twice; one that does is left alone. Each in a process of its own. */
#include "shared/stop.h"
#include "shared/base.h"
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#define OTHER_CODE 7

static void block_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

/* What the child says on stderr; returns its exit code, -1: a signal ended it. */
static int outcome(void (*child)(void), char *said, size_t size)
{
    int ends[2], status;
    size_t have = 0;
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        block_signals();
        child();
        _exit(OTHER_CODE);
    }
    close(ends[1]);
    for (ssize_t got; have + 1 < size && (got = read(ends[0], said + have, size - 1 - have)) > 0;)
        have += (size_t)got;
    said[have] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void hang(void)
{
    for (;;)
        pause();
}

static void late(void)
{
    stop_begins("test", 1, 1, true);
    hang();
}

/* A disk that does not answer makes it sooner, one that is in good time does not. */
static void disk_is_silent(void)
{
    stop_note_call(clock_mono_us() - 1);
    stop_begins("test", 1000, 1, true);
    hang();
}

/* Nor does it if a read is waited for while the writer is at work. */
static void disk_answers(void)
{
    stop_note_late(1);
    stop_note_call(clock_mono_us() + 1000000000);
    stop_begins("test", 1, 0, true);
    hang();
}

static void a_read_is_waited_for(void)
{
    stop_note_late(1);
    stop_begins("test", 1000, 0, true);
    hang();
}

static void a_read_came_back(void)
{
    stop_note_late(1);
    stop_note_late(-1);
    stop_begins("test", 1, 0, true);
    hang();
}

/* The stop began without a signal. */
static void asked_once(void)
{
    stop_begins("test", 1, 1, false);
    kill(getpid(), SIGTERM);
    hang();
}

/* It does not matter who takes the signals. */
static void asked_twice_there(void)
{
    stop_begins("test", 1000, 1000, true);
    stop_begins("test", 1000, 1000, true);
    hang();
}

static void asked_twice(void)
{
    stop_begins("test", 1000, 1000, true);
    stop_begins("test", 1000, 1000, false);
    kill(getpid(), SIGINT);
    hang();
}

static void in_time(void)
{
    stop_done(); /* none has begun */
    for (int i = 0; i < 2; i++) {
        stop_begins("test", 1, 1, true);
        stop_done();
    }
    nanosleep(&(struct timespec){.tv_sec = 1, .tv_nsec = 100000000}, NULL);
}

/* And not sooner than after the second that it has; a busy machine may look later. */
static void assert_was_late(const char *said)
{
    static const char begins[] = "ERROR test: not stopped in ";
    const char *at = strstr(said, begins);
    assert_non_null(at);
    assert_true(atoi(at + sizeof begins - 1) >= 1);
}

static void test_outcomes(void **state)
{
    (void)state;
    char said[500];
    assert_int_equal(outcome(late, said, sizeof said), 1);
    assert_was_late(said);
    assert_int_equal(outcome(asked_once, said, sizeof said), 1);
    assert_was_late(said);
    assert_int_equal(outcome(disk_is_silent, said, sizeof said), 1);
    assert_non_null(strstr(said, "a disk does not answer"));
    assert_int_equal(outcome(disk_answers, said, sizeof said), 1);
    assert_was_late(said);
    assert_int_equal(outcome(a_read_is_waited_for, said, sizeof said), 1);
    assert_non_null(strstr(said, "not stopped in 0 s: a disk does not answer"));
    assert_int_equal(outcome(a_read_came_back, said, sizeof said), 1);
    assert_was_late(said);
    assert_int_equal(outcome(asked_twice, said, sizeof said), 1);
    assert_non_null(strstr(said, "second signal"));
    assert_int_equal(outcome(asked_twice_there, said, sizeof said), 1);
    assert_non_null(strstr(said, "second signal"));
    assert_int_equal(outcome(in_time, said, sizeof said), OTHER_CODE);
    assert_string_equal(said, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_outcomes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
