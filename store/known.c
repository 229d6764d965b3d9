/* known: see known.h. Sets of a few ways; what was touched longest ago makes room. */
#include "store/known.h"
#include <pthread.h>
#include <stdlib.h>

enum state { NOTHING, ASKED, THERE, ABSENT };

struct slot {
    struct kv_block_id id;
    uint64_t tenant; /* hash of its name under the seed: an id belongs to one tenant anyway */
    uint64_t until_us;
    struct store_block_info info;
    uint8_t state;
};

struct known {
    pthread_mutex_t lock;
    uint64_t seed, there_count;
    struct slot slots[KNOWN_SETS][KNOWN_WAYS];
};

struct known *known_create(void)
{
    struct known *k = calloc(1, sizeof *k);
    if (!k || crypto_random(&k->seed, sizeof k->seed) < 0) {
        free(k);
        return NULL;
    }
    pthread_mutex_init(&k->lock, NULL);
    return k;
}

void known_destroy(struct known *k)
{
    if (!k)
        return;
    pthread_mutex_destroy(&k->lock);
    free(k);
}

/* ---- slots, with the lock ----------------------------------------------------------------------------------- */

static uint64_t tenant_hash(const struct known *k, const char *tenant)
{
    uint64_t hash = k->seed;
    for (; *tenant; tenant++)
        hash = (hash ^ (uint8_t)*tenant) * 0x100000001b3u;
    return hash;
}

static struct slot *set_of(struct known *k, const struct kv_block_id *id)
{
    uint64_t x = (load_le64(id->bytes) ^ k->seed) * 0x9e3779b97f4a7c15u;
    return k->slots[(x ^ x >> 31) % KNOWN_SETS];
}

static void set_state(struct known *k, struct slot *s, enum state state, uint64_t until_us)
{
    k->there_count += (state == THERE);
    k->there_count -= (s->state == THERE);
    s->state = (uint8_t)state;
    s->until_us = until_us;
}

static struct slot *find_slot(struct known *k, const char *tenant, const struct kv_block_id *id)
{
    uint64_t owner = tenant_hash(k, tenant), now = clock_mono_us();
    struct slot *set = set_of(k, id);
    for (unsigned i = 0; i < KNOWN_WAYS; i++) {
        if (set[i].state == NOTHING || set[i].tenant != owner || memcmp(&set[i].id, id, sizeof *id) != 0)
            continue;
        if (now < set[i].until_us)
            return &set[i];
        set_state(k, &set[i], NOTHING, 0);
    }
    return NULL;
}

static struct slot *take_slot(struct known *k, const char *tenant, const struct kv_block_id *id)
{
    struct slot *s = find_slot(k, tenant, id), *set = set_of(k, id);
    if (s)
        return s;
    s = set;
    for (unsigned i = 0; i < KNOWN_WAYS; i++)
        if (set[i].state == NOTHING || (s->state != NOTHING && set[i].until_us < s->until_us))
            s = &set[i];
    s->id = *id;
    s->tenant = tenant_hash(k, tenant);
    return s;
}

/* ---- interface ---------------------------------------------------------------------------------------------- */

int known_find(struct known *k, const char *tenant, const struct kv_block_id *id,
               struct store_block_info *info)
{
    pthread_mutex_lock(&k->lock);
    const struct slot *s = find_slot(k, tenant, id);
    int rc = s && s->state == THERE ? 0 : s && s->state == ASKED ? -TD_ERR_AGAIN : -TD_ERR_NOTFOUND;
    if (rc == 0)
        *info = s->info;
    pthread_mutex_unlock(&k->lock);
    return rc;
}

bool known_ask(struct known *k, const char *tenant, const struct kv_block_id *id)
{
    pthread_mutex_lock(&k->lock);
    bool ask = !find_slot(k, tenant, id);
    if (ask)
        set_state(k, take_slot(k, tenant, id), ASKED, clock_mono_us() + KNOWN_ASKED_US);
    pthread_mutex_unlock(&k->lock);
    return ask;
}

void known_there(struct known *k, const char *tenant, const struct kv_block_id *id,
                 const struct store_block_info *info)
{
    pthread_mutex_lock(&k->lock);
    struct slot *s = take_slot(k, tenant, id);
    s->info = *info;
    set_state(k, s, THERE, clock_mono_us() + KNOWN_THERE_US);
    pthread_mutex_unlock(&k->lock);
}

void known_absent(struct known *k, const char *tenant, const struct kv_block_id *id)
{
    pthread_mutex_lock(&k->lock);
    set_state(k, take_slot(k, tenant, id), ABSENT, clock_mono_us() + KNOWN_ABSENT_US);
    pthread_mutex_unlock(&k->lock);
}

void known_forget_all(struct known *k)
{
    pthread_mutex_lock(&k->lock);
    memset(k->slots, 0, sizeof k->slots);
    k->there_count = 0;
    pthread_mutex_unlock(&k->lock);
}

uint64_t known_count(struct known *k)
{
    pthread_mutex_lock(&k->lock);
    uint64_t count = k->there_count;
    pthread_mutex_unlock(&k->lock);
    return count;
}

/* ---- entries ------------------------------------------------------------------------------------------------ */

enum {
    AT_MAGIC = 0,
    AT_VERSION = 4,
    AT_QUALITY = 8,
    AT_INDEX = 12,
    AT_BEGIN = 16,
    AT_END = 18,
    AT_SIZE = 20,
    AT_EPOCH = 24,
    AT_ZERO = 32,
    AT_CRC = 36
};
#define ENTRY_MAGIC   0x52444454u /* "TDDR" */
#define ENTRY_VERSION 1u

void known_entry_write(const struct store_block_info *info, uint64_t node_epoch,
                       uint8_t out[KNOWN_ENTRY_SIZE])
{
    memset(out, 0, KNOWN_ENTRY_SIZE);
    store_le32(out + AT_MAGIC, ENTRY_MAGIC);
    store_le32(out + AT_VERSION, ENTRY_VERSION);
    out[AT_QUALITY] = info->quality.fidelity;
    out[AT_QUALITY + 1] = info->quality.numerics;
    out[AT_QUALITY + 2] = info->quality.provenance;
    store_le32(out + AT_INDEX, info->block_index);
    store_le16(out + AT_BEGIN, info->layer_begin);
    store_le16(out + AT_END, info->layer_end);
    store_le32(out + AT_SIZE, info->stored_size);
    store_le64(out + AT_EPOCH, node_epoch);
    store_le32(out + AT_CRC, crc32c(0, out, AT_CRC));
}

int known_entry_parse(const void *data, size_t size, struct store_block_info *info, uint64_t *node_epoch)
{
    const uint8_t *in = data;
    if (size != KNOWN_ENTRY_SIZE || load_le32(in + AT_MAGIC) != ENTRY_MAGIC ||
        load_le32(in + AT_VERSION) != ENTRY_VERSION)
        return -TD_ERR_FORMAT;
    if (crc32c(0, in, AT_CRC) != load_le32(in + AT_CRC))
        return -TD_ERR_CHECKSUM;
    *info = (struct store_block_info){
        .quality = {in[AT_QUALITY], in[AT_QUALITY + 1], in[AT_QUALITY + 2], 0},
        .block_index = load_le32(in + AT_INDEX),
        .layer_begin = load_le16(in + AT_BEGIN),
        .layer_end = load_le16(in + AT_END),
        .stored_size = load_le32(in + AT_SIZE),
    };
    *node_epoch = load_le64(in + AT_EPOCH);
    return info->quality.fidelity <= KV_L4 && info->layer_begin < info->layer_end &&
                   in[AT_QUALITY + 3] == 0 && load_le32(in + AT_ZERO) == 0
               ? 0
               : -TD_ERR_FORMAT;
}
