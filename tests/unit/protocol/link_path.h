/* link_path: a simulated path between two links: a bottleneck with a queue, then a delay, on a virtual clock. */
#ifndef TANDEM_TESTS_LINK_PATH_H
#define TANDEM_TESTS_LINK_PATH_H
#include "frames.h"
#include "protocol/link_internal.h"

#define MS      UINT64_C(1000)
#define SECOND  UINT64_C(1000000)
#define MBIT    UINT64_C(125000) /* bytes/s */
#define FLIGHTS 65536

struct flight { /* a frame on its way */
    uint64_t arrives_us;
    uint8_t *bytes;
    size_t size;
};
struct pipe {
    uint64_t rate, delay_us; /* bytes/s; one way */
    uint64_t free_us;        /* the bottleneck has sent everything by then */
    struct flight flights[FLIGHTS];
    uint32_t head, count;
};
struct path {
    struct owner edge, cloud;
    struct pipe up, down;
    uint64_t now_us;
    size_t queued_target; /* keep so much bulk queued at the edge */
    uint64_t longest_queue_us, received_size;
    bool cancel_seen;
};
static struct path path;

static inline void pipe_put(struct pipe *p, const uint8_t *bytes, size_t size, uint64_t now_us)
{
    assert_true(p->count < FLIGHTS);
    p->free_us = TD_MAX(p->free_us, now_us) + size * SECOND / p->rate;
    struct flight *f = &p->flights[(p->head + p->count++) % FLIGHTS];
    *f = (struct flight){p->free_us + p->delay_us, malloc(size), size};
    memcpy(f->bytes, bytes, size);
}

static inline bool pipe_deliver(struct pipe *p, struct owner *to, uint64_t now_us)
{
    if (p->count == 0 || p->flights[p->head].arrives_us > now_us)
        return false;
    struct flight f = p->flights[p->head];
    p->head = (p->head + 1) % FLIGHTS;
    p->count--;
    to->now_us = now_us;
    assert_int_equal(link_receive(to->link, f.bytes, f.size, now_us), 0);
    free(f.bytes);
    return true;
}

static inline uint64_t pipe_wait_us(const struct pipe *p, uint64_t now_us)
{
    if (p->count == 0)
        return UINT64_MAX;
    return p->flights[p->head].arrives_us > now_us ? p->flights[p->head].arrives_us - now_us : 0;
}

static inline void consume_it(struct owner *o, const struct wire_frame *f)
{
    if (frame_is_bulk(f->type)) {
        path.received_size += f->payload.size;
        link_consumed(o->link, f->stream, f->payload.size);
    }
    path.cancel_seen |= f->type == FRAME_CANCEL;
}

static inline void path_start(uint64_t rate, uint64_t round_trip_us)
{
    path.edge = (struct owner){0};
    path.up = (struct pipe){.rate = rate, .delay_us = round_trip_us / 2};
    path.down = (struct pipe){.rate = rate, .delay_us = round_trip_us / 2};
    path.longest_queue_us = path.received_size = 0;
    path.queued_target = 0;
    cloud_ready(&path.cloud, 64 << 20, 32 << 20);
    edge_ready(&path.edge, 64 << 20, 32 << 20);
    assert_int_equal(edge_open(&path.edge, 1), 0);
    path.cloud.react = consume_it;
    path.now_us = path.edge.now_us;
    path.edge.link->ping_us = 0; /* its first ping was lost in the greeting */
    path.edge.link->ping_open = false;
}

static inline void path_stop(void)
{
    while (path.up.count || path.down.count) {
        struct pipe *p = path.up.count ? &path.up : &path.down;
        free(p->flights[p->head].bytes);
        p->head = (p->head + 1) % FLIGHTS;
        p->count--;
    }
    owner_stop(&path.edge), owner_stop(&path.cloud);
}

static inline void path_queue(size_t size)
{
    Tandem__KvBlock m = kv_valid(0, 0);
    assert_int_equal(link_send_bulk(path.edge.link, FRAME_KV_BLOCK, 1, &m.base, 1, calloc(1, size), size), 0);
}

static inline void path_send(struct owner *o, struct pipe *p)
{
    static uint8_t bytes[LIMIT_FRAME_SIZE];
    for (;;) {
        int64_t size = link_next(o->link, bytes, sizeof bytes, path.now_us);
        assert_true(size >= 0);
        if (size == 0)
            return;
        pipe_put(p, bytes, (size_t)size, path.now_us);
    }
}

static inline void path_run(uint64_t for_us)
{
    uint64_t end_us = path.now_us + for_us;
    struct link_stats stats;
    while (path.now_us < end_us) {
        link_stats(path.edge.link, &stats);
        while (stats.bulk_queued_size + 100000 <= path.queued_target) {
            path_queue(100000);
            stats.bulk_queued_size += 100000;
        }
        path_send(&path.edge, &path.up);
        path_send(&path.cloud, &path.down);
        if (path.up.free_us > path.now_us)
            path.longest_queue_us = TD_MAX(path.longest_queue_us, path.up.free_us - path.now_us);
        while (pipe_deliver(&path.up, &path.cloud, path.now_us) ||
               pipe_deliver(&path.down, &path.edge, path.now_us))
            ;
        assert_int_equal(link_tick(path.edge.link, path.now_us), 0);
        assert_int_equal(link_tick(path.cloud.link, path.now_us), 0);
        uint64_t wait_us =
            TD_MIN(link_wait_us(path.edge.link, path.now_us), link_wait_us(path.cloud.link, path.now_us));
        wait_us = TD_MIN(wait_us,
                         TD_MIN(pipe_wait_us(&path.up, path.now_us), pipe_wait_us(&path.down, path.now_us)));
        path.now_us += TD_MIN(wait_us, end_us - path.now_us);
    }
    path.edge.now_us = path.cloud.now_us = path.now_us;
}

static inline uint64_t estimate(void)
{
    struct link_stats stats;
    link_stats(path.edge.link, &stats);
    return stats.rate_bytes_per_s;
}

#define assert_about(value, expected, percent)                                                               \
    assert_in_range((value), (expected) * (100 - (percent)) / 100, (expected) * (100 + (percent)) / 100)

static const struct {
    uint64_t rate, round_trip_us;
} paths[] = {
    {1 * MBIT, 5 * MS},    {1 * MBIT, 200 * MS},  {5 * MBIT, 50 * MS},
    {20 * MBIT, 20 * MS},  {20 * MBIT, 300 * MS}, {100 * MBIT, 2 * MS},
    {100 * MBIT, 80 * MS}, {1000 * MBIT, 1 * MS}, {1000 * MBIT, 30 * MS},
};

#endif
