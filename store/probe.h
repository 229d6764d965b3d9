/* probe: what reading a block takes, before any has been read: from the disk itself, and from what the last process noted beside the store. Both are
 * estimates that the first real read replaces; a wrong one costs a little time and nothing else. */
#ifndef TANDEM_STORE_PROBE_H
#define TANDEM_STORE_PROBE_H
#include "store/tier.h"

#define PROBE_SIZE (1u << 20) /* is read at most */
#define SPEED_FILE "speed"

/* Microseconds that a block of so many bytes takes: one read past the page cache, scaled; of a segment, or, where none is long enough, of a file of its
 * own, which is removed again. Waits for the disk, so not on a thread for which others wait. */
int store_probe(struct store *s, size_t block_size, uint64_t *us);

/* For each tier what a block took, 0 where that is not known; of a model with blocks of this size. -TD_ERR_NOTFOUND: nothing (of use) is noted. */
int store_speed_load(struct store *s, size_t block_size, uint64_t us[TIER_COUNT]);
int store_speed_save(struct store *s, size_t block_size, const uint64_t us[TIER_COUNT]);

#endif
