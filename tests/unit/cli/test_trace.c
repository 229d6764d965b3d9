/* Traces: what is read and what is refused; the optimum against all that can be done; rivals on requests that can be followed by hand. That all
 * replays agree with a second program: tests/e2e/test_bench_trace.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "cli/trace.h"

static void no_progress(void *label, uint64_t done, uint64_t total)
{
    (void)label;
    assert_true(done <= total);
}

static int add(struct trace *t, const char *line, struct td_error *err)
{
    return trace_add_line(t, line, strlen(line), err);
}

static void test_lines(void **state)
{
    (void)state;
    struct trace t = {0};
    struct td_error err = {0};
    assert_int_equal(
        add(&t, "{\"timestamp\": 5, \"input_length\": 9, \"hash_ids\": [70, -3, 9000000000]}\n", &err), 0);
    assert_int_equal(add(&t, "{\"timestamp\": 5, \"hash_ids\": [70, 8]}", &err), 0);
    assert_int_equal(add(&t, "{\"timestamp\": 6, \"hash_ids\": []}", &err), 0);
    assert_int_equal(t.request_count, 3);
    assert_int_equal(t.reference_count, 5);
    assert_int_equal(t.unique, 4);
    const uint32_t numbers[] = {0, 1, 2, 0, 3};
    assert_memory_equal(t.blocks, numbers, sizeof numbers);
    assert_int_equal(t.requests[1].first, 3);
    assert_int_equal(t.requests[1].count, 2);
    assert_int_equal(t.requests[2].time_ms, 6);
    static const char *const BAD[] = {
        "",
        "{",
        "[]",
        "3",
        "{\"timestamp\": 7}",
        "{\"hash_ids\": [1]}",
        "{\"timestamp\": -1, \"hash_ids\": [1]}",
        "{\"timestamp\": 7.5, \"hash_ids\": [1]}",
        "{\"timestamp\": 7, \"hash_ids\": [1.5]}",
        "{\"timestamp\": 7, \"hash_ids\": [\"1\"]}",
        "{\"timestamp\": 7, \"hash_ids\": {}}",
        "{\"timestamp\": 7, \"hash_ids\": [99999999999999999999]}",
        "{\"timestamp\": 7, \"timestamp\": 8, \"hash_ids\": [1]}",
        "{\"timestamp\": 5, \"hash_ids\": [1]}", /* before the last one */
    };
    for (size_t i = 0; i < TD_COUNT(BAD); i++) {
        err = (struct td_error){0};
        assert_int_equal(add(&t, BAD[i], &err), -TD_ERR_FORMAT);
        assert_true(err.text[0] && !strchr(err.text, '\n'));
    }
    assert_int_equal(t.request_count, 3);
    assert_int_equal(t.reference_count, 5);
    trace_free(&t);
}

static void test_longest_chain(void **state)
{
    (void)state;
    struct trace t = {0};
    struct td_error err = {0};
    char *line = malloc(TRACE_CHAIN_MAX * 2 + 100);
    for (uint32_t more = 0; more < 2; more++) {
        size_t at = (size_t)sprintf(line, "{\"timestamp\": 1, \"hash_ids\": [1");
        for (uint32_t i = 1; i < TRACE_CHAIN_MAX + more; i++)
            at += (size_t)sprintf(line + at, ",1");
        sprintf(line + at, "]}");
        assert_int_equal(add(&t, line, &err), more ? -TD_ERR_LIMIT : 0);
    }
    struct trace_result r;
    assert_int_equal(trace_replay_tandem(&t, 5, &r),
                     0); /* one id again and again is no chain, but no harm either */
    trace_free(&t);
    free(line);
}

static void write_file(const char *path, const char *text, size_t size)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, size, f), size);
    fclose(f);
}

static void test_files(void **state)
{
    (void)state;
    struct trace t;
    struct td_error err = {0};
    char path[64], *large = malloc(TRACE_LINE_MAX + 16);
    snprintf(path, sizeof path, "/tmp/test_trace.%d", (int)getpid());
    static const char GOOD[] =
        "{\"timestamp\": 1, \"hash_ids\": [1]}\n\n{\"timestamp\": 2, \"hash_ids\": [1]}";
    write_file(path, GOOD, sizeof GOOD - 1);
    assert_int_equal(trace_load(&t, path, no_progress, NULL, &err), 0);
    assert_int_equal(t.request_count, 2);
    trace_free(&t);
    static const char BAD[] =
        "{\"timestamp\": 1, \"hash_ids\": [1]}\n\n{\"timestamp\": 2, \"hash_ids\": [1}\n";
    write_file(path, BAD, sizeof BAD - 1);
    assert_int_equal(trace_load(&t, path, no_progress, NULL, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, "line 3: "));
    assert_non_null(strstr(err.text, path));
    trace_free(&t);
    memset(large, ' ', TRACE_LINE_MAX + 16);
    write_file(path, large, TRACE_LINE_MAX + 16);
    assert_int_equal(trace_load(&t, path, no_progress, NULL, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, "line 1: "));
    trace_free(&t);
    write_file(path, "", 0);
    assert_int_equal(trace_load(&t, path, no_progress, NULL, &err), -TD_ERR_FORMAT);
    trace_free(&t);
    unlink(path);
    assert_int_equal(trace_load(&t, path, no_progress, NULL, &err), -TD_ERR_IO);
    trace_free(&t);
    free(large);
}

/* ---- the optimum ------------------------------------------------------------------------------------------ */

enum { NODES = 7, REQUESTS = 9 };

/* Every way to keep at most `capacity` of what was held and was just computed, after every request: the most blocks in leading runs. */
static uint64_t best_of_all(const struct trace *t, uint32_t capacity)
{
    int now[1 << NODES], next[1 << NODES], best = 0;
    memset(now, 0xff, sizeof now);
    now[0] = 0;
    for (size_t i = 0; i < t->request_count; i++) {
        const struct trace_request *r = &t->requests[i];
        unsigned chain = 0;
        memset(next, 0xff, sizeof next);
        for (uint32_t k = 0; k < r->count; k++)
            chain |= 1u << t->blocks[r->first + k];
        for (unsigned held = 0; held < 1u << NODES; held++) {
            int run = 0;
            if (now[held] < 0)
                continue;
            while ((uint32_t)run < r->count && held >> t->blocks[r->first + (uint32_t)run] & 1)
                run++;
            for (unsigned keep = held | chain;; keep = (keep - 1) & (held | chain)) {
                if (__builtin_popcount(keep) <= (int)capacity)
                    next[keep] = TD_MAX(next[keep], now[held] + run);
                if (keep == 0)
                    break;
            }
        }
        memcpy(now, next, sizeof now);
    }
    for (unsigned held = 0; held < 1u << NODES; held++)
        best = TD_MAX(best, now[held]);
    return (uint64_t)best;
}

static void make_random(struct trace *t, unsigned *seed)
{
    memset(t, 0, sizeof *t);
    for (int i = 0; i < REQUESTS; i++) { /* a walk from the root of a binary tree down */
        char line[100];
        size_t at = (size_t)snprintf(line, sizeof line, "{\"timestamp\": %d, \"hash_ids\": [", 5000 * i);
        for (unsigned node = 1; node <= NODES; node = 2 * node + (*seed >> 16 & 1)) {
            at += (size_t)snprintf(line + at, sizeof line - at, "%s%u", node > 1 ? "," : "", node);
            *seed = *seed * 1103515245u + 12345u;
            if (node > 1 && (*seed >> 20) % 3 == 0)
                break;
        }
        snprintf(line + at, sizeof line - at, "]}");
        assert_int_equal(add(t, line, NULL), 0);
    }
}

static void test_nothing_beats_belady(void **state)
{
    (void)state;
    unsigned seed = 1;
    for (int round = 0; round < 200; round++) {
        struct trace t;
        make_random(&t, &seed);
        for (uint32_t capacity = 1; capacity <= 5; capacity++) {
            struct trace_result belady, other;
            assert_int_equal(trace_replay_belady(&t, capacity, &belady), 0);
            assert_int_equal(belady.hits, best_of_all(&t, capacity));
            assert_int_equal(trace_replay_tandem(&t, capacity, &other), 0);
            assert_true(other.hits <= belady.hits);
            assert_int_equal(trace_replay_lru(&t, capacity, &other), 0);
            assert_true(other.hits <= belady.hits);
        }
        trace_free(&t);
    }
}

static void test_by_hand(void **state)
{
    (void)state;
    struct trace t = {0};
    struct trace_result r;
    static const char *const LINES[] = {
        "{\"timestamp\": 1, \"hash_ids\": [1, 2, 3]}", /* LRU of 2 keeps 1 and 2 */
        "{\"timestamp\": 2, \"hash_ids\": [1, 2, 3]}", /* 2 hits */
        "{\"timestamp\": 3, \"hash_ids\": [9]}",       /* 2 goes, 9 and 1 stay */
        "{\"timestamp\": 4, \"hash_ids\": [1, 2]}",    /* 1 hit */
    };
    for (size_t i = 0; i < TD_COUNT(LINES); i++)
        assert_int_equal(add(&t, LINES[i], NULL), 0);
    assert_int_equal(trace_replay_lru(&t, 2, &r), 0);
    assert_int_equal(r.hits, 3);
    assert_int_equal(r.inserted, 6);
    assert_int_equal(trace_replay_belady(&t, 2, &r), 0);
    assert_int_equal(r.hits, 4); /* never takes 3 and 9 */
    assert_int_equal(r.inserted, 2);
    assert_int_equal(trace_replay_s3fifo(&t, 4, &r), 0); /* room for all four */
    assert_int_equal(r.hits, 5);
    assert_int_equal(r.inserted, 4);
    assert_int_equal(trace_replay_tandem(&t, 4, &r), 0);
    assert_int_equal(r.hits, 5);
    assert_int_equal(r.inserted, 4);
    trace_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),   cmocka_unit_test(test_longest_chain),
        cmocka_unit_test(test_files),   cmocka_unit_test(test_nothing_beats_belady),
        cmocka_unit_test(test_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
