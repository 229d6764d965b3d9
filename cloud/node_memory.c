/* node_memory: what a node takes when all its bounds are reached, held against what there is. A group of processes with a limit has no swap and no
 * mercy: whoever passes it is killed, in the middle of everybody's replies. So what serves speed only, blocks in memory and blocks that
 * wait for the disk, shares what weights and KV pages leave; and where those do not fit the node says so before it serves. */
#include "cloud/node_internal.h"
#include "store/store.h"
#include <inttypes.h>

#define MIB(size) ((uint64_t)(size) >> 20)

int node_memory_fit(struct node_memory *m, struct td_error *err)
{
    uint64_t fixed = m->weights + m->kv + NODE_MEMORY_BASE;
    if (fixed + NODE_QUEUE_MIN > m->available)
        return td_fail(err, -TD_ERR_NOMEM,
                       "no room: weights take %" PRIu64 " MiB, KV pages %" PRIu64
                       " MiB, the rest of the program %" PRIu64 " MiB, and %" PRIu64
                       " MiB are available; lower --kv-memory",
                       MIB(m->weights), MIB(m->kv), MIB(NODE_MEMORY_BASE + NODE_QUEUE_MIN),
                       MIB(m->available));
    uint64_t left = m->available - fixed;
    m->store_ram = TD_MIN(m->store_ram, (left - NODE_QUEUE_MIN) / 2);
    m->store_queue = TD_MIN((uint64_t)STORE_QUEUE_SIZE, left - m->store_ram);
    return 0;
}
