/* lane: threads and a deadline in front of reads that may hang. A caller waits for its block until the deadline and no longer; a thread
 * that has not come back by then is left behind with what it holds, and until it does come back the tier is sick: every read is a miss
 * at once, so that nobody else is left there. So health needs no probe of its own: the first answer heals.
 *
 *   (idle) -- get --> queued -- thread --> running -- answer in time --> done
 *                        \__ deadline __> given up     \__ deadline __> left behind: sick -- answer --> well
 *
 * Bounded: `threads` reads run, LANE_QUEUE_MAX wait; more are misses, counted. */
#ifndef TANDEM_STORE_LANE_H
#define TANDEM_STORE_LANE_H
#include "store/tier.h"

#define LANE_QUEUE_MAX   256
#define LANE_THREADS_MAX 16

struct lane;
/* The tier is borrowed, and NULL where there is no lane_get. label: of its metrics, `tier="disk"`, NULL: it has none; name: for the log. NULL without
 * memory or threads. */
struct lane *lane_create(struct tier *t, const char *name, const char *label, unsigned threads);
/* Waits for reads under way, however long they hang: their buffers are the process's. */
void lane_destroy(struct lane *l);
/* -TD_ERR_TIMEOUT: too late; -TD_ERR_BUSY: sick or the queue is full; else as tier_ops.get. */
int lane_get(struct lane *l, const char *tenant, const struct kv_block_id *id, uint64_t timeout_us,
             struct tier_block **out);
/* Any other read, a member of the caller's object, which owns all that it reads into. */
struct lane_job {
    int (*run)(struct lane_job *job); /* on a thread of the lane */
    void (*free)(struct lane_job *job);
    int status;
    bool running, done, left; /* the lane's, as is the next; left: its waiter has gone */
    struct lane_job *next;
};
/* 0: it has run, `status` says how, and it is the caller's again. Otherwise, with codes as lane_get, it is freed here or once it has run. */
int lane_run(struct lane *l, struct lane_job *job, uint64_t timeout_us);
bool lane_is_sick(struct lane *l);
uint64_t lane_timeouts(struct lane *l);

#endif
