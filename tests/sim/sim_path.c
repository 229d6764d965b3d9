/* sim_path: random numbers and the path. A pipe is a bottleneck (its rate, one frame after the other) with the sender's socket in front
 * of it and a delay behind it. The socket takes a frame whenever less than SIM_LOWAT_SIZE is unsent in it, as TCP_NOTSENT_LOWAT does. */
#include "sim.h"
#include <stdlib.h>

uint64_t rng_next(struct rng *r) /* splitmix64 */
{
    uint64_t z = r->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

uint64_t rng_below(struct rng *r, uint64_t bound)
{
    return rng_next(r) % bound;
}

uint64_t rng_between(struct rng *r, uint64_t low, uint64_t high)
{
    return low + rng_below(r, high - low + 1);
}

bool rng_chance(struct rng *r, unsigned percent)
{
    return rng_below(r, 100) < percent;
}

uint64_t pipe_writable_us(const struct pipe *p)
{
    uint64_t slack_us = p->socket_size * SECOND / p->rate;
    return p->free_us > slack_us ? p->free_us - slack_us : 0;
}

bool pipe_writable(const struct pipe *p, uint64_t now_us)
{
    return pipe_writable_us(p) <= now_us;
}

void pipe_put(struct pipe *p, const void *bytes, size_t size, uint64_t now_us)
{
    p->free_us = TD_MAX(p->free_us, now_us) + 1 + size * SECOND / p->rate;
    if (p->cut)
        return;
    struct flight *f = malloc(sizeof *f + size);
    f->next = NULL;
    f->arrives_us = p->free_us + p->delay_us;
    f->size = size;
    memcpy(f->bytes, bytes, size);
    *(p->first ? p->last : &p->first) = f;
    p->last = &f->next;
}

struct flight *pipe_take(struct pipe *p, uint64_t now_us)
{
    struct flight *f = p->first;
    if (!f || f->arrives_us > now_us)
        return NULL;
    p->first = f->next;
    return f;
}

void pipe_delay(struct pipe *p, uint64_t by_us)
{
    for (struct flight *f = p->first; f; f = f->next)
        f->arrives_us += by_us;
    p->free_us += by_us;
}

void pipe_drop(struct pipe *p)
{
    while (p->first) {
        struct flight *f = p->first;
        p->first = f->next;
        free(f);
    }
}

struct connection *sim_connect(struct sim *s)
{
    struct connection *c = calloc(1, sizeof *c);
    const struct sim_config *config = &s->config;
    c->sim = s;
    c->up = c->down =
        (struct pipe){.rate = config->rate, .delay_us = config->delay_us, .socket_size = config->socket_size};
    c->edge_notices_us = c->cloud_notices_us = NEVER;
    c->stream_next = 1;
    struct link_config edge = {.role = LINK_EDGE,
                               .on_frame = edge_on_frame,
                               .ctx = c,
                               .connection_window = config->connection_window,
                               .stream_window = config->stream_window};
    struct link_config cloud = edge;
    cloud.role = LINK_CLOUD;
    cloud.on_frame = cloud_on_frame;
    c->edge = link_create(&edge, s->now_us);
    c->cloud = link_create(&cloud, s->now_us);
    c->next = s->connections;
    s->connections = c;
    s->count.connections++;
    return c;
}
