/* tier_redis: see tier_redis.h. */
#include "store/tier_redis.h"
#include "shared/log.h"
#include "store/known.h"
#include "store/record.h"
#include "store/redis_link.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define NAME_SIZE      (5 + 2 * 32 + 1) /* "td:b:" and hex */
#define MGET_MAX       500              /* ids of one MGET; several are pipelined */
#define ENTRIES_MAX    ((size_t)MGET_MAX * 128)
#define WRITE_ATTEMPTS 5
#define WRITE_PAUSE_MS 10 /* two commits of the disk */

struct ask {
    struct ask *next;
    char tenant[STORE_TENANT_MAX + 1];
    size_t count;
    struct kv_block_id ids[];
};
struct write {
    struct write *next;
    char tenant[STORE_TENANT_MAX + 1];
    struct kv_block_id id;
};

struct redis {
    struct tier tier; /* first */
    struct store *store;
    struct redis_server server;
    char host[256], password[256];
    uint64_t node_epoch;
    uint32_t command_ms, knock_ms;
    void (*wake)(void *ctx);
    void *wake_ctx;
    struct known *known;
    pthread_t directory_thread, writing_thread;
    bool directory_started, writing_started;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t asked, written;
    bool stopping, away, knocked; /* knocked: away is known */
    struct ask *first_ask, **last_ask;
    struct write *first_write, **last_write;
    unsigned ask_count, write_count;
    struct redis_link readers[REDIS_READS_MAX];
    bool reader_used[REDIS_READS_MAX];
    struct tier_stats stats;
};

/* ---- names -------------------------------------------------------------------------------------------------- */

/* "td:d:" for the directory entry, "td:b:" for the block. */
static void write_name(char kind, const uint8_t name[32], char out[NAME_SIZE])
{
    snprintf(out, 6, "td:%c:", kind);
    hex_encode(name, 32, out + 5);
}

/* ---- health ------------------------------------------------------------------------------------------------- */

static void note_health(struct redis *r, bool away, const char *why)
{
    pthread_mutex_lock(&r->lock);
    bool changed = r->away != away || (away && !r->knocked);
    r->away = away;
    r->knocked = true;
    pthread_mutex_unlock(&r->lock);
    if (changed && away)
        log_warn("store", "the remote tier is away (%s): its blocks are misses until it is back", why);
    else if (changed)
        log_info("store", "the remote tier is back");
    if (changed)
        known_forget_all(r->known); /* it may have lost everything, or got new */
}

static bool is_away(struct redis *r)
{
    pthread_mutex_lock(&r->lock);
    bool away = r->away;
    pthread_mutex_unlock(&r->lock);
    return away;
}

/* The end of an exchange: rc of the link. */
static int end_exchange(struct redis *r, struct redis_link *l, int rc)
{
    if (rc == -TD_ERR_IO) {
        note_health(r, true, l->why ? l->why : "it has closed the connection");
    } else if (rc == -TD_ERR_FORMAT) {
        redis_link_close(l); /* what follows cannot be trusted to belong to what was asked */
        note_health(r, true, "its answers make no sense");
    }
    return rc;
}

static uint64_t exchange_us(const struct redis *r, uint64_t size)
{
    return r->command_ms * UINT64_C(1000) + size / (1u << 20) * 1000000;
}

/* ---- directory ---------------------------------------------------------------------------------------------- */

static void take_entry(struct redis *r, const char *tenant, const struct kv_block_id *id, const redisReply *e)
{
    struct store_block_info info;
    uint64_t epoch;
    if (e->type == REDIS_REPLY_STRING && known_entry_parse(e->str, e->len, &info, &epoch) == 0)
        known_there(r->known, tenant, id, &info);
    else
        known_absent(r->known, tenant, id);
}

/* One MGET: `names` are the words behind the command's own. */
static int send_mget(struct redis *r, struct redis_link *l, const struct ask *a, size_t first, size_t count)
{
    const char **words = malloc((count + 1) * sizeof *words);
    size_t *sizes = malloc((count + 1) * sizeof *sizes);
    char(*names)[NAME_SIZE] = malloc(count * sizeof *names);
    int rc = words && sizes && names ? 0 : -TD_ERR_NOMEM;
    if (rc == 0) {
        words[0] = "MGET";
        sizes[0] = 4;
    }
    for (size_t i = 0; i < count && rc == 0; i++) {
        uint8_t name[32];
        rc = store_sealed_name(r->store, a->tenant, &a->ids[first + i], name);
        write_name('d', name, names[i]);
        words[i + 1] = names[i];
        sizes[i + 1] = NAME_SIZE - 1;
    }
    rc = rc < 0 ? rc : redis_link_send_words(l, count + 1, words, sizes);
    free(names);
    free(sizes);
    free(words);
    return rc;
}

static int take_mget(struct redis *r, struct redis_link *l, const struct ask *a, size_t first, size_t count)
{
    redisReply *reply;
    int rc = redis_link_reply(l, &reply);
    if (rc < 0)
        return rc;
    if (reply->type != REDIS_REPLY_ARRAY || reply->elements != count)
        rc = -TD_ERR_FORMAT;
    for (size_t i = 0; i < count && rc == 0; i++)
        take_entry(r, a->tenant, &a->ids[first + i], reply->element[i]);
    freeReplyObject(reply);
    return rc;
}

static int ask_server(struct redis *r, struct redis_link *l, const struct ask *a)
{
    int rc = redis_link_begin(l, exchange_us(r, 0), ENTRIES_MAX);
    for (size_t at = 0; at < a->count && rc == 0; at += MGET_MAX)
        rc = send_mget(r, l, a, at, TD_MIN(a->count - at, (size_t)MGET_MAX));
    for (size_t at = 0; at < a->count && rc == 0; at += MGET_MAX)
        rc = take_mget(r, l, a, at, TD_MIN(a->count - at, (size_t)MGET_MAX));
    if (rc < 0)
        redis_link_close(
            l); /* half an exchange may be under way: its answers must not meet the next questions */
    return end_exchange(r, l, rc);
}

static int knock(struct redis *r, struct redis_link *l)
{
    redisReply *reply;
    const struct span ping = redis_word("PING");
    int rc = redis_link_begin(l, exchange_us(r, 0), ENTRIES_MAX);
    rc = rc < 0 ? rc : redis_link_send(l, 1, &ping);
    rc = rc < 0 ? rc : redis_link_reply(l, &reply);
    if (rc == 0) {
        rc = reply->type == REDIS_REPLY_STATUS && strcmp(reply->str, "PONG") == 0 ? 0 : -TD_ERR_FORMAT;
        freeReplyObject(reply);
    }
    if (rc == -TD_ERR_UNSUPPORTED)
        l->why = "it refuses commands";
    if (rc < 0)
        redis_link_close(l);
    note_health(r, rc < 0, rc == -TD_ERR_FORMAT ? "its answers make no sense" : l->why);
    return rc;
}

static struct timespec in_ms(unsigned ms)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_sec += ms / 1000;
    at.tv_nsec += (long)(ms % 1000) * 1000000;
    if (at.tv_nsec >= 1000000000) {
        at.tv_sec++;
        at.tv_nsec -= 1000000000;
    }
    return at;
}

/* The next look-up; NULL after a while without one, or when stopping. */
static struct ask *next_ask(struct redis *r, bool *stopping)
{
    struct timespec at = in_ms(r->knock_ms);
    int rc = 0;
    pthread_mutex_lock(&r->lock);
    while (!r->first_ask && !r->stopping && rc != ETIMEDOUT)
        rc = pthread_cond_timedwait(&r->asked, &r->lock, &at);
    struct ask *a = r->first_ask;
    if (a) {
        r->first_ask = a->next;
        if (!r->first_ask)
            r->last_ask = &r->first_ask;
        r->ask_count--;
    }
    *stopping = r->stopping;
    pthread_mutex_unlock(&r->lock);
    return a;
}

static void *directory_main(void *arg)
{
    struct redis *r = arg;
    struct redis_link link;
    bool stopping = false;
    redis_link_init(&link, &r->server);
    knock(r, &link);
    while (!stopping) {
        struct ask *a = next_ask(r, &stopping);
        if (!a && !stopping)
            knock(r, &link); /* idle: a server that has gone is noticed before a request needs it */
        if (a && !stopping && !is_away(r)) {
            ask_server(r, &link, a);
            if (r->wake)
                r->wake(r->wake_ctx);
        }
        free(a);
    }
    redis_link_close(&link);
    return NULL;
}

static void redis_look_up(struct tier *t, const char *tenant, const struct kv_block_id *ids, size_t count)
{
    struct redis *r = (struct redis *)t;
    struct ask *a =
        is_away(r) ? NULL : malloc(sizeof *a + TD_MIN(count, (size_t)REDIS_ASK_MAX) * sizeof *ids);
    if (!a)
        return;
    a->next = NULL;
    a->count = 0;
    snprintf(a->tenant, sizeof a->tenant, "%s", tenant);
    pthread_mutex_lock(&r->lock);
    bool room = r->ask_count < REDIS_ASKS_MAX && !r->stopping;
    for (size_t i = 0; i < count && room && a->count < REDIS_ASK_MAX; i++)
        if (known_ask(r->known, tenant, &ids[i]))
            a->ids[a->count++] = ids[i];
    if (a->count > 0) {
        *r->last_ask = a;
        r->last_ask = &a->next;
        r->ask_count++;
        pthread_cond_signal(&r->asked);
        a = NULL;
    }
    pthread_mutex_unlock(&r->lock);
    free(a);
}

/* ---- writing ------------------------------------------------------------------------------------------------ */

/* Is as good a copy there already? Then *info is what it is, no longer ours. */
static int server_has(struct redis_link *l, const char *name, struct store_block_info *info, bool *has)
{
    redisReply *reply;
    struct store_block_info there;
    uint64_t epoch;
    const struct span words[] = {redis_word("GET"), redis_word(name)};
    int rc = redis_link_send(l, TD_COUNT(words), words);
    rc = rc < 0 ? rc : redis_link_reply(l, &reply);
    if (rc < 0)
        return rc;
    *has = reply->type == REDIS_REPLY_STRING &&
           known_entry_parse(reply->str, reply->len, &there, &epoch) == 0 &&
           tier_choose(there.quality, there.layer_begin, there.layer_end, info->quality, info->layer_begin,
                       info->layer_end) != TIER_REPLACE;
    if (*has)
        *info = there;
    freeReplyObject(reply);
    return 0;
}

/* Two SETs, the block before the entry that speaks of it. */
static int send_block(struct redis *r, struct redis_link *l, const char *entry_name, const char *block_name,
                      const struct store_block_info *info, const uint8_t *record, size_t size)
{
    char ttl[16];
    uint8_t entry[KNOWN_ENTRY_SIZE];
    snprintf(ttl, sizeof ttl, "%u", REDIS_TTL_S);
    known_entry_write(info, r->node_epoch, entry);
    const struct span block[] = {
        redis_word("SET"), redis_word(block_name), {record, size}, redis_word("EX"), redis_word(ttl)};
    const struct span directory[] = {
        redis_word("SET"), redis_word(entry_name), {entry, sizeof entry}, redis_word("EX"), redis_word(ttl)};
    int rc = redis_link_send(l, TD_COUNT(block), block);
    rc = rc < 0 ? rc : redis_link_send(l, TD_COUNT(directory), directory);
    for (int i = 0; i < 2 && rc == 0; i++) {
        redisReply *reply;
        rc = redis_link_reply(l, &reply);
        if (rc == 0)
            freeReplyObject(reply);
    }
    if (rc == -TD_ERR_UNSUPPORTED)
        redis_link_close(
            l); /* a refusal (its memory is full, it may only be read): the other reply is still to come */
    return rc;
}

/* Between the look and the read it may have been demoted: then the entry would promise too much. */
static bool is_as_found(const uint8_t *record, const struct store_block_info *info)
{
    struct record_head h;
    return record_head_parse(record, &h) == 0 && memcmp(&h.quality, &info->quality, sizeof h.quality) == 0;
}

static int write_once(struct redis *r, struct redis_link *l, const struct write *w)
{
    struct store_block_info info;
    uint8_t name[32], *record = NULL;
    char entry_name[NAME_SIZE], block_name[NAME_SIZE];
    size_t size = 0;
    bool has = false;
    int rc = store_find(r->store, w->tenant, &w->id, &info);
    rc = rc < 0 ? rc : store_sealed_name(r->store, w->tenant, &w->id, name);
    if (rc < 0 || info.stored_size > REDIS_VALUE_MAX)
        return rc < 0 ? rc : -TD_ERR_LIMIT;
    write_name('d', name, entry_name);
    write_name('b', name, block_name);
    rc = redis_link_begin(l, exchange_us(r, info.stored_size), ENTRIES_MAX);
    rc = rc < 0 ? rc : server_has(l, entry_name, &info, &has);
    if (rc == 0 && !has) {
        rc = store_read_sealed(r->store, w->tenant, &w->id, &record, &size);
        rc = rc < 0 ? rc : is_as_found(record, &info) ? 0 : -TD_ERR_AGAIN;
        rc = rc < 0 ? rc : store_sealed_mask(r->store, w->tenant, name, record, size);
        rc = rc < 0 ? rc : send_block(r, l, entry_name, block_name, &info, record, size);
        free(record);
    }
    if (end_exchange(r, l, rc) == 0)
        known_there(r->known, w->tenant, &w->id, &info);
    return rc;
}

/* What takes the block's place between the look and the read, on the disk soon or already, is written instead. */
static int write_block(struct redis *r, struct redis_link *l, const struct write *w)
{
    int rc = write_once(r, l, w);
    for (int i = 1; i < WRITE_ATTEMPTS && rc == -TD_ERR_AGAIN; i++) {
        nanosleep(&(struct timespec){.tv_nsec = WRITE_PAUSE_MS * 1000000}, NULL);
        rc = write_once(r, l, w);
    }
    return rc;
}

static struct write *next_write(struct redis *r)
{
    pthread_mutex_lock(&r->lock);
    while (!r->first_write && !r->stopping)
        pthread_cond_wait(&r->written, &r->lock);
    struct write *w = r->stopping ? NULL : r->first_write;
    if (w) {
        r->first_write = w->next;
        if (!r->first_write)
            r->last_write = &r->first_write;
        r->write_count--;
    }
    pthread_mutex_unlock(&r->lock);
    return w;
}

static void *writing_main(void *arg)
{
    struct redis *r = arg;
    struct redis_link link;
    redis_link_init(&link, &r->server);
    for (struct write *w; (w = next_write(r)); free(w)) {
        int rc = is_away(r) ? -TD_ERR_IO : write_block(r, &link, w);
        pthread_mutex_lock(&r->lock);
        r->stats.puts += rc == 0;
        r->stats.put_failures += rc < 0;
        pthread_mutex_unlock(&r->lock);
    }
    redis_link_close(&link);
    return NULL;
}

/* Only the id is kept: the record is read from the disk when its turn comes. So `done` says that it is queued. */
static int redis_put(struct tier *t, const char *tenant, struct tier_block *b, store_done done, void *ctx)
{
    struct redis *r = (struct redis *)t;
    struct write *w = is_away(r) ? NULL : calloc(1, sizeof *w);
    pthread_mutex_lock(&r->lock);
    bool taken = w && r->write_count < REDIS_WRITES_MAX && !r->stopping;
    if (taken) {
        snprintf(w->tenant, sizeof w->tenant, "%s", tenant);
        w->id = b->block.id;
        *r->last_write = w;
        r->last_write = &w->next;
        r->write_count++;
        pthread_cond_signal(&r->written);
    }
    r->stats.put_failures += !taken;
    pthread_mutex_unlock(&r->lock);
    if (!taken)
        free(w);
    if (taken && done)
        done(ctx, 0);
    return taken ? 0 : -TD_ERR_FULL;
}

/* ---- reading ------------------------------------------------------------------------------------------------ */

static int redis_find(struct tier *t, const char *tenant, const struct kv_block_id *id,
                      struct store_block_info *info)
{
    struct redis *r = (struct redis *)t;
    int rc = is_away(r) ? -TD_ERR_NOTFOUND : known_find(r->known, tenant, id, info);
    pthread_mutex_lock(&r->lock);
    r->stats.hits += rc == 0;
    r->stats.misses += rc == -TD_ERR_NOTFOUND;
    pthread_mutex_unlock(&r->lock);
    return rc;
}

static struct redis_link *take_reader(struct redis *r)
{
    struct redis_link *l = NULL;
    pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < REDIS_READS_MAX && !l; i++)
        if (!r->reader_used[i]) {
            r->reader_used[i] = true;
            l = &r->readers[i];
        }
    pthread_mutex_unlock(&r->lock);
    return l;
}

static void give_reader(struct redis *r, const struct redis_link *l)
{
    pthread_mutex_lock(&r->lock);
    r->reader_used[l - r->readers] = false;
    pthread_mutex_unlock(&r->lock);
}

/* GET, and EXPIRE of both so that what is used stays. *value: NULL when it is not there. */
static int fetch(struct redis_link *l, const uint8_t name[32], size_t size, uint64_t timeout_us,
                 redisReply **value)
{
    char entry_name[NAME_SIZE], block_name[NAME_SIZE], ttl[16];
    redisReply *replies[3] = {NULL};
    write_name('d', name, entry_name);
    write_name('b', name, block_name);
    snprintf(ttl, sizeof ttl, "%u", REDIS_TTL_S);
    const struct span get[] = {redis_word("GET"), redis_word(block_name)};
    const struct span keep_block[] = {redis_word("EXPIRE"), redis_word(block_name), redis_word(ttl)};
    const struct span keep_entry[] = {redis_word("EXPIRE"), redis_word(entry_name), redis_word(ttl)};
    int rc = redis_link_begin(l, timeout_us, size);
    rc = rc < 0 ? rc : redis_link_send(l, TD_COUNT(get), get);
    rc = rc < 0 ? rc : redis_link_send(l, TD_COUNT(keep_block), keep_block);
    rc = rc < 0 ? rc : redis_link_send(l, TD_COUNT(keep_entry), keep_entry);
    for (int i = 0; i < 3 && rc == 0; i++)
        rc = redis_link_reply(l, &replies[i]);
    if (rc == -TD_ERR_UNSUPPORTED)
        redis_link_close(l);
    for (int i = 1; i < 3; i++)
        if (replies[i])
            freeReplyObject(replies[i]);
    if (rc < 0 && replies[0])
        freeReplyObject(replies[0]);
    *value = rc < 0 ? NULL : replies[0];
    return rc;
}

static int redis_get(struct tier *t, const char *tenant, const struct kv_block_id *id,
                     struct tier_block **out)
{
    struct redis *r = (struct redis *)t;
    struct store_block_info info;
    uint8_t name[32];
    redisReply *value = NULL;
    int rc = known_find(r->known, tenant, id, &info) == 0 ? store_sealed_name(r->store, tenant, id, name)
                                                          : -TD_ERR_NOTFOUND;
    struct redis_link *l = rc < 0 || info.stored_size > REDIS_VALUE_MAX ? NULL : take_reader(r);
    if (!l)
        return rc < 0 ? rc : -TD_ERR_BUSY;
    rc = end_exchange(r, l, fetch(l, name, info.stored_size, exchange_us(r, info.stored_size), &value));
    give_reader(r, l);
    bool damaged = false;
    if (rc == 0) {
        damaged = value->type == REDIS_REPLY_STRING;
        rc = damaged ? store_sealed_mask(r->store, tenant, name, (uint8_t *)value->str, value->len)
                     : -TD_ERR_NOTFOUND;
        rc = rc < 0 ? rc : store_open_sealed(r->store, tenant, id, (uint8_t *)value->str, value->len, out);
        freeReplyObject(value);
    }
    if (rc < 0) {
        known_absent(r->known, tenant, id);
        pthread_mutex_lock(&r->lock);
        r->stats.damaged += damaged;
        pthread_mutex_unlock(&r->lock);
    }
    return rc;
}

/* The table does not list by tenant; what it forgets too much is asked for again. */
static void redis_drop_tenant(struct tier *t, const char *tenant)
{
    (void)tenant;
    known_forget_all(((struct redis *)t)->known);
}

static void redis_stats(struct tier *t, struct tier_stats *out)
{
    struct redis *r = (struct redis *)t;
    pthread_mutex_lock(&r->lock);
    *out = r->stats;
    out->sick = r->away;
    pthread_mutex_unlock(&r->lock);
    out->blocks = known_count(r->known);
}

/* ---- life --------------------------------------------------------------------------------------------------- */

static void redis_destroy(struct tier *t)
{
    struct redis *r = (struct redis *)t;
    pthread_mutex_lock(&r->lock);
    r->stopping = true;
    pthread_cond_broadcast(&r->asked);
    pthread_cond_broadcast(&r->written);
    pthread_mutex_unlock(&r->lock);
    if (r->directory_started)
        pthread_join(r->directory_thread, NULL);
    if (r->writing_started)
        pthread_join(r->writing_thread, NULL);
    for (size_t i = 0; i < REDIS_READS_MAX; i++)
        redis_link_close(&r->readers[i]);
    for (struct ask *a; (a = r->first_ask); free(a))
        r->first_ask = a->next;
    for (struct write *w; (w = r->first_write); free(w))
        r->first_write = w->next;
    known_destroy(r->known);
    pthread_cond_destroy(&r->asked);
    pthread_cond_destroy(&r->written);
    pthread_mutex_destroy(&r->lock);
    crypto_wipe(r->password, sizeof r->password);
    free(r);
}

static void init(struct redis *r, const struct tier_redis_config *c)
{
    static const struct tier_ops ops = {redis_find,    redis_get, redis_put,         redis_stats,
                                        redis_destroy, NULL,      redis_drop_tenant, redis_look_up};
    pthread_condattr_t monotonic;
    r->tier.ops = &ops;
    r->store = c->store;
    r->node_epoch = c->node_epoch;
    r->command_ms = c->command_ms ? c->command_ms : REDIS_COMMAND_MS;
    r->knock_ms = c->knock_ms ? c->knock_ms : REDIS_KNOCK_MS;
    r->wake = c->wake;
    r->wake_ctx = c->wake_ctx;
    snprintf(r->host, sizeof r->host, "%s", c->host);
    if (c->password)
        snprintf(r->password, sizeof r->password, "%s", c->password);
    r->server = (struct redis_server){r->host, c->password ? r->password : NULL, c->port};
    for (size_t i = 0; i < REDIS_READS_MAX; i++)
        redis_link_init(&r->readers[i], &r->server);
    r->last_ask = &r->first_ask;
    r->last_write = &r->first_write;
    r->away = true; /* until it has answered once */
    pthread_mutex_init(&r->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&r->asked, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_cond_init(&r->written, NULL);
}

struct tier *tier_redis_create(const struct tier_redis_config *config, struct td_error *err)
{
    struct redis *r = calloc(1, sizeof *r);
    if (r) {
        init(r, config);
        r->known = known_create();
    }
    if (r && r->known) {
        r->directory_started = pthread_create(&r->directory_thread, NULL, directory_main, r) == 0;
        r->writing_started = pthread_create(&r->writing_thread, NULL, writing_main, r) == 0;
    }
    if (r && r->directory_started && r->writing_started)
        return &r->tier;
    td_fail(err, -TD_ERR_NOMEM, "cannot start the remote tier: no memory or no threads");
    if (r)
        redis_destroy(&r->tier);
    return NULL;
}
