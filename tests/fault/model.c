/* model: see model.h. */
#include "model.h"

void model_violate(struct model *m, const char *what)
{
    if (!m->violation[0])
        snprintf(m->violation, sizeof m->violation, "%s", what);
}

bool model_index_is_true(const char *directory)
{
    char path[512];
    snprintf(path, sizeof path, "%s/" INDEX_FILE ".damaged", directory);
    return unlink(path) < 0;
}

void model_init(struct model *m)
{
    memset(m, 0, sizeof *m);
    m->next_number = 1;
    for (uint64_t i = 0; i < MODEL_BLOCKS; i++)
        fixture_block_make(&m->content[i], i);
    for (uint64_t i = 0; i < MODEL_BLOCKS; i++)
        fixture_block_demoted(&m->content[i], "l1", &m->demoted[i]);
}

/* ---- operations ------------------------------------------------------------------------------------------- */

static void on_done(void *ctx, int status)
{
    *(int *)ctx = status; /* read after a flush or the close, which order it */
}

static struct model_op *begin(struct model_id *id, uint32_t number, uint64_t version)
{
    struct model_op *op = &id->ops[id->op_count];
    *op = (struct model_op){{number, version}, 1};
    id->op_count++;
    return op;
}

static void conversation_name(uint32_t index, char out[16])
{
    snprintf(out, 16, "conv-%u", index);
}

/* The text of a number: its length varies, so that records differ in size. */
static size_t conversation_text(uint32_t number, char out[9000])
{
    size_t size = 10 + number * 7919u % 8000;
    memset(out, 'a' + (int)(number % 26), size);
    snprintf(out, 16, "%08u:", number);
    out[9] = ' ';
    return size;
}

static struct model_state conversation_read(struct store *s, uint32_t index, const char **wrong)
{
    char name[16], expected[9000];
    struct model_state state = {0, 0};
    uint8_t *body;
    size_t size;
    conversation_name(index, name);
    if (store_conv_get(s, "acme", "ann", name, &state.version, &body, &size) < 0)
        return (struct model_state){0, 0};
    state.number = size >= 10 ? (uint32_t)strtoul((const char *)body, NULL, 10) : 0;
    if (state.number == 0 || conversation_text(state.number, expected) != size ||
        memcmp(expected, body, size) != 0)
        *wrong = "a conversation has wrong bytes";
    free(body);
    return state;
}

static void step_block(struct model *m, struct store *s, struct sim *sim, bool put)
{
    uint32_t i = sim_random(sim, MODEL_BLOCKS);
    struct model_id *id = &m->blocks[i];
    if (id->op_count == MODEL_HISTORY)
        return;
    struct model_op *op = begin(id, put, 0);
    int rc = put ? store_put(s, "acme", &m->content[i].block, on_done, &op->status)
                 : store_delete(s, "acme", &m->content[i].id, on_done, &op->status);
    if (rc < 0)
        id->op_count--; /* refused: as if never asked */
}

static void step_conversation(struct model *m, struct store *s, struct sim *sim, bool put)
{
    uint32_t i = sim_random(sim, MODEL_CONVERSATIONS);
    struct model_id *id = &m->conversations[i];
    const char *wrong = NULL;
    char name[16], text[9000];
    if (id->op_count == MODEL_HISTORY)
        return;
    conversation_name(i, name);
    struct model_state now = conversation_read(s, i, &wrong);
    struct store_task count = {.run = fixture_count};
    if (!wrong && !m->demotes && store_run_task(s, &count) == -TD_ERR_MISMATCH)
        wrong = "a tenant's counts are not what it has";
    if (wrong)
        model_violate(m, wrong);
    uint32_t number = m->next_number++;
    struct model_op *op = begin(id, put ? number : 0, put ? now.version + 1 : 0);
    size_t size = conversation_text(number, text);
    int rc = put ? store_conv_put(s, "acme", "ann", name, now.version, text, size, on_done, &op->status)
                 : store_conv_delete(s, "acme", "ann", name, on_done, &op->status);
    if (rc < 0)
        id->op_count--;
}

static void step_pin(struct model *m, struct store *s, struct sim *sim, bool pinned)
{
    uint32_t i = sim_random(sim, MODEL_BLOCKS);
    struct model_id *id = &m->pins[i];
    if (id->op_count == MODEL_HISTORY)
        return;
    struct model_op *op = begin(id, pinned, 0);
    op->status = store_pin(s, "acme", &m->content[i].id, pinned, NULL);
}

/* Rewrites segments under everything else. That it may fail is its right; that it loses anything is not. */
static void step_compact(struct store *s, struct sim *sim)
{
    uint64_t freed;
    store_compact(s, sim_random(sim, 2) * 30, NULL, NULL, &freed, NULL);
}

/* A quota that is nearly used up, so that some are demoted and none has to go. */
static void step_demote(struct store *s)
{
    struct store_stats stats;
    uint64_t gone, freed;
    store_flush(s); /* what waits counts */
    store_stats(s, &stats);
    if (store_set_tenant(s, "acme", stats.block_bytes, 0) == 0)
        store_gc(s, NULL, NULL, &gone, &freed, NULL);
    store_set_tenant(s, "acme", 0, 0);
}

/* With the bytes that belong to what it says it is. */
static bool block_reads(struct model *m, struct store *s, uint32_t i)
{
    struct tier_block *b;
    if (store_read_block(s, "acme", &m->content[i].id, &b) < 0)
        return false;
    const struct fixture_block *f = b->block.quality.fidelity == KV_L0 ? &m->content[i] : &m->demoted[i];
    for (int k = 0; k < 2 * FIXTURE_LAYERS; k++)
        if (b->pieces[k].size != f->pieces[k].size ||
            memcmp(b->pieces[k].data, f->pieces[k].data, f->pieces[k].size) != 0)
            model_violate(m, "a block has wrong bytes");
    tier_block_release(b);
    return true;
}

static void count_acknowledged(struct model *m)
{
    m->acknowledged = 0;
    for (size_t i = 0; i < MODEL_BLOCKS; i++)
        for (size_t j = 0; j < m->blocks[i].op_count; j++)
            m->acknowledged += m->blocks[i].ops[j].status == 0;
}

void model_step(struct model *m, struct store *s, struct sim *sim)
{
    switch (sim_random(sim, 10)) {
    case 0:
    case 1:
    case 2:
    case 3:
        step_block(m, s, sim, true);
        break;
    case 4:
        step_block(m, s, sim, false);
        break;
    case 5:
    case 6:
        step_conversation(m, s, sim, true);
        break;
    case 7:
        if (sim_random(sim, 3) == 0)
            step_conversation(m, s, sim, false);
        else
            step_pin(m, s, sim, sim_random(sim, 3) > 0);
        break;
    case 8:
        if (sim_random(sim, 4) == 0)
            step_compact(s, sim);
        else if (m->demotes && sim_random(sim, 3) == 0)
            step_demote(s);
        /* fallthrough */
    default:
        store_flush(s);
        count_acknowledged(m);
        break;
    }
}

/* ---- check ------------------------------------------------------------------------------------------------ */

static bool is_allowed(const struct model_id *id, struct model_state shown)
{
    size_t from = 0; /* first operation whose state is allowed: the last acknowledged one */
    bool base = true;
    for (size_t i = 0; i < id->op_count; i++)
        if (id->ops[i].status == 0) {
            from = i;
            base = false;
        }
    if (base && id->base.number == shown.number && id->base.version == shown.version)
        return true;
    for (size_t i = from; i < id->op_count; i++)
        if (id->ops[i].state.number == shown.number && id->ops[i].state.version == shown.version)
            return true;
    return false;
}

static void settle(struct model_id *id, struct model_state shown)
{
    id->base = shown;
    id->op_count = 0;
}

bool model_check(struct model *m, struct store *s, const struct sim *sim)
{
    struct model_state blocks[MODEL_BLOCKS], conversations[MODEL_CONVERSATIONS], pins[MODEL_BLOCKS];
    const char *wrong = NULL;
    for (uint32_t i = 0; i < MODEL_BLOCKS; i++) {
        struct store_block_info info;
        bool found = store_find(s, "acme", &m->content[i].id, &info) == 0;
        bool reads = block_reads(m, s, i);
        blocks[i] = (struct model_state){reads, 0};
        pins[i] = (struct model_state){store_is_pinned(s, "acme", &m->content[i].id), 0};
        if (found && !reads)
            wrong = "a block was found and could not be read";
    }
    for (uint32_t i = 0; i < MODEL_CONVERSATIONS; i++)
        conversations[i] = conversation_read(s, i, &wrong);
    if (sim && sim->off)
        return false;
    if (wrong)
        model_violate(m, wrong);
    for (uint32_t i = 0; i < MODEL_BLOCKS; i++) {
        bool evicted = m->blocks_may_go && blocks[i].number == 0;
        if (!evicted && !is_allowed(&m->blocks[i], blocks[i]))
            model_violate(m,
                          blocks[i].number ? "a deleted block came back" : "an acknowledged block is lost");
        /* Evicting is not deleting: when the power goes before the segment does, the block is there again. */
        if (evicted && is_allowed(&m->blocks[i], (struct model_state){1, 0}))
            blocks[i].number = 1;
        settle(&m->blocks[i], blocks[i]);
    }
    for (uint32_t i = 0; i < MODEL_BLOCKS; i++) {
        if (!is_allowed(&m->pins[i], pins[i]))
            model_violate(m, pins[i].number ? "a pin that was taken away came back" : "a pin is lost");
        settle(&m->pins[i], pins[i]);
    }
    for (uint32_t i = 0; i < MODEL_CONVERSATIONS; i++) {
        if (!is_allowed(&m->conversations[i], conversations[i]))
            model_violate(m, conversations[i].number
                                 ? "a conversation is in a state that it left or never had"
                                 : "an acknowledged conversation is lost");
        settle(&m->conversations[i], conversations[i]);
    }
    return true;
}
