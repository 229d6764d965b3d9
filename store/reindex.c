/* reindex: a store that had to go on without its index gets one again while it serves: the file was locked by another program at the start, or was
 * damaged under way. What lay there is set aside, and all entries of the tables go into a new one.
 *
 * Until the last row is in, the index names no segment: cut off before that, the next start reads the segments, as it would have done without. On the
 * writer's thread, between two commits; a million records take it some seconds. */
#include "shared/log.h"
#include "store/store_internal.h"

#define RETRY_FIRST_US 5000000 /* then twice as long each time … */
#define RETRY_LAST_US  320000000

void index_want(struct store *s)
{
    uint64_t wait = s->index_wait_us;
    s->index_wait_us = wait == 0 ? RETRY_FIRST_US : TD_MIN(2 * wait, (uint64_t)RETRY_LAST_US);
    s->index_retry_us = clock_mono_us() + s->index_wait_us;
    metric_set(s->metrics.index_behind, 1);
}

/* A segment that cannot be read now may hold what the tables lack: an index made without it would say that there is nothing. */
static bool knows_all(const struct store *s)
{
    bool all = !s->index_partial;
    for (size_t i = 0; i < s->segments.count; i++)
        all &= !s->segments.list[i]->suspect;
    return all;
}

static int open_fresh(struct store *s)
{
    int rc = index_open(s->index_directory, &s->index); /* asks whether somebody holds it */
    if (rc == -TD_ERR_BUSY)
        return rc;
    index_close(s->index);
    s->index = NULL;
    index_set_aside(s->index_directory, rc < 0);
    return index_open(s->index_directory, &s->index);
}

static void add_all(struct store *s, uint8_t type)
{
    struct table *t = store_table(s, type);
    for (size_t i = 0; i < TABLE_SHARD_COUNT; i++) {
        struct table_shard *shard = &t->shards[i];
        pthread_mutex_lock(&shard->lock);
        for (size_t j = 0; j < shard->slot_count; j++)
            if (shard->slots[j].tenant && shard->slots[j].segment_id)
                store_note_change(s, type, &shard->slots[j], false);
        pthread_mutex_unlock(&shard->lock);
        if (s->row_count >= STORE_INDEX_ROWS)
            store_index_flush(s, false);
    }
}

void index_regain(struct store *s)
{
    static const uint8_t types[] = {RECORD_BLOCK, RECORD_CONVERSATION, RECORD_PIN};
    if (s->index || s->index_retry_us == 0 || clock_mono_us() < s->index_retry_us)
        return;
    if (!knows_all(s) || open_fresh(s) < 0) {
        index_want(s);
        return;
    }
    s->index_complete = false;
    for (size_t i = 0; i < TD_COUNT(types); i++)
        add_all(s, types[i]);
    s->index_complete = true;
    store_index_flush(s, true);
    if (!s->index)
        return; /* it has been given up again, and is wanted for later */
    s->index_retry_us = s->index_wait_us = 0;
    if (!s->index_behind) {
        log_info("store", "there is an index again");
        metric_set(s->metrics.index_behind, 0);
    }
}
