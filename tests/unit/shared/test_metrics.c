/* metrics: the text form, line by line, and updates from many threads. */
#include "shared/base.h"
#include "shared/metrics.h"
#include "shared/status.h"
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

/* The registry is the process's, so each test uses names of its own and looks at its part of the text. */
static void assert_rendered(const char *expected, bool wanted)
{
    size_t size = 0;
    char *text = metrics_render(&size);
    assert_non_null(text);
    assert_int_equal(size, strlen(text));
    if ((strstr(text, expected) != NULL) != wanted)
        fail_msg("%s:\n%s\nin:\n%s", wanted ? "missing" : "unexpected", expected, text);
    free(text);
}

/* Stand in for the C library's calloc, but under a sanitizer, which does that itself. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ALLOCATIONS_CAN_FAIL 1
static bool allocations_fail;
void *__libc_calloc(size_t count, size_t size);
void *calloc(size_t count, size_t size)
{
    return allocations_fail ? NULL : __libc_calloc(count, size);
}
#endif

/* What cannot be registered is counted nowhere, and ends no application. */
static void test_no_memory(void **state)
{
    (void)state;
#ifdef ALLOCATIONS_CAN_FAIL
    static const double bounds[] = {1, 2};
    allocations_fail = true;
    struct metric *counter = metric_counter("no_memory_total", NULL, "a");
    struct metric *histogram = metric_histogram("no_memory_seconds", NULL, "b", bounds, 2);
    allocations_fail = false;
    metric_add(counter, 1);
    metric_observe(histogram, 5);
    assert_rendered("no_memory", false);
    counter = metric_counter("no_memory_total", NULL, "a");
    metric_add(counter, 2);
    assert_rendered("no_memory_total 2", true);
#else
    skip();
#endif
}

static void test_one_head_a_name_in_order(void **state)
{
    (void)state;
    struct metric *disk = metric_counter("t_hits_total", "tier=\"disk\"", "Hits \\ by\ntier.");
    struct metric *other = metric_gauge("t_between", NULL, "Between.");
    struct metric *memory = metric_counter("t_hits_total", "tier=\"memory\"", "Not shown.");
    metric_add(disk, 2);
    metric_add(disk, 0.5);
    metric_add(memory, 1e15);
    metric_set(other, -0.1);
    assert_rendered("# HELP t_hits_total Hits \\\\ by\\ntier.\n"
                    "# TYPE t_hits_total counter\n"
                    "t_hits_total{tier=\"disk\"} 2.5\n"
                    "t_hits_total{tier=\"memory\"} 1e+15\n"
                    "# HELP t_between Between.\n"
                    "# TYPE t_between gauge\n"
                    "t_between -0.1\n",
                    true);
    assert_rendered("Not shown.", false);
    assert_ptr_equal(metric_counter("t_hits_total", "tier=\"memory\"", ""), memory);
    assert_ptr_equal(metric_gauge("t_between", "", ""), other);
    assert_true(metric_value(disk) == 2.5);
}

static void test_numbers(void **state)
{
    (void)state;
    struct metric *m = metric_gauge("t_number", NULL, "N.");
    static const struct {
        double value;
        const char *line;
    } cases[] = {
        {0, "\nt_number 0\n"},
        {1.0 / 3, "\nt_number 0.33333333333333331\n"},
        {123456789012345678.0, "\nt_number 1.2345678901234568e+17\n"},
        {1.5e-7, "\nt_number 1.5e-07\n"},
        {INFINITY, "\nt_number +Inf\n"},
        {-INFINITY, "\nt_number -Inf\n"},
        {NAN, "\nt_number NaN\n"},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        metric_set(m, cases[i].value);
        assert_rendered(cases[i].line, true);
    }
    metric_set(m, 4);
    metric_add(m, -6);
    assert_true(metric_value(m) == -2);
    struct metric *c = metric_counter("t_only_up_total", NULL, "C.");
    metric_add(c, 3);
    metric_add(c, -1);
    metric_add(c, NAN);
    assert_true(metric_value(c) == 3);
}

static void test_histogram(void **state)
{
    (void)state;
    static const double bounds[] = {0.5, 1, 25};
    struct metric *m = metric_histogram("t_seconds", "stage=\"edge\"", "Time.", bounds, 3);
    struct metric *bare = metric_histogram("t_bare", NULL, "Bare.", bounds, 1);
    static const double values[] = {0.5, 0.25, 0.75, 1.5,
                                    25,  25.5, 100,  NAN}; /* a bound counts as below itself */
    for (size_t i = 0; i < TD_COUNT(values); i++)
        metric_observe(m, values[i]);
    metric_add(m, 5);
    metric_set(m, 5); /* both mean nothing to a histogram */
    assert_true(metric_value(m) == 7);
    assert_rendered("# TYPE t_seconds histogram\n"
                    "t_seconds_bucket{stage=\"edge\",le=\"0.5\"} 2\n"
                    "t_seconds_bucket{stage=\"edge\",le=\"1\"} 3\n"
                    "t_seconds_bucket{stage=\"edge\",le=\"25\"} 5\n"
                    "t_seconds_bucket{stage=\"edge\",le=\"+Inf\"} 7\n"
                    "t_seconds_sum{stage=\"edge\"} 153.5\n"
                    "t_seconds_count{stage=\"edge\"} 7\n",
                    true);
    assert_rendered(
        "t_bare_bucket{le=\"0.5\"} 0\nt_bare_bucket{le=\"+Inf\"} 0\nt_bare_sum 0\nt_bare_count 0\n", true);
    metric_observe(bare, 1);
    assert_rendered("t_bare_bucket{le=\"0.5\"} 0\nt_bare_bucket{le=\"+Inf\"} 1\n", true);
    for (size_t i = 1; i < METRIC_SECONDS_BOUNDS_COUNT; i++)
        assert_true(METRIC_SECONDS_BOUNDS[i - 1] < METRIC_SECONDS_BOUNDS[i]);
}

static void test_labels_are_escaped(void **state)
{
    (void)state;
    char label[32];
    assert_int_equal(metric_label(label, sizeof label, "model", "a\\b\"c\nd"), 0);
    assert_string_equal(label, "model=\"a\\\\b\\\"c\\nd\"");
    metric_gauge("t_label", label, "L.");
    assert_rendered("t_label{model=\"a\\\\b\\\"c\\nd\"} 0\n", true);
    metric_gauge("t_raw", "x=\"a\nb\"", "R."); /* a line break can never end a sample early */
    assert_rendered("t_raw{x=\"a\\nb\"} 0\n", true);
    assert_int_equal(metric_label(label, 6, "m", "ab"), -TD_ERR_NOSPACE);
    assert_int_equal(metric_label(label, 7, "m", "ab"), 0);
    assert_string_equal(label, "m=\"ab\"");
    assert_int_equal(metric_label(label, 4, "m", ""), -TD_ERR_NOSPACE);
    assert_int_equal(metric_label(label, 5, "m", ""), 0);
    assert_int_equal(metric_label(label, 6, "m", "\""), -TD_ERR_NOSPACE);
    assert_int_equal(metric_label(label, 7, "m", "\"x"), -TD_ERR_NOSPACE);
    assert_int_equal(metric_label(label, 2, "m", ""), -TD_ERR_NOSPACE);
}

/* A wrong registration is a mistake in the source: the program must not come up. */
static void assert_aborts(const char *name)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGABRT, SIG_DFL); /* not cmocka's handler */
        fclose(stderr);
        metric_gauge(name, NULL, "");
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status) || WEXITSTATUS(status) != 0);
}

static void test_wrong_registrations(void **state)
{
    (void)state;
    metric_counter("t_typed_total", NULL, "T.");
    assert_aborts("t_typed_total");
    assert_aborts("9starts_with_digit");
    assert_aborts("has space");
    assert_aborts("");
}

#define THREADS 4
#define UPDATES 20000

static const double shared_bounds[] = {0.5};

static void *update_main(void *arg)
{
    struct metric *const *m = arg;
    for (int i = 0; i < UPDATES; i++) {
        metric_add(m[0], 1);
        metric_add(m[1], i % 2 ? 1 : -1);
        metric_observe(m[2], i % 2);
        if (i % 1000 == 0) {
            char *text = metrics_render(NULL);
            assert_non_null(text);
            free(text);
        }
    }
    return NULL;
}

static void test_updates_from_threads(void **state)
{
    (void)state;
    struct metric *m[] = {metric_counter("t_shared_total", NULL, ""), metric_gauge("t_shared", NULL, ""),
                          metric_histogram("t_shared_seconds", NULL, "", shared_bounds, 1)};
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, update_main, m);
    for (int i = 0; i < 50; i++) { /* registering meanwhile is allowed too */
        char label[16];
        snprintf(label, sizeof label, "i=\"%d\"", i);
        metric_gauge("t_late", label, "");
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_true(metric_value(m[0]) == THREADS * UPDATES);
    assert_true(metric_value(m[1]) == 0);
    assert_true(metric_value(m[2]) == THREADS * UPDATES);
    assert_rendered("t_shared_seconds_bucket{le=\"0.5\"} 40000\n"
                    "t_shared_seconds_bucket{le=\"+Inf\"} 80000\n"
                    "t_shared_seconds_sum 40000\n",
                    true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_one_head_a_name_in_order),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_histogram),
        cmocka_unit_test(test_labels_are_escaped),
        cmocka_unit_test(test_wrong_registrations),
        cmocka_unit_test(test_updates_from_threads),
    };
    return cmocka_run_group_tests_name("metrics", tests, NULL, NULL);
}
