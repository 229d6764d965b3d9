/* fuzz_trace: lines of a request trace. What is taken must keep the reader's promises, and every policy must be able to replay it. */
#include "cli/trace.h"
#include <stdlib.h>

static void require(bool holds)
{
    if (!holds)
        abort();
}

static void check(const struct trace *t)
{
    uint64_t references = 0;
    for (size_t i = 0; i < t->request_count; i++) {
        require(t->requests[i].first == references &&
                (i == 0 || t->requests[i - 1].time_ms <= t->requests[i].time_ms));
        references += t->requests[i].count;
    }
    require(references == t->reference_count);
    for (size_t i = 0; i < t->reference_count; i++)
        require(t->blocks[i] < t->unique);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const trace_replay REPLAYS[] = {trace_replay_tandem, trace_replay_lru, trace_replay_s3fifo,
                                           trace_replay_belady};
    struct trace t = {0};
    for (const uint8_t *line = data, *end = data + size; line < end;) {
        const uint8_t *stop = memchr(line, '\n', (size_t)(end - line));
        size_t length = (size_t)((stop ? stop : end) - line);
        struct td_error err = {0};
        int rc = trace_add_line(&t, (const char *)line, length, &err);
        require(rc == 0 || (err.code == rc && err.text[0] && !strchr(err.text, '\n')));
        line += length + 1;
    }
    check(&t);
    for (size_t i = 0; i < TD_COUNT(REPLAYS) && t.unique; i++) {
        struct trace_result r;
        require(REPLAYS[i](&t, t.unique / 2 + 1, &r) == 0 && r.hits <= t.reference_count);
    }
    trace_free(&t);
    return 0;
}
