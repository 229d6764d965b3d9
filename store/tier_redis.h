/* tier_redis: a tier that several nodes share, on a server that speaks the Redis protocol. It holds two values for each block: a
 * directory entry (what it is, 40 bytes) and the sealed record, the same bytes as on the disk of the node that computed it.
 *
 *     look_up ──ids──▶ directory thread: MGET of entries ──▶ known.h      what find answers from; never waits
 *     put     ──ids──▶ writing thread: reads the record from the local disk, SET of both with a time to live
 *     get     ──▶ on the caller (a lane's thread): GET, verify, open
 *
 * The server is not trusted: names and ids are HMACs under the tenant's keys, values are sealed, and whatever comes back is verified as if
 * a stranger had made it. It is not relied upon either: while it is away, hangs or talks nonsense everything is a miss, the directory thread knocks once
 * a second, and the first right answer makes the tier well. TLS is left to a tunnel.
 * Nodes that share a server must share the tenants' keys (store_config.keys_directory). */
#ifndef TANDEM_STORE_TIER_REDIS_H
#define TANDEM_STORE_TIER_REDIS_H
#include "store/tier.h"

#define REDIS_COMMAND_MS 1500 /* an exchange takes at most so long, and a second more for each MiB … */
#define REDIS_KNOCK_MS   1000 /* while the server is away */
#define REDIS_VALUE_MAX  (64u << 20)  /* larger blocks stay local */
#define REDIS_TTL_S      (7 * 86400u) /* counted from the last writing or reading */
#define REDIS_ASK_MAX    4096         /* ids of one look_up */
#define REDIS_ASKS_MAX   64           /* look-ups that wait */
#define REDIS_WRITES_MAX 1024         /* blocks that wait to be written */
#define REDIS_READS_MAX  4            /* connections that read */

struct tier_redis_config {
    const char *host, *password; /* password: NULL for none */
    uint16_t port;
    struct store *store;           /* borrowed: keys, and the records to write */
    uint32_t command_ms, knock_ms; /* 0: REDIS_COMMAND_MS, REDIS_KNOCK_MS */
    uint64_t node_epoch;           /* of this life of the node; directory entries carry it */
    /* Called on the directory thread when answers have come. May be NULL. */
    void (*wake)(void *ctx);
    void *wake_ctx;
};
struct tier *tier_redis_create(const struct tier_redis_config *config, struct td_error *err);

#endif
