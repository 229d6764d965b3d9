/* machine: a simulated disk, the model of what its store may say, and the store's index, through several lives. */
#ifndef TANDEM_TESTS_MACHINE_H
#define TANDEM_TESTS_MACHINE_H
#include "model.h"

struct machine {
    struct sim sim;
    struct model model;
    char *index_directory;
    uint64_t limit_size, ballast_size;
    bool segments_only;
    uint64_t direct_size;
};

static inline struct machine *machine_create(uint64_t seed)
{
    struct machine *m = calloc(1, sizeof *m);
    sim_init(&m->sim, "/disk/store", seed);
    model_init(&m->model);
    m->index_directory = fixture_directory();
    return m;
}

static inline void machine_destroy(struct machine *m)
{
    sim_deinit(&m->sim);
    fixture_remove(m->index_directory);
    free(m);
}

static inline int open_machine(struct machine *m, struct store **s)
{
    struct store_config config = fixture_config("/disk/store");
    struct store_env env = {.io = &m->sim.io,
                            .index_directory = m->index_directory,
                            .segments_only = m->segments_only,
                            .write_threads = 1,                /* which write fails is not left to chance */
                            .answer_us = UINT64_C(3600000000), /* slow is not what these are about */
                            .direct_size = m->direct_size};
    struct td_error err = {0};
    config.segment_size = 128 << 10;
    config.limit_size = m->limit_size ? m->limit_size : 1 << 30;
    config.commit_interval_ms = 1000000;
    if (m->ballast_size)
        config.ballast_size = m->ballast_size;
    int rc = store_open_with(&config, &env, s, &err);
    assert_true(rc == 0 || err.text[0]); /* a refusal has its line */
    return rc;
}

static inline void no_faults(struct machine *m)
{
    pthread_mutex_lock(&m->sim.lock);
    memset(m->sim.fail_at, 0, sizeof m->sim.fail_at);
    memset(m->sim.counts, 0, sizeof m->sim.counts);
    memset(m->sim.fail_for, 0, sizeof m->sim.fail_for);
    pthread_mutex_unlock(&m->sim.lock);
}

static inline void fail_next(struct machine *m, enum sim_kind kind, uint64_t count)
{
    pthread_mutex_lock(&m->sim.lock);
    m->sim.fail_at[kind] = m->sim.counts[kind] + 1;
    m->sim.fail_for[kind] = count;
    pthread_mutex_unlock(&m->sim.lock);
}

static inline void set_capacity(struct machine *m, uint64_t capacity)
{
    pthread_mutex_lock(&m->sim.lock);
    m->sim.capacity = capacity;
    pthread_mutex_unlock(&m->sim.lock);
}

static inline void assert_sound(struct machine *m, const char *what, uint64_t position)
{
    if (m->model.violation[0])
        fail_msg("%s at %llu: %s", what, (unsigned long long)position, m->model.violation);
    if (sim_violation(&m->sim))
        fail_msg("%s at %llu: %s", what, (unsigned long long)position, sim_violation(&m->sim));
}

static inline void copy_index(const struct machine *m, const char *from, const char *to)
{
    char command[1100];
    snprintf(command, sizeof command, "cp %s/%s %s/%s", m->index_directory, from, m->index_directory, to);
    assert_int_equal(system(command), 0);
}

/* Blocks of one tenant; returns how many were acknowledged. */
static inline int put_many(struct store *s, uint64_t first, uint64_t count)
{
    int acknowledged = 0;
    for (uint64_t i = first; i < first + count; i++) {
        struct fixture_block f;
        fixture_block_make(&f, i);
        acknowledged += fixture_put(s, "acme", &f) == 0;
    }
    return acknowledged;
}

static inline void compact_all(struct store *s)
{
    uint64_t freed;
    assert_int_equal(store_compact(s, 0, NULL, NULL, &freed, NULL), 0);
}

static inline bool is_there(struct store *s, uint64_t i)
{
    struct fixture_block f;
    fixture_block_make(&f, i);
    return fixture_block_reads(s, "acme", &f);
}

#endif
