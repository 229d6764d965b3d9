/* edge_scene: a prompt, an edge that has computed its bottom layers, and the reply that one machine gives, on the engine's rig. */
#ifndef TANDEM_TESTS_CLOUD_EDGE_SCENE_H
#define TANDEM_TESTS_CLOUD_EDGE_SCENE_H
#include "engine_rig.h"

#define VOCAB 256

#define PROMPT 200 /* three blocks and eight tokens */

#define REPLY 70

struct scene {
    struct rig *rig;
    struct rig_edge edge;
    struct client client;
    int32_t prompt[PROMPT], reply[REPLY];
};

static inline struct scene *scene_open(uint32_t layers, struct rig_options options)
{
    struct scene *s = calloc(1, sizeof *s);
    s->rig = rig_open(options);
    rig_ids(s->prompt, PROMPT, VOCAB, 77);
    rig_reference(s->rig, s->prompt, PROMPT, rig_greedy(REPLY), s->reply);
    s->edge = rig_edge_compute(s->rig, s->prompt, PROMPT, layers);
    return s;
}

static inline void scene_close(struct scene *s)
{
    rig_edge_free(&s->edge);
    rig_until(s->rig,
              atomic_load(&s->rig->engine->staged_size) == 0); /* late pieces are still being decoded */
    rig_close(s->rig);
    free(s);
}

static inline void open_edge(struct scene *s)
{
    client_send(s->rig, &s->client, client_open_of(&s->client, s->prompt, PROMPT, 0));
}

static inline void plan(struct scene *s, uint32_t epoch, const struct plan_range *ranges, uint32_t count)
{
    assert_int_equal(engine_plan(s->rig->engine, s->client.sequence, epoch, ranges, count, false), 0);
}

static inline void plan_one(struct scene *s, uint32_t epoch, uint32_t first, uint8_t codec, uint8_t dtype)
{
    struct plan_range range = {first, PROMPT - first, s->edge.layers, codec, dtype};
    plan(s, epoch, &range, 1);
}

static inline void start(struct scene *s, struct engine_generate generate)
{
    assert_int_equal(engine_start(s->rig->engine, s->client.sequence, &generate), 0);
}

/* OPEN, PLAN and GENERATE, as in one flight. */
static inline void open_plan_start(struct scene *s, uint8_t codec, uint8_t dtype)
{
    open_edge(s);
    plan_one(s, 1, 0, codec, dtype);
    start(s, rig_greedy(REPLY));
}

static inline size_t send_hidden_all(struct scene *s, uint32_t epoch, uint32_t first, uint32_t step,
                                     uint8_t dtype)
{
    size_t size = 0;
    if (s->edge.layers == s->rig->model->params.layer_count)
        return rig_send_hidden(&s->edge, &s->client, epoch, PROMPT - 1, 1, dtype);
    for (; first < PROMPT; first += step)
        size += rig_send_hidden(&s->edge, &s->client, epoch, first, TD_MIN(step, PROMPT - first), dtype);
    return size;
}

static inline void finish(struct scene *s)
{
    rig_until(s->rig, s->client.done || s->client.failed);
    assert_reply(&s->client, s->reply, REPLY);
}
static inline struct engine_open open_as(struct client *c, const char *principal, const int32_t *ids,
                                         uint32_t count)
{
    struct engine_open open = client_open_of(c, ids, count, 0);
    snprintf(open.principal, sizeof open.principal, "%s", principal);
    kv_principal_key(open.shared_key, open.principal, open.own_key);
    return open;
}

/* OPEN, PLAN and GENERATE of a prompt whose rows do not come. */
static inline void stall_as(struct scene *s, struct client *c, const char *tenant, const char *principal,
                            bool generate)
{
    struct plan_range range = {0, PROMPT, generate ? s->edge.layers : 0, generate ? KV_L0 : 0, HIDDEN_F32};
    struct engine_generate greedy = rig_greedy(REPLY);
    struct engine_open open = open_as(c, principal, s->prompt, PROMPT);
    snprintf(open.tenant, sizeof open.tenant, "%s", tenant);
    client_send(s->rig, c, open);
    assert_int_equal(engine_plan(s->rig->engine, c->sequence, 1, &range, 1, false), 0);
    if (generate)
        assert_int_equal(engine_start(s->rig->engine, c->sequence, &greedy), 0);
}

static inline void stall(struct scene *s, struct client *c, const char *principal, bool generate)
{
    stall_as(s, c, "acme", principal, generate);
}

static inline const struct sequence *sequence_of(const struct scene *s, const struct client *c)
{
    return engine_find(s->rig->engine, c->sequence);
}

#endif
