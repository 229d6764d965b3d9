/* fake_engine: engine.h without an engine: commands are written down and answered as the test says, events come when the test says so,
 * on the test's thread. For tests of the two doors, where every order of events matters and none may depend on a model's speed. */
#ifndef TANDEM_TESTS_FAKE_ENGINE_H
#define TANDEM_TESTS_FAKE_ENGINE_H
#include "cloud/engine.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <time.h>
#include <cmocka.h>

#define FAKE_COMMANDS_MAX 512
#define FAKE_WAIT_S       60

struct fake_command {
    char name[8]; /* open, plan, hidden, kv, start, cancel, detach */
    uint64_t sequence;
    struct engine_open open; /* ids: owned here */
    struct plan_range ranges[LIMIT_RANGES];
    struct engine_generate generate;
    uint32_t epoch, count, first_token, layer, block_index, dtype, keep_count;
    size_t size;
    uint8_t first_byte;
    bool finished, resumes;
};

struct engine { /* one, static */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct fake_command commands[FAKE_COMMANDS_MAX];
    unsigned count, taken;
    uint64_t sequences;
    uint32_t waiting; /* what it says of itself */
    int refuse_code;  /* what commands called refuse_name answer, refuse_times more times */
    char refuse_name[8];
    unsigned refuse_times;
};
static struct engine fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static inline void fake_refuse(const char *name, int code, unsigned times)
{
    pthread_mutex_lock(&fake.lock);
    strcpy(fake.refuse_name, name);
    fake.refuse_code = code;
    fake.refuse_times = times;
    pthread_mutex_unlock(&fake.lock);
}

/* Take the command over, or say why not. */
static inline int fake_command(struct fake_command *c, const char *name)
{
    pthread_mutex_lock(&fake.lock);
    int rc = 0;
    if (fake.refuse_times && strcmp(name, fake.refuse_name) == 0) {
        fake.refuse_times--;
        rc = fake.refuse_code;
    } else if (fake.count == FAKE_COMMANDS_MAX) {
        abort();
    } else {
        strcpy(c->name, name);
        if (strcmp(name, "open") == 0)
            c->sequence = ++fake.sequences;
        fake.commands[fake.count++] = *c;
        pthread_cond_broadcast(&fake.changed);
    }
    pthread_mutex_unlock(&fake.lock);
    return rc;
}

/* The next command, whose name the test knows. */
static inline struct fake_command *fake_next(const char *name)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += FAKE_WAIT_S;
    pthread_mutex_lock(&fake.lock);
    while (fake.taken == fake.count)
        if (pthread_cond_timedwait(&fake.changed, &fake.lock, &until) != 0)
            break;
    struct fake_command *c = fake.taken < fake.count ? &fake.commands[fake.taken++] : NULL;
    pthread_mutex_unlock(&fake.lock);
    if (!c)
        fail_msg("no command came; %s was expected", name);
    assert_string_equal(c->name, name);
    return c;
}

static inline bool fake_is_quiet(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
    pthread_mutex_lock(&fake.lock);
    bool quiet = fake.taken == fake.count;
    pthread_mutex_unlock(&fake.lock);
    return quiet;
}

static inline void fake_reset(void)
{
    for (unsigned i = 0; i < fake.count; i++)
        free(fake.commands[i].open.ids), free(fake.commands[i].open.names);
    fake.count = fake.taken = fake.refuse_times = fake.waiting = 0;
}

/* ---- events ---- */

static inline void fake_emit(const struct fake_command *open, struct engine_event event)
{
    event.sequence = open->sequence;
    open->open.sink(open->open.sink_ctx, &event);
}

static inline void fake_opened(const struct fake_command *open, uint32_t cached)
{
    struct engine_event e = {.type = ENGINE_OPENED};
    e.opened.cached_tokens = e.opened.cached_memory = cached;
    e.opened.prefill_tokens_per_s = 1234;
    fake_emit(open, e);
}

static inline void fake_tokens(const struct fake_command *open, uint32_t index, const int32_t *ids,
                               uint32_t count)
{
    struct engine_event e = {.type = ENGINE_TOKENS};
    e.tokens.index = index;
    e.tokens.count = count;
    e.tokens.ids = ids;
    fake_emit(open, e);
}

/* The prompt of `open` and this reply. */
static inline void fake_done(const struct fake_command *open, uint32_t finish, const int32_t *reply,
                             uint32_t count)
{
    struct engine_event e = {.type = ENGINE_DONE};
    uint32_t prompt = open->open.prompt_count;
    int32_t *ids = malloc((prompt + count + 1) * sizeof *ids);
    memcpy(ids, open->open.ids, prompt * sizeof *ids);
    if (count)
        memcpy(ids + prompt, reply, count * sizeof *ids);
    e.done.finish = finish;
    e.done.prompt_tokens = prompt;
    e.done.completion_tokens = count;
    e.done.prefill_us = 1000;
    e.done.cached_tokens = 3, e.done.read_tokens = 2;
    e.done.decode_us = 2000000;
    e.done.ids = ids;
    e.done.ids_count = prompt + count;
    fake_emit(open, e);
    free(ids);
}

static inline void fake_failed(const struct fake_command *open, int code, const char *text,
                               uint32_t retry_after_ms)
{
    struct engine_event e = {.type = ENGINE_FAILED};
    e.failed.code = code;
    e.failed.text = text;
    e.failed.retry_after_ms = retry_after_ms;
    fake_emit(open, e);
}

/* ---- engine.h ---- */

int engine_open(struct engine *e, struct engine_open *open, uint64_t *sequence)
{
    struct fake_command c = {.open = *open};
    (void)e;
    int rc = fake_command(&c, "open");
    *sequence = c.sequence;
    if (rc < 0)
        free(open->ids);
    return rc;
}

int engine_patience(struct engine *e, uint64_t sequence, uint32_t rows_ms, uint32_t rows_token_us,
                    uint32_t kv_ms)
{
    (void)e, (void)sequence, (void)rows_ms, (void)rows_token_us, (void)kv_ms;
    return 0;
}

int engine_plan(struct engine *e, uint64_t sequence, uint32_t epoch, const struct plan_range *ranges,
                uint32_t count, bool resumes)
{
    struct fake_command c = {.sequence = sequence, .epoch = epoch, .count = count, .resumes = resumes};
    (void)e;
    memcpy(c.ranges, ranges, count * sizeof *ranges);
    return fake_command(&c, "plan");
}

int engine_hidden(struct engine *e, uint64_t sequence, uint32_t epoch, uint32_t first_token, uint32_t count,
                  uint32_t layer, uint8_t dtype, uint8_t *payload, size_t size)
{
    struct fake_command c = {.sequence = sequence,
                             .epoch = epoch,
                             .first_token = first_token,
                             .count = count,
                             .layer = layer,
                             .dtype = dtype,
                             .size = size,
                             .first_byte = payload[0]};
    (void)e;
    free(payload);
    return fake_command(&c, "hidden");
}

int engine_kv(struct engine *e, uint64_t sequence, uint32_t epoch, uint32_t block_index, uint8_t *piece,
              size_t size)
{
    struct fake_command c = {.sequence = sequence,
                             .epoch = epoch,
                             .block_index = block_index,
                             .size = size,
                             .first_byte = piece[0]};
    (void)e;
    free(piece);
    return fake_command(&c, "kv");
}

int engine_start(struct engine *e, uint64_t sequence, const struct engine_generate *generate)
{
    struct fake_command c = {.sequence = sequence, .generate = *generate};
    (void)e;
    return fake_command(&c, "start");
}

int engine_cancel(struct engine *e, uint64_t sequence, bool finished, uint32_t keep_count)
{
    struct fake_command c = {.sequence = sequence, .finished = finished, .keep_count = keep_count};
    (void)e;
    return fake_command(&c, "cancel");
}

void engine_stats(struct engine *e, struct engine_stats *out)
{
    pthread_mutex_lock(&e->lock);
    *out = (struct engine_stats){.waiting = e->waiting};
    pthread_mutex_unlock(&e->lock);
}

int engine_detach(struct engine *e, uint64_t sequence)
{
    struct fake_command c = {.sequence = sequence};
    (void)e;
    return fake_command(&c, "detach");
}

#endif
