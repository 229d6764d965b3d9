/* conversation: the body of a conversation record, and the hashes of message histories. Byte table: FORMAT.md. */
#include "store/conversation.h"
#include <stdlib.h>

#define CONV_MAGIC         0x56434454u /* "TDCV" */
#define CONV_VERSION       1
#define CONV_BOUNDARY_SIZE 40
#define HISTORY_LABEL      "tandem-history"

void conv_free(struct conversation *c)
{
    if (c->ids)
        crypto_wipe(c->ids, c->ids_count * sizeof *c->ids);
    if (c->vault)
        crypto_wipe(c->vault, c->vault_size);
    free(c->ids);
    free(c->boundaries);
    free(c->vault);
    crypto_wipe(c, sizeof *c);
}

/* ---- ids -------------------------------------------------------------------------------------------------- */

#define ID_PREFIX "conv-"

int conv_make_id(char out[STORE_CONV_ID_MAX + 1])
{
    uint8_t random[CONV_ID_DIGITS / 2];
    int rc = crypto_random(random, sizeof random);
    if (rc < 0)
        return rc;
    memcpy(out, ID_PREFIX, sizeof ID_PREFIX);
    hex_encode(random, sizeof random, out + strlen(ID_PREFIX));
    return 0;
}

void conv_id_from_key(const char *key, char out[STORE_CONV_ID_MAX + 1])
{
    memcpy(out, ID_PREFIX, sizeof ID_PREFIX);
    strncat(out, key, CONV_ID_DIGITS);
}

bool conv_id_is_made(const char *id)
{
    size_t prefix = strlen(ID_PREFIX);
    return strncmp(id, ID_PREFIX, prefix) == 0 && strspn(id + prefix, "0123456789abcdef") == CONV_ID_DIGITS &&
           id[prefix + CONV_ID_DIGITS] == '\0';
}

/* ---- history ---------------------------------------------------------------------------------------------- */

void conv_history_start(const uint8_t key[32], uint8_t kind, uint8_t out[TD_HASH_SIZE])
{
    const struct span parts[] = {{(const uint8_t *)HISTORY_LABEL, sizeof HISTORY_LABEL - 1}, {&kind, 1}};
    hmac_sha256(key, parts, TD_COUNT(parts), out);
}

void conv_history_next(const uint8_t key[32], const uint8_t previous[TD_HASH_SIZE], const char *role,
                       const void *content, size_t content_size, uint8_t out[TD_HASH_SIZE])
{
    uint8_t sizes[2][4], before[TD_HASH_SIZE];
    size_t role_size = strlen(role);
    store_le32(sizes[0], (uint32_t)role_size);
    store_le32(sizes[1], (uint32_t)content_size);
    memcpy(before, previous, sizeof before); /* previous and out may be the same */
    const struct span parts[] = {
        {before, sizeof before}, {sizes[0], 4},           {(const uint8_t *)role, role_size},
        {sizes[1], 4},           {content, content_size},
    };
    hmac_sha256(key, parts, TD_COUNT(parts), out);
}

/* ---- serialise -------------------------------------------------------------------------------------------- */

struct writer { /* into a buffer that was measured beforehand */
    uint8_t *at;
};
static void write_bytes(struct writer *w, const void *data, size_t size)
{
    if (size)
        memcpy(w->at, data, size);
    w->at += size;
}
static void write_u32(struct writer *w, uint32_t v)
{
    store_le32(w->at, v);
    w->at += 4;
}
static void write_u64(struct writer *w, uint64_t v)
{
    store_le64(w->at, v);
    w->at += 8;
}
static void write_text(struct writer *w, const char *text)
{
    write_u32(w, (uint32_t)strlen(text));
    write_bytes(w, text, strlen(text));
}

static uint64_t serialised_size(const struct conversation *c)
{
    uint64_t texts = 12 + strlen(c->id) + strlen(c->title) + strlen(c->last_request_key);
    return 8 + texts + 2 * TD_HASH_SIZE + 16 + 4 + 4ull * c->ids_count + 4 +
           (uint64_t)CONV_BOUNDARY_SIZE * c->boundary_count + 4 + c->vault_size;
}

static bool is_consistent(const struct conversation *c)
{
    uint32_t before = 0;
    if (c->id[0] == '\0' || c->boundary_count > CONV_MESSAGES_MAX)
        return false;
    for (uint32_t i = 0; i < c->boundary_count; i++) {
        if (c->boundaries[i].ids_count < before || c->boundaries[i].ids_count > c->ids_count)
            return false;
        before = c->boundaries[i].ids_count;
    }
    return true;
}

int conv_serialise(const struct conversation *c, uint8_t **out, size_t *size)
{
    uint64_t total = serialised_size(c);
    if (total > STORE_CONV_SIZE_MAX)
        return -TD_ERR_LIMIT;
    if (!is_consistent(c))
        return -TD_ERR_ARG;
    uint8_t *bytes = malloc((size_t)total);
    if (!bytes)
        return -TD_ERR_NOMEM;
    struct writer w = {bytes};
    write_u32(&w, CONV_MAGIC);
    write_u32(&w, CONV_VERSION);
    write_text(&w, c->id);
    write_text(&w, c->title);
    write_text(&w, c->last_request_key);
    write_bytes(&w, c->tokenizer_id, TD_HASH_SIZE);
    write_bytes(&w, c->fingerprint, TD_HASH_SIZE);
    write_u64(&w, c->created_us);
    write_u64(&w, c->updated_us);
    write_u32(&w, c->ids_count);
    for (uint32_t i = 0; i < c->ids_count; i++)
        write_u32(&w, (uint32_t)c->ids[i]);
    write_u32(&w, c->boundary_count);
    for (uint32_t i = 0; i < c->boundary_count; i++) {
        write_u32(&w, c->boundaries[i].ids_count);
        write_u32(&w, c->boundaries[i].reply_open);
        write_bytes(&w, c->boundaries[i].history, TD_HASH_SIZE);
    }
    write_u32(&w, c->vault_size);
    write_bytes(&w, c->vault, c->vault_size);
    *out = bytes;
    *size = (size_t)total;
    return 0;
}

/* ---- parse ------------------------------------------------------------------------------------------------ */

/* A text of at most `max` bytes without NUL; out has room for one more. */
static void read_text(struct reader *r, char *out, size_t max)
{
    uint32_t size = reader_u32(r);
    const uint8_t *text = size <= max ? reader_take(r, size) : NULL;
    if (!text || memchr(text, 0, size)) {
        r->bad = true;
        return;
    }
    memcpy(out, text, size);
    out[size] = '\0';
}

static void read_hash(struct reader *r, uint8_t out[TD_HASH_SIZE])
{
    const uint8_t *p = reader_take(r, TD_HASH_SIZE);
    if (p)
        memcpy(out, p, TD_HASH_SIZE);
}

/* Room for `count` items of which each takes item_size bytes of the input: so memory never exceeds what a true file needs. */
static void *room_for(struct reader *r, uint32_t count, size_t item_size, size_t memory_size)
{
    if (r->bad || count > (size_t)(r->end - r->next) / item_size) {
        r->bad = true;
        return NULL;
    }
    return malloc(count * memory_size + 1);
}

static int read_arrays(struct reader *r, struct conversation *c)
{
    uint32_t count = reader_u32(r);
    c->ids = room_for(r, count, 4, sizeof *c->ids);
    if (!c->ids)
        return r->bad ? -TD_ERR_FORMAT : -TD_ERR_NOMEM;
    c->ids_count = count;
    for (uint32_t i = 0; i < count; i++)
        c->ids[i] = (int32_t)reader_u32(r);

    count = reader_u32(r);
    r->bad |= count > CONV_MESSAGES_MAX;
    c->boundaries = room_for(r, count, CONV_BOUNDARY_SIZE, sizeof *c->boundaries);
    if (!c->boundaries)
        return r->bad ? -TD_ERR_FORMAT : -TD_ERR_NOMEM;
    c->boundary_count = count;
    for (uint32_t i = 0; i < count; i++) {
        struct conv_boundary *b = &c->boundaries[i];
        b->ids_count = reader_u32(r);
        uint32_t open = reader_u32(r);
        r->bad |= open > 1;
        b->reply_open = open == 1;
        read_hash(r, b->history);
    }

    count = reader_u32(r);
    c->vault = room_for(r, count, 1, 1);
    if (!c->vault)
        return r->bad ? -TD_ERR_FORMAT : -TD_ERR_NOMEM;
    c->vault_size = count;
    const uint8_t *vault = reader_take(r, count);
    if (vault)
        memcpy(c->vault, vault, count);
    return 0;
}

int conv_parse(const void *data, size_t size, struct conversation *out)
{
    struct reader r = reader_over(data, size);
    memset(out, 0, sizeof *out);
    if (size > STORE_CONV_SIZE_MAX)
        return -TD_ERR_LIMIT;
    if (reader_u32(&r) != CONV_MAGIC)
        return -TD_ERR_FORMAT;
    if (reader_u32(&r) != CONV_VERSION)
        return -TD_ERR_VERSION;
    read_text(&r, out->id, STORE_CONV_ID_MAX);
    read_text(&r, out->title, CONV_TITLE_MAX);
    read_text(&r, out->last_request_key, CONV_KEY_MAX);
    read_hash(&r, out->tokenizer_id);
    read_hash(&r, out->fingerprint);
    out->created_us = reader_u64(&r);
    out->updated_us = reader_u64(&r);
    int rc = read_arrays(&r, out);
    if (rc == 0 && (r.bad || r.next != r.end || !is_consistent(out)))
        rc = -TD_ERR_FORMAT;
    if (rc < 0)
        conv_free(out);
    return rc;
}
