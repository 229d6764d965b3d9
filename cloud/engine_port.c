/* engine_port: see engine_port.h. */
#include "cloud/engine_port.h"
#include "shared/crypto.h"
#include <stdatomic.h>
#include <stdlib.h>

#define BUCKETS 256u /* a power of two */

struct ending { /* a command that waits for room in the engine's queue */
    struct ending *next;
    uint64_t sequence;
    bool detach, finished;
    uint32_t keep_count;
};

struct event_copy {
    struct inbox_item item;
    struct engine_port *port;
    size_t size; /* of the whole allocation */
    struct engine_event event;
    _Alignas(16) uint8_t arrays[];
};

struct engine_port {
    struct engine *engine;
    struct inbox *inbox;
    struct engine_listener *buckets[BUCKETS];
    size_t count;
    struct ending *endings;
    atomic_size_t copied_size; /* of event copies on their way */
    atomic_bool lost;          /* an event could not be copied; lost_item is on its way */
    struct lost_item {
        struct inbox_item item;
        struct engine_port *port;
    } lost_item;
};

struct engine_port *engine_port_create(struct engine *engine, struct inbox *inbox)
{
    struct engine_port *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->engine = engine;
    p->inbox = inbox;
    return p;
}

void engine_port_stop(struct engine_port *p)
{
    p->engine = NULL;
}

void engine_port_destroy(struct engine_port *p)
{
    if (!p)
        return;
    inbox_drain(p->inbox); /* copies on their way refer to the port */
    while (p->endings) {
        struct ending *next = p->endings->next;
        free(p->endings);
        p->endings = next;
    }
    free(p);
}

/* ---- who listens ---- */

static struct engine_listener **bucket_of(struct engine_port *p, uint64_t sequence)
{
    return &p->buckets[(sequence ^ sequence >> 32) & (BUCKETS - 1)];
}

static struct engine_listener *find(struct engine_port *p, uint64_t sequence)
{
    struct engine_listener *l = *bucket_of(p, sequence);
    while (l && l->sequence != sequence)
        l = l->next;
    return l;
}

static void bind(struct engine_port *p, struct engine_listener *l)
{
    struct engine_listener **bucket = bucket_of(p, l->sequence);
    l->next = *bucket;
    *bucket = l;
    l->bound = true;
    p->count++;
}

void engine_port_unbind(struct engine_port *p, struct engine_listener *l)
{
    if (!l->bound)
        return;
    struct engine_listener **at = bucket_of(p, l->sequence);
    while (*at != l)
        at = &(*at)->next;
    *at = l->next;
    l->bound = false;
    p->count--;
}

struct engine *engine_port_engine(struct engine_port *p)
{
    return p->engine;
}

/* ---- events ---- */

static void on_copy(struct inbox_item *item)
{
    struct event_copy *copy = (struct event_copy *)item;
    struct engine_port *p = copy->port;
    struct engine_listener *l = find(p, copy->event.sequence);
    if (l)
        l->on_event(l, &copy->event);
    atomic_fetch_sub(&p->copied_size, copy->size);
    crypto_wipe(copy->arrays, copy->size - sizeof *copy); /* token ids */
    free(copy);
}

/* Listeners may unbind any others while they are told, so each round starts again. */
static void on_lost(struct inbox_item *item)
{
    struct engine_port *p = ((struct lost_item *)item)->port;
    atomic_store(&p->lost, false);
    for (unsigned i = 0; i < BUCKETS; i++)
        while (p->buckets[i]) {
            struct engine_listener *l = p->buckets[i];
            struct engine_event failed = {.type = ENGINE_FAILED, .sequence = l->sequence};
            failed.failed.code = -TD_ERR_FULL;
            failed.failed.text = "the node is overloaded: what it had to say did not fit in memory";
            failed.failed.retry_after_ms = 1000;
            struct engine_listener told = *l;
            engine_port_cancel(p, l, false, 0); /* unbinds */
            told.on_event(l, &failed);
        }
}

static void lose(struct engine_port *p)
{
    if (atomic_exchange(&p->lost, true))
        return;
    p->lost_item = (struct lost_item){{NULL, on_lost}, p};
    inbox_push(p->inbox, &p->lost_item.item);
}

/* What the event points to: up to two arrays of known sizes. */
static void arrays_of(const struct engine_event *e, struct span out[2])
{
    out[0] = out[1] = (struct span){0};
    switch (e->type) {
    case ENGINE_OPENED:
        out[0] = (struct span){(const uint8_t *)e->opened.ranges,
                               e->opened.range_count * sizeof *e->opened.ranges};
        break;
    case ENGINE_TOKENS:
        if (e->tokens.sampled)
            out[1] = (struct span){(const uint8_t *)e->tokens.sampled,
                                   e->tokens.count * sizeof *e->tokens.sampled};
        out[0] = (struct span){(const uint8_t *)e->tokens.ids, e->tokens.count * sizeof *e->tokens.ids};
        break;
    case ENGINE_DONE:
        out[0] = (struct span){(const uint8_t *)e->done.ids, e->done.ids_count * sizeof *e->done.ids};
        break;
    case ENGINE_FAILED:
        if (e->failed.text)
            out[0] = (struct span){(const uint8_t *)e->failed.text, strlen(e->failed.text) + 1};
        break;
    default:
        break;
    }
}

static void repoint(struct engine_event *e, const uint8_t *first, const uint8_t *second)
{
    if (e->type == ENGINE_OPENED) {
        e->opened.ranges = (const struct plan_range *)(const void *)first;
    } else if (e->type == ENGINE_TOKENS) {
        e->tokens.ids = (const int32_t *)(const void *)first;
        if (e->tokens.sampled)
            e->tokens.sampled = (const struct sampled *)(const void *)second;
    } else if (e->type == ENGINE_DONE) {
        e->done.ids = (const int32_t *)(const void *)first;
    } else if (e->type == ENGINE_FAILED && e->failed.text) {
        e->failed.text = (const char *)first;
    }
}

/* On the engine's thread. */
static void on_engine_event(void *ctx, const struct engine_event *event)
{
    struct engine_port *p = ctx;
    struct span arrays[2];
    arrays_of(event, arrays);
    size_t second = align_up(arrays[0].size, 16);
    size_t size = sizeof(struct event_copy) + second + arrays[1].size;
    if (atomic_fetch_add(&p->copied_size, size) + size > ENGINE_PORT_SIZE_MAX) {
        atomic_fetch_sub(&p->copied_size, size);
        lose(p);
        return;
    }
    struct event_copy *copy = malloc(size);
    if (!copy) {
        atomic_fetch_sub(&p->copied_size, size);
        lose(p);
        return;
    }
    *copy = (struct event_copy){{NULL, on_copy}, p, size, *event};
    if (arrays[0].size)
        memcpy(copy->arrays, arrays[0].data, arrays[0].size);
    if (arrays[1].size)
        memcpy(copy->arrays + second, arrays[1].data, arrays[1].size);
    repoint(&copy->event, copy->arrays, copy->arrays + second);
    inbox_push(p->inbox, &copy->item);
}

/* ---- commands ---- */

int engine_port_open(struct engine_port *p, struct engine_open *open, struct engine_listener *l)
{
    open->sink = on_engine_event;
    open->sink_ctx = p;
    l->bound = false;
    if (!p->engine) {
        crypto_wipe(open->ids, (open->prompt_count + open->held_count) * sizeof *open->ids);
        free(open->ids);
        free(open->names);
        return -TD_ERR_CLOSED;
    }
    int rc = engine_open(p->engine, open, &l->sequence);
    if (rc == 0)
        bind(p, l); /* events run later on this very thread: none can have been missed */
    return rc;
}

static int send_ending(struct engine_port *p, const struct ending *e)
{
    return e->detach ? engine_detach(p->engine, e->sequence)
                     : engine_cancel(p->engine, e->sequence, e->finished, e->keep_count);
}

static bool is_no_room(int code)
{
    return code == -TD_ERR_FULL || code == -TD_ERR_NOMEM;
}

static void end_sequence(struct engine_port *p, struct ending ending)
{
    if (!p->engine || !is_no_room(send_ending(p, &ending)))
        return;
    struct ending *e = malloc(sizeof *e);
    if (!e)
        return; /* it ends by itself: at its token limit, or when the engine stops */
    *e = ending;
    e->next = p->endings;
    p->endings = e;
}

void engine_port_tick(struct engine_port *p)
{
    for (struct ending **at = &p->endings; *at;) {
        struct ending *e = *at;
        if (p->engine && is_no_room(send_ending(p, e)))
            return;
        *at = e->next;
        free(e);
    }
}

void engine_port_cancel(struct engine_port *p, struct engine_listener *l, bool finished, uint32_t keep_count)
{
    if (!l->bound)
        return;
    if (!finished)
        engine_port_unbind(p, l);
    end_sequence(p, (struct ending){NULL, l->sequence, false, finished, keep_count});
}

void engine_port_detach(struct engine_port *p, struct engine_listener *l)
{
    if (!l->bound)
        return;
    engine_port_unbind(p, l);
    end_sequence(p, (struct ending){NULL, l->sequence, true, false, 0});
}
