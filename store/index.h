/* index: the SQLite file index.sqlite, written behind the log so that opening a store need not scan all of it.
 *
 * It is never the truth: every row is checked against the log when it is used, rows of missing segments are ignored, and what lies
 * beyond a segment's applied length is read from the segment. So an index that is old, restored from a backup or absent gives the same
 * store, later. It holds HMACs, random ids, offsets and sizes; nothing of it is text.
 * Threads: one at a time. */
#ifndef TANDEM_STORE_INDEX_H
#define TANDEM_STORE_INDEX_H
#include "store/record.h"

#define INDEX_FILE "index.sqlite"

struct index;
struct index_row {
    uint8_t type; /* of the record; RECORD_TOMBSTONE: delete all rows of the key id, which was erased */
    uint8_t key_id[RECORD_KEY_ID];
    uint8_t id[32];
    uint64_t segment_id, offset, lsn; /* segment_id 0: delete the row */
    uint32_t stored_size;
    struct kv_quality quality;
    uint32_t block_index;
    uint16_t layer_begin, layer_end;
    uint8_t principal[32]; /* of a block: its parent */
    uint64_t version, updated_us;
};
struct index_segment {
    uint64_t id, nonce, applied_end; /* rows reflect the segment up to here */
    uint32_t tombstone_count;
};

/* Open or make directory/index.sqlite. -TD_ERR_BUSY: somebody else holds it; -TD_ERR_FORMAT: not a sound index. */
int index_open(const char *directory, struct index **out);
void index_close(struct index *x);
/* Rename a broken index (and its side files) to *.damaged; without `keep`, remove it. */
void index_set_aside(const char *directory, bool keep);

/* All rows. fn's non-zero result stops and is returned. -TD_ERR_FORMAT: unreadable. */
typedef int (*index_segment_fn)(void *ctx, const struct index_segment *segment);
typedef int (*index_row_fn)(void *ctx, const struct index_row *row);
int index_each_segment(struct index *x, index_segment_fn fn, void *ctx);
int index_each_row(struct index *x, index_row_fn fn, void *ctx);
uint64_t index_next_lsn(struct index *x); /* as of the last transaction; 0: none */

/* One transaction: all rows, all segments (those absent from the list are forgotten), the next lsn. -TD_ERR_BUSY: locked, try
 * later; another code: the index is of no use any more. */
int index_apply(struct index *x, const struct index_row *rows, size_t row_count,
                const struct index_segment *segments, size_t segment_count, uint64_t next_lsn);
int index_checkpoint(struct index *x); /* move the WAL into the file and sync */

#endif
