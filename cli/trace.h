/* trace: request traces and what replays them (`tandem bench trace`).
 *
 * A trace is JSON lines, one request each: {"timestamp": ms, "hash_ids": [id, …]}, other members ignored: the ids of the blocks of its prompt, first
 * block first, equal ids for equal prefixes (the form of the Mooncake traces, FAST'25). A request's hits are its leading run of blocks that are
 * held; then all its blocks have been computed and may be taken in. Capacity counts blocks. */
#ifndef TANDEM_CLI_TRACE_H
#define TANDEM_CLI_TRACE_H
#include "shared/base.h"
#include "shared/status.h"

#define TRACE_REFERENCES_MAX (1u << 26) /* of all requests; 4 bytes each */
#define TRACE_REQUESTS_MAX   (1u << 24)
#define TRACE_CHAIN_MAX      (1u << 15) /* blocks of one request */
#define TRACE_LINE_MAX       (1u << 20) /* bytes */

struct trace_request {
    uint64_t time_ms;
    uint32_t first, count; /* of `blocks` */
};
struct trace {
    struct trace_request *requests;
    uint32_t *blocks; /* numbered 0 .. unique - 1 by first appearance */
    size_t request_count, request_capacity, reference_count, reference_capacity;
    uint32_t unique;
    struct trace_ids *ids; /* while loading */
};

typedef void (*trace_progress)(void *label, uint64_t done, uint64_t total);
/* -TD_ERR_IO, _FORMAT (err names file and line), _LIMIT, _NOMEM. trace_free in any case. */
int trace_load(struct trace *t, const char *path, trace_progress progress, void *label, struct td_error *err);
int trace_add_line(struct trace *t, const char *line, size_t size, struct td_error *err);
void trace_free(struct trace *t);

struct trace_result {
    uint64_t hits, inserted; /* blocks */
    uint64_t demoted;        /* times that a block was stored at a lossy level instead of its own */
    uint64_t lossy_hits;     /* of hits */
};
/* Replays with room for `capacity` blocks; 0 or -TD_ERR_NOMEM. */
typedef int (*trace_replay)(const struct trace *t, uint32_t capacity, struct trace_result *out);
int trace_replay_tandem(const struct trace *t, uint32_t capacity, struct trace_result *out);
/* The same where the tenant's policy allows demotion: a block takes TRACE_SIZE, one that was demoted from L0 to L1 TRACE_SIZE_DEMOTED, and what is held at most
 * capacity * TRACE_SIZE. 27 : 16 is 13.7 : 8.1 bits a value. */
#define TRACE_SIZE         27
#define TRACE_SIZE_DEMOTED 16
int trace_replay_demoting(const struct trace *t, uint32_t capacity, struct trace_result *out);
/* Least recently used; of one request the deepest goes first, which is better for runs than the other way round. */
int trace_replay_lru(const struct trace *t, uint32_t capacity, struct trace_result *out);
/* S3-FIFO (Yang et al., SOSP 2023): small queue 10 %, main queue 90 %, as many ghosts as the main queue holds. */
int trace_replay_s3fifo(const struct trace *t, uint32_t capacity, struct trace_result *out);
/* Belady's optimum, of two equal the deepest: after each request the blocks are kept that are used again soonest. Every block's next use is no sooner than
 * its parent's, so what is held is closed under parents, runs are all that hits, and no policy of any kind hits more often. */
int trace_replay_belady(const struct trace *t, uint32_t capacity, struct trace_result *out);

#endif
