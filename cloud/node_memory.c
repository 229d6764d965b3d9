/* node_memory: weights, KV pages, the store's blocks in memory and what waits for its disk, with a flat sum for the rest of the program, held against what
 * there is. A group of processes with a limit has no mercy: whoever passes it is killed, in the middle of everybody's replies. So
 * what serves speed only, blocks in memory and blocks that wait for the disk, shares what weights and KV pages leave; and where those do not
 * fit the node says so before it serves.
 *
 * Not counted is what comes and goes with requests and has limits of its own: staged uploads, bodies of HTTP requests, memory for
 * conversations that are swapped out. Nor is the model's file: its pages are mapped, and go when others need room. */
#include "cloud/node_internal.h"
#include "shared/log.h"
#include "store/store.h"
#include <inttypes.h>

#define MIB(size) ((uint64_t)(size) >> 20)

static uint64_t less(uint64_t size, uint64_t taken)
{
    return size - TD_MIN(size, taken);
}

int node_memory_fit(struct node_memory *m, struct td_error *err)
{
    uint64_t others = m->weights + NODE_MEMORY_BASE + NODE_QUEUE_MIN,
             limit = m->available + TD_MIN(m->swap, UINT64_MAX - m->available);
    if (m->kv == 0 && m->kv_least)
        m->kv = TD_MAX(TD_MIN(m->available / 4, less(m->available, others)), m->kv_least);
    if (others + m->kv > limit) {
        bool kv_too_large = others + TD_MIN(m->kv, m->kv_least) <= limit;
        return td_fail(err, -TD_ERR_NOMEM,
                       "no room: weights take %" PRIu64 " MiB, KV pages %" PRIu64
                       " MiB, the rest of the program %" PRIu64 " MiB, and %" PRIu64 " MiB are available; %s",
                       MIB(m->weights), MIB(m->kv), MIB(NODE_MEMORY_BASE + NODE_QUEUE_MIN), MIB(limit),
                       kv_too_large ? "lower --kv-memory" : "free some, or take a smaller model");
    }
    if (others + m->kv > m->available)
        log_warn("cloud",
                 "weights, KV pages and the rest of the program take %" PRIu64 " MiB, and %" PRIu64
                 " MiB are available without swap: it will be slow",
                 MIB(others + m->kv), MIB(m->available));
    uint64_t left = less(m->available, others + m->kv);
    m->store_ram = TD_MIN(m->store_ram, left / 2);
    m->store_queue = TD_MIN((uint64_t)STORE_QUEUE_SIZE, NODE_QUEUE_MIN + left - m->store_ram);
    return 0;
}
