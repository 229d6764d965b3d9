/* store: opening and closing, and the operations on blocks. The promises are in store.h, the structure in store_internal.h. */
#include "shared/log.h"
#include "store/store_internal.h"
#include "store/tier.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define LOCK_FILE "lock"

/* ---- open ------------------------------------------------------------------------------------------------- */

static void register_metrics(struct store_metrics *m)
{
    static const char tier[] = "tier=\"disk\"";
    m->bytes = metric_gauge("tandem_kv_tier_bytes", tier, "Bytes that a tier of the KV store takes");
    m->blocks = metric_gauge("tandem_kv_tier_blocks", tier, "KV blocks in a tier");
    m->hits = metric_counter("tandem_kv_tier_hits_total", tier, "Look-ups of KV blocks that a tier had");
    m->misses =
        metric_counter("tandem_kv_tier_misses_total", tier, "Look-ups of KV blocks that a tier did not have");
    m->demotions = metric_counter("tandem_kv_tier_demotions_total", tier,
                                  "KV blocks that were re-encoded at a lossy level to make room in a tier");
    m->demoted_bytes = metric_counter("tandem_kv_tier_demoted_bytes_total", tier, "Bytes that this saved");
    m->damaged = metric_counter("tandem_kv_tier_damaged_total", tier, "Records found damaged and dropped");
    m->fsyncs = metric_counter("tandem_store_fsyncs_total", NULL, "Syncs of segment files");
    m->write_bytes = metric_counter("tandem_store_write_bytes_total", NULL, "Bytes written to segment files");
    m->queue_bytes = metric_gauge("tandem_store_queue_bytes", NULL, "Bytes that wait to be written");
    m->index_behind =
        metric_gauge("tandem_store_index_behind", NULL,
                     "1 while the index cannot be written: a later start may have to read segments");
    m->policy_bytes = metric_gauge("tandem_kv_tier_policy_bytes", tier, POLICY_BYTES_HELP);
    m->writes_off =
        metric_gauge("tandem_store_writes_off", NULL, "1 while the disk is full, failing or does not answer");
}

/* The directory of a path, for syncing the name of what was made in it. */
static void parent_directory(const char *path, char out[IO_PATH_MAX])
{
    snprintf(out, IO_PATH_MAX, "%s", path);
    char *slash = strrchr(out, '/');
    if (!slash)
        strcpy(out, ".");
    else
        slash[slash == out] = '\0';
}

/* The name is synced even if the directory is there already: whoever made it may have been cut off before doing so. */
static int make_directory(struct store *s, struct td_error *err)
{
    char parent[IO_PATH_MAX];
    int made = s->io->make_directory(s->io, s->directory);
    parent_directory(s->directory, parent);
    int rc = made < 0 && made != -EEXIST ? made : s->io->sync_directory(s->io, parent);
    if (made == -EEXIST && rc != -EIO)
        rc = 0; /* a parent that may not be opened was made, and synced, by somebody else */
    return rc < 0 ? td_fail(err, io_status(rc), "cannot make the store directory %s: %s", s->directory,
                            strerror(-rc))
                  : 0;
}

/* Who removes the lock file of a running program, as a stale one, would let a second in beside it. */
static int take_directory(struct store *s, struct td_error *err)
{
    int fd = s->io->lock_directory(s->io, s->directory);
    if (fd == -EWOULDBLOCK)
        return td_fail(
            err, -TD_ERR_BUSY,
            "cannot open store %s: another program holds it, although its lock file was removed; stop that "
            "program or ask it instead",
            s->directory);
    s->directory_fd = fd < 0 ? -1 : fd;
    return 0;
}

static int take_lock(struct store *s, struct td_error *err)
{
    char path[IO_PATH_MAX];
    pid_t holder = 0;
    if (!io_path(path, s->directory, LOCK_FILE))
        return td_fail(err, -TD_ERR_ARG, "cannot open the store: its path is too long");
    s->lock_fd = s->io->lock(s->io, path, s->read_only, &holder);
    if (s->lock_fd >= 0)
        return take_directory(s, err);
    if (s->lock_fd == -ENOENT &&
        s->read_only) { /* a copy without it: the directory's own lock will do, if there is a directory */
        int rc = take_directory(s, err);
        if (rc < 0 || s->directory_fd >= 0)
            return rc;
    }
    if (s->lock_fd == -EWOULDBLOCK)
        return td_fail(err, -TD_ERR_BUSY,
                       "cannot open store %s: process %ld holds it; stop that program or ask it instead",
                       s->directory, (long)holder);
    return td_fail(err, io_status(s->lock_fd), "cannot open store %s: %s", s->directory,
                   strerror(-s->lock_fd));
}

static void configure(struct store *s, const struct store_config *c)
{
    uint64_t total = 0, free_size = 0;
    s->read_only = c->read_only;
    s->tenant_quota_size = c->tenant_quota_size;
    s->ttl_ms = c->ttl_s * UINT64_C(1000);
    s->limit_size = c->limit_size;
    s->queue.limit =
        c->queue_size ? (size_t)TD_MIN(c->queue_size, (uint64_t)STORE_QUEUE_SIZE) : STORE_QUEUE_SIZE;
    if (!s->limit_size && s->io->space(s->io, s->directory, &total, &free_size) == 0)
        s->limit_size = total / 10 * 9;
    if (!s->limit_size)
        s->limit_size = UINT64_MAX;
    s->segment_size = c->segment_size ? c->segment_size : STORE_SEGMENT_SIZE;
    s->segment_size = TD_MIN(s->segment_size, s->limit_size / STORE_SEGMENTS_MIN);
    s->segment_size = TD_MAX(s->segment_size, (uint64_t)STORE_SEGMENT_SIZE_MIN);
    s->ballast_size = c->ballast_size ? c->ballast_size : STORE_BALLAST_SIZE;
    s->commit_interval_us = 1000ull * (c->commit_interval_ms ? c->commit_interval_ms : STORE_COMMIT_MS);
}

static void deinit(struct store *s)
{
    patience_close(s); /* reads that were left behind hold segments */
    index_close(s->index);
    op_queue_deinit(&s->queue);
    table_deinit(&s->pins);
    table_deinit(&s->conversations);
    table_deinit(&s->blocks);
    segments_deinit(&s->segments);
    demote_close(s);
    policy_destroy(s->policy);
    pthread_mutex_destroy(&s->policy_lock);
    pthread_mutex_destroy(&s->silence_lock);
    keys_close(s->keys);
    group_close(s);
    if (s->directory_fd >= 0)
        s->io->close(s->io, s->directory_fd);
    if (s->lock_fd >= 0)
        s->io->close(s->io, s->lock_fd);
    free(s->rows);
    free(s->voids);
    free(s->buffer);
    free(s);
}

/* Open keys.td; with the key of a rotation that was cut off, if that is what fits. */
struct keys_opening {
    struct store *s;
    const char *directory;
    bool shared;
    bool *found;
};
static int open_keys_with(void *ctx, const uint8_t master[CRYPTO_KEY_SIZE])
{
    struct keys_opening *o = ctx;
    return keys_open(o->s->io, o->directory, o->shared, master, o->s->read_only, o->found, &o->s->keys, NULL);
}

static int open_keys(struct store *s, const struct store_config *c, bool *found, struct td_error *err)
{
    uint8_t key[CRYPTO_KEY_SIZE];
    const char *directory = c->keys_directory ? c->keys_directory : s->directory;
    if (c->keys_directory && !s->read_only)
        s->io->make_directory(s->io, directory); /* what is wrong with it shows when the keys are written */
    struct keys_opening opening = {s, directory, c->keys_directory != NULL, found};
    int rc = keys_open(s->io, directory, opening.shared, c->master_key, s->read_only, found, &s->keys, err);
    if (rc != -TD_ERR_AUTH || s->read_only ||
        master_key_finish_rotation(c->master_key_path, key, open_keys_with, &opening, NULL) < 0)
        return s->keys ? 0 : rc;
    crypto_wipe(key, sizeof key);
    log_info("store", "the rotation of the master key that was cut off is finished");
    return 0;
}

static int open_steps(struct store *s, const struct store_config *c, const struct store_env *env,
                      struct td_error *err)
{
    bool keys_found;
    int rc = c->read_only ? 0 : make_directory(s, err);
    configure(s, c); /* the directory is there now: its file system says how large it is */
    rc = rc < 0 ? rc : take_lock(s, err);
    rc = rc < 0 ? rc : open_keys(s, c, &keys_found, err);
    rc = rc < 0 ? rc : recover(s, env, keys_found, err);
    if (rc < 0 || s->read_only)
        return rc;
    rc = c->demotion ? demote_open(s, c->demotion) : 0;
    rc = rc < 0 || env->segments_only ? rc : evict_open(s);
    if (rc < 0)
        return td_fail(err, rc, "cannot open store %s: %s", s->directory, td_status_text(rc));
    space_open_ballast(s);
    if (pthread_create(&s->writer, NULL, writer_main, s) != 0)
        return td_fail(err, -TD_ERR_NOMEM, "cannot open store %s: no thread for writing", s->directory);
    s->writer_started = true;
    return 0;
}

int store_open_with(const struct store_config *config, const struct store_env *env, struct store **out,
                    struct td_error *err)
{
    int rc = crypto_init();
    struct store *s = rc < 0 ? NULL : calloc(1, sizeof *s);
    if (!s)
        return td_fail(err, rc < 0 ? rc : -TD_ERR_NOMEM, "cannot open store %s: %s", config->directory,
                       td_status_text(rc < 0 ? rc : -TD_ERR_NOMEM));
    s->lock_fd = -1;
    s->directory_fd = -1;
    pthread_mutex_init(&s->policy_lock, NULL);
    pthread_mutex_init(&s->silence_lock, NULL);
    s->io = env->io;
    int length = snprintf(s->directory, sizeof s->directory, "%s", config->directory);
    while (length > 1 && length < IO_PATH_MAX && s->directory[length - 1] == '/')
        s->directory[--length] = '\0';
    segments_init(&s->segments, s->io, s->directory);
    rc = group_open(s, env->write_threads, env->direct_size);
    rc = rc < 0 ? rc : op_queue_init(&s->queue);
    rc = rc < 0 ? rc : patience_open(s, env->answer_us);
    rc = rc < 0 ? rc : table_init(&s->blocks);
    rc = rc < 0 ? rc : table_init(&s->conversations);
    rc = rc < 0 ? rc : table_init(&s->pins);
    if (length <= 0 || length >= IO_PATH_MAX)
        rc = -TD_ERR_ARG;
    if (rc < 0) {
        deinit(s);
        return td_fail(err, rc, "cannot open store %s: %s", config->directory, td_status_text(rc));
    }
    register_metrics(&s->metrics);
    rc = open_steps(s, config, env, err);
    if (rc < 0) {
        deinit(s);
        return rc;
    }
    *out = s;
    return 0;
}

int store_open(const struct store_config *config, struct store **out, struct td_error *err)
{
    return store_open_with(config, &(struct store_env){.io = &io_posix}, out, err);
}

void store_close(struct store *s)
{
    if (!s)
        return;
    demote_stop(s);
    if (s->writer_started) {
        op_queue_close(&s->queue);
        pthread_join(s->writer, NULL);
    }
    deinit(s);
}

/* ---- operations ------------------------------------------------------------------------------------------- */

void store_waiter_done(void *ctx, int status)
{
    struct store_waiter *w = ctx;
    pthread_mutex_lock(&w->lock);
    w->done = true;
    w->status = status;
    pthread_cond_signal(&w->ended);
    pthread_mutex_unlock(&w->lock);
}

int store_waiter_wait(struct store_waiter *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->done)
        pthread_cond_wait(&w->ended, &w->lock);
    pthread_mutex_unlock(&w->lock);
    return w->status;
}

/* Push, wait for the end, return its status. */
static int wait_op(struct store *s, struct store_op *op)
{
    struct store_waiter w = STORE_WAITER;
    op->done = store_waiter_done;
    op->ctx = &w;
    int rc = op_queue_push(&s->queue, op, true);
    if (rc < 0) {
        op_release(op);
        return rc;
    }
    return store_waiter_wait(&w);
}

/* It takes no memory: whoever has queued what points into his stack must be able to wait for its end. */
int store_flush(struct store *s)
{
    struct store_waiter w = STORE_WAITER;
    struct store_op barrier = {.kind = OP_BARRIER, .references = 1, .done = store_waiter_done, .ctx = &w};
    if (s->read_only)
        return 0;
    int rc = op_queue_push(&s->queue, &barrier, true);
    return rc < 0 ? rc : store_waiter_wait(&w);
}

static void hurry(struct store *s, struct store_op *wake)
{
    if (wake && op_queue_push(&s->queue, wake, true) < 0)
        op_release(wake); /* closing: the writer ends what waits */
}

void store_hurry(struct store *s)
{
    if (!s->read_only)
        hurry(s, op_create(OP_BARRIER, 0, 0)); /* without memory it takes the time of a commit */
}

int store_run_task(struct store *s, struct store_task *task)
{
    if (s->read_only)
        return -TD_ERR_UNSUPPORTED;
    task->waiter = STORE_WAITER;
    struct store_op *wake = op_create(OP_BARRIER, 0, 0);
    if (!wake)
        return -TD_ERR_NOMEM;
    pthread_mutex_lock(&s->queue.lock);
    task->next = s->tasks;
    s->tasks = task;
    pthread_mutex_unlock(&s->queue.lock);
    hurry(s, wake);
    return store_waiter_wait(&task->waiter);
}

void store_do_tasks(struct store *s, bool closing)
{
    pthread_mutex_lock(&s->queue.lock);
    struct store_task *task = s->tasks, *next;
    s->tasks = NULL;
    pthread_mutex_unlock(&s->queue.lock);
    for (; task; task = next) {
        next = task->next; /* the task is its caller's again once it is done */
        patience_call(s, 0);
        store_waiter_done(&task->waiter, closing ? -TD_ERR_CLOSED : task->run(s, task));
    }
}

int store_push_entry(struct store *s, struct table_shard *shard, struct entry *e, struct store_op *op)
{
    struct store_op *before = e->pending;
    e->pending = op;
    int rc = op_queue_push(&s->queue, op, false);
    if (rc < 0) {
        e->pending = before;
        if (!before && !e->segment_id)
            table_remove(store_table(s, op->type), shard, e);
        op_release(op);
    }
    return rc;
}

/* 0, or why writes are refused now. */
static int write_gate(struct store *s)
{
    if (s->read_only)
        return -TD_ERR_UNSUPPORTED;
    if (!store_answers(s))
        return -TD_ERR_TIMEOUT;
    return s->write_error < 0 && clock_mono_us() < s->write_retry_us ? s->write_error : 0;
}

int store_delete_id(struct store *s, uint8_t type, uint32_t tenant, const uint8_t id[32], store_done done,
                    void *ctx)
{
    if (s->read_only)
        return -TD_ERR_UNSUPPORTED;
    if (!store_answers(s))
        return -TD_ERR_TIMEOUT;
    struct store_op *op = op_create(OP_DELETE, 0, 0);
    if (!op)
        return -TD_ERR_NOMEM;
    op->type = type;
    op->tenant = tenant;
    memcpy(op->id, id, sizeof op->id);
    op->time_us = clock_wall_us();
    op->done = done;
    op->ctx = ctx;
    struct table_shard *shard = table_lock(store_table(s, type), id);
    struct entry *e = table_find(store_table(s, type), shard, tenant, id);
    int rc = -TD_ERR_NOTFOUND;
    if (!e || (e->pending && e->pending->kind == OP_DELETE)) {
        op_release(op);
    } else {
        op->expected = e->pending ? e->pending->version : e->conversation ? e->conversation->durable : 0;
        rc = store_push_entry(s, shard, e, op);
    }
    table_unlock(shard);
    return rc;
}

/* ---- blocks ----------------------------------------------------------------------------------------------- */

/* Check the pieces against the block that they are said to be, and add them up. What is held was made or checked in this process; its CRCs
 * are checked when it is read back. */
static int check_block(const struct store_block *b, bool held, uint8_t *codec, size_t *size)
{
    *codec = 0;
    *size = 0;
    if (b->layer_begin >= b->layer_end || b->layer_end > KV_LAYERS_MAX ||
        b->layer_end - b->layer_begin > RECORD_PARTS_MAX)
        return -TD_ERR_LIMIT;
    if (b->quality.fidelity > KV_L4 || b->quality.reserved != 0) /* no reader would take its head */
        return -TD_ERR_FORMAT;
    for (uint32_t i = 0; i < 2u * (b->layer_end - b->layer_begin); i++) {
        struct kv_piece_head h;
        struct span payload;
        int rc = held ? kv_piece_peek(b->pieces[i].data, b->pieces[i].size, &h)
                      : kv_piece_parse(b->pieces[i].data, b->pieces[i].size, &h, &payload);
        if (rc < 0)
            return rc;
        if (h.layer != b->layer_begin + i / 2 || h.is_value != i % 2 || h.block_index != b->block_index ||
            h.first_token != 0 || h.token_count != KV_BLOCK_TOKENS ||
            kv_quality_better(b->quality, h.quality))
            return -TD_ERR_MISMATCH;
        bool level = h.codec != KV_RAW && h.codec != KV_SEALED;
        *codec = TD_MAX(*codec, level ? h.codec : (uint8_t)KV_L0);
        *size += b->pieces[i].size;
    }
    return 0;
}

enum put_choice { PUT_WRITE, PUT_FOLLOW, PUT_REFUSE };

/* What is there already, on disk or on its way, decides. A better copy replaces a worse one and never the reverse; a copy of
 * equal quality replaces one of fewer layers. */
static enum put_choice choose(const struct entry *e, const struct store_block *b)
{
    const struct store_op *op = e ? e->pending : NULL;
    if (!e || (op && op->kind == OP_DELETE) || (!op && !e->segment_id))
        return PUT_WRITE;
    struct kv_quality there = op ? op->quality : e->quality;
    uint16_t begin = op ? op->layer_begin : e->layer_begin, end = op ? op->layer_end : e->layer_end;
    switch (tier_choose(there, begin, end, b->quality, b->layer_begin, b->layer_end)) {
    case TIER_KEEP:
        return PUT_FOLLOW;
    case TIER_REPLACE:
        return PUT_WRITE;
    case TIER_REFUSE:
        break;
    }
    return PUT_REFUSE;
}

static enum put_choice choose_now(struct store *s, uint32_t tenant, const struct store_block *b)
{
    struct table_shard *shard = table_lock(&s->blocks, b->id.bytes);
    enum put_choice choice = choose(table_find(&s->blocks, shard, tenant, b->id.bytes), b);
    table_unlock(shard);
    return choice;
}

/* Can a layer's pieces be taken for one part where they lie? */
static bool layers_are_whole(const struct store_block *b)
{
    for (uint32_t i = 0; i < 2u * (b->layer_end - b->layer_begin); i += 2)
        if ((const uint8_t *)b->pieces[i].data + b->pieces[i].size != b->pieces[i + 1].data)
            return false;
    return true;
}

/* The plain parts: where `held` has them, or copied behind the operation. */
static void take_parts(struct store_op *op, const struct store_block *b)
{
    uint8_t *at = op->data;
    for (uint32_t i = 0; i < op->part_count; i++) {
        const struct span *k = &b->pieces[2 * i], *v = k + 1;
        op->parts[i] = (struct record_part){(uint32_t)k->size, (uint32_t)v->size};
        op->part_data[i] = op->held ? k->data : at;
        if (op->held)
            continue;
        memcpy(at, k->data, k->size);
        memcpy(at + k->size, v->data, v->size);
        at += k->size + v->size;
    }
}

static struct store_op *block_op(uint32_t tenant, const struct store_block *b, struct tier_block *held,
                                 uint8_t codec, size_t size)
{
    uint32_t layers = b->layer_end - b->layer_begin;
    bool hold = held && layers_are_whole(b);
    struct store_op *op = op_create(OP_BLOCK, layers, hold ? 0 : size);
    if (!op)
        return NULL;
    if (hold) {
        op->held = tier_block_hold(held);
        op->size = size;
        op->charge += size;
    }
    op->type = RECORD_BLOCK;
    op->tenant = tenant;
    op->codec = codec;
    op->quality = b->quality;
    op->block_index = b->block_index;
    op->layer_begin = b->layer_begin;
    op->layer_end = b->layer_end;
    op->time_us = clock_wall_us();
    memcpy(op->id, b->id.bytes, sizeof op->id);
    memcpy(op->parent, b->parent.bytes, sizeof op->parent);
    take_parts(op, b);
    return op;
}

/* Let the caller know, in its turn, how the copy that is there already fares. */
static int push_follower(struct store *s, const struct entry *e, store_done done, void *ctx)
{
    if (!done)
        return 0;
    struct store_op *op = op_create(OP_FOLLOW, 0, 0);
    if (!op)
        return -TD_ERR_NOMEM;
    op->done = done;
    op->ctx = ctx;
    op->follows = e->pending;
    if (op->follows)
        op_hold(op->follows);
    int rc = op_queue_push(&s->queue, op, false);
    if (rc < 0)
        op_release(op);
    return rc;
}

static int put_block(struct store *s, uint32_t tenant, const struct store_block *b, struct tier_block *held,
                     uint8_t codec, size_t size, store_done done, void *ctx)
{
    /* Copying is the expensive part, and usually the block is new: look first, copy without the lock, look again. */
    enum put_choice choice = choose_now(s, tenant, b);
    struct store_op *op = choice == PUT_WRITE ? block_op(tenant, b, held, codec, size) : NULL;
    if (choice == PUT_WRITE && !op)
        return -TD_ERR_NOMEM;
    struct table_shard *shard = table_lock(&s->blocks, b->id.bytes);
    struct entry *e = table_find(&s->blocks, shard, tenant, b->id.bytes);
    choice = choose(e, b);
    int rc = choice == PUT_REFUSE ? -TD_ERR_EXISTS : 0;
    if (choice == PUT_WRITE && !op) {
        rc = -TD_ERR_AGAIN; /* it went away in between: as good as never there */
    } else if (choice == PUT_WRITE) {
        op->done = done;
        op->ctx = ctx;
        e = e ? e : table_insert(&s->blocks, shard, tenant, b->id.bytes);
        rc = e ? store_push_entry(s, shard, e, op) : -TD_ERR_NOMEM;
        if (rc == 0)
            evict_spare(s, e);
        op = e ? NULL : op;
    } else if (choice == PUT_FOLLOW) {
        rc = push_follower(s, e, done, ctx);
    }
    table_unlock(shard);
    op_release(op);
    return rc;
}

static int put(struct store *s, const char *tenant, const struct store_block *block, struct tier_block *held,
               store_done done, void *ctx)
{
    uint8_t codec;
    size_t size;
    uint32_t number = 0;
    int rc = write_gate(s);
    rc = rc < 0 ? rc : check_block(block, held, &codec, &size);
    rc = rc < 0 ? rc : patience_tenant(s, tenant, &number, NULL);
    rc = rc < 0 ? rc : put_block(s, number, block, held, codec, size, done, ctx);
    if (rc < 0 && rc != -TD_ERR_EXISTS)
        counter_add(&s->counters.put_failures, NULL, 1);
    return rc;
}

static bool is_as_before(const struct entry *e, const struct store_block *b, struct kv_quality before)
{
    return e && e->segment_id && !e->pending && memcmp(&e->quality, &before, sizeof before) == 0 &&
           e->layer_begin == b->layer_begin && e->layer_end == b->layer_end;
}

int store_put_demoted(struct store *s, uint32_t tenant, struct tier_block *b, struct kv_quality before,
                      store_done done, void *ctx)
{
    uint8_t codec;
    size_t size;
    int rc = write_gate(s);
    rc = rc < 0 ? rc : check_block(&b->block, true, &codec, &size);
    struct store_op *op = rc < 0 ? NULL : block_op(tenant, &b->block, b, codec, size);
    if (!op)
        return rc < 0 ? rc : -TD_ERR_NOMEM;
    op->demotes = true;
    op->done = done;
    op->ctx = ctx;
    struct table_shard *shard = table_lock(&s->blocks, b->block.id.bytes);
    struct entry *e = table_find(&s->blocks, shard, tenant, b->block.id.bytes);
    if (is_as_before(e, &b->block, before)) {
        rc = store_push_entry(s, shard, e, op);
    } else {
        rc = -TD_ERR_AGAIN;
        op_release(op);
    }
    table_unlock(shard);
    return rc;
}

int store_put(struct store *s, const char *tenant, const struct store_block *block, store_done done,
              void *ctx)
{
    return put(s, tenant, block, NULL, done, ctx);
}

int store_put_held(struct store *s, const char *tenant, struct tier_block *b, store_done done, void *ctx)
{
    return put(s, tenant, &b->block, b, done, ctx);
}

int store_delete(struct store *s, const char *tenant, const struct kv_block_id *id, store_done done,
                 void *ctx)
{
    uint32_t number = keys_find(s->keys, tenant);
    return number ? store_delete_id(s, RECORD_BLOCK, number, id->bytes, done, ctx) : -TD_ERR_NOTFOUND;
}

/* ---- keys ------------------------------------------------------------------------------------------------- */

int store_chain_key(struct store *s, const char *tenant, uint8_t out[CRYPTO_KEY_SIZE], struct td_error *err)
{
    uint32_t number;
    struct tenant_keys keys;
    int rc = patience_tenant(s, tenant, &number, err);
    rc = rc < 0 ? rc : keys_get(s->keys, number, &keys);
    if (rc == 0) {
        memcpy(out, keys.chain_key, CRYPTO_KEY_SIZE);
        crypto_wipe(&keys, sizeof keys);
    }
    return rc;
}

bool store_has_tenant(struct store *s, const char *tenant)
{
    return keys_find(s->keys, tenant) != 0;
}

int store_erase_tenant(struct store *s, const char *tenant, struct td_error *err)
{
    uint32_t number = keys_find(s->keys, tenant);
    if (!number)
        return td_fail(err, -TD_ERR_NOTFOUND, "cannot erase tenant %s: the store has no such tenant", tenant);
    if (s->read_only)
        return td_fail(err, -TD_ERR_UNSUPPORTED, "cannot erase tenant %s: the store is open for reading only",
                       tenant);
    struct store_op *op = op_create(OP_ERASE, 0, 0);
    int rc = -TD_ERR_NOMEM;
    if (op) {
        op->tenant = number;
        op->time_us = clock_wall_us();
        rc = wait_op(s, op);
    }
    return rc < 0 ? td_fail(err, rc, "cannot erase tenant %s: %s", tenant, td_status_text(rc)) : 0;
}
