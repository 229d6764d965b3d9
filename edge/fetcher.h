/* fetcher: KV of all layers for a device that holds some of them: in idle time it asks the cloud for the blocks of what has just been said (FETCH),
 * and keeps the answers on its disk. They are sealed by the cloud (shared/kv_seal.h): the device cannot read them, and gives them back when the cloud
 * has lost them and that is sooner than computing it again (edge/planner.h, restoring). What would not be, by what is believed of the link
 * and the cloud now, is not asked for, nor is what it takes too many ids to name; as soon as more is believed, it is.
 *
 *     wanted: prompts with their replies --idle, link READY--> FETCH of at most FETCHER_BLOCKS --KV_BLOCKs--> disk --DONE--> the next ones
 *     a request comes, or the link goes: the stream is given up at once, and what has not come is asked for later. BUSY: later, FETCHER_TRIES times
 *
 * What is wanted does not outlive the agent: it cannot be found again in the stored conversations, as these do not say of which ids the cloud is not to be
 * told (private prompts). A conversation's next turn asks for all of it that is not there.
 *
 * Bounds: FETCHER_WANTED of them, the latest; one FETCH at a time; memory for one block. What the disk keeps is bounded as its other blocks are.
 * A cloud that sends what was not asked for breaks the rules: the connection ends, and it is not asked again while this agent runs.
 *
 * Threads: the net loop's only, but for sealed_block_id. */
#ifndef TANDEM_EDGE_FETCHER_H
#define TANDEM_EDGE_FETCHER_H
#include "edge/kv_disk.h"
#include "edge/plan_model.h"
#include "edge/uplink.h"
#include "shared/kv_seal.h"

#define FETCHER_WANTED 16u
#define FETCHER_BLOCKS LIMIT_FETCH_BLOCKS /* of one FETCH */
#define FETCHER_IDS_US 20000.0 /* of the link: ids of one FETCH, which a request may have to wait for */
#define FETCHER_TRIES  8u      /* for one of them at a busy cloud */

/* The name on this device's disk of a block that the cloud of this tag has sealed. id: the device's own name of it. */
void sealed_block_id(const uint8_t tag[KV_SEAL_TAG_SIZE], const struct kv_block_id *id,
                     struct kv_block_id *out);

struct fetcher;
/* uplink and disk: borrowed. NULL without memory. */
struct fetcher *fetcher_create(struct uplink *uplink, struct kv_disk *disk, const struct kv_shape *shape);
void fetcher_destroy(struct fetcher *f); /* NULL: nothing happens. Sends nothing any more. */

void fetcher_ready(struct fetcher *f, const Tandem__Welcome *welcome);
void fetcher_lost(struct fetcher *f); /* all streams are gone */
/* The seal of the cloud, as it said last; NULL: it has none. */
const uint8_t *fetcher_tag(const struct fetcher *f);
/* chain: the device's names of the whole blocks of ids, `count` of them. Both are copied. */
void fetcher_want(struct fetcher *f, const int32_t *ids, const struct kv_block_id *chain, uint32_t count);
/* Blocks from `begin` on, without a gap, that can be given back for a request that accepts this. */
uint32_t fetcher_held(const struct fetcher *f, const struct kv_block_id *chain, uint32_t begin, uint32_t end,
                      enum kv_accept accept);

/* believed: nothing else is to be done, the link is READY, and this is what giving back would take now. NULL: there is something, and what is under way is
 * given up. How soon it is to be called again; 0: when more is believed. */
uint64_t fetcher_run(struct fetcher *f, const struct plan_model *believed, uint64_t now_us);
bool fetcher_is_busy(const struct fetcher *f);                        /* something is on its way */
int fetcher_frame(struct fetcher *f, const struct wire_frame *frame); /* of a stream whose owner is f */

#endif
