/* kv_record: see kv_record.h. */
#include "shared/kv_record.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define RECORD_FORMAT  "tandem-codec-quality"
#define RECORD_VERSION 1
#define PATH_SIZE_MAX  4096

const struct kv_level KV_LEVEL_LIST[KV_LEVELS] = {
    {"raw", KV_RAW, {0, 0}}, {"l0", KV_L0, {0, 0}},    {"l1", KV_L1, {1, 1}},
    {"l2", KV_L2, {0, 0}},   {"l2-k5", KV_L2, {1, 0}}, {"l2-5bit", KV_L2, {1, 1}},
};

const struct kv_level *kv_level_find(const char *name)
{
    for (size_t i = 0; i < KV_LEVELS; i++)
        if (strcmp(KV_LEVEL_LIST[i].name, name) == 0)
            return &KV_LEVEL_LIST[i];
    return NULL;
}

uint8_t kv_level_table(const struct kv_level *level, uint8_t is_value, uint32_t block_index)
{
    return level->codec == KV_L1 && block_index == 0 ? 0 : level->table[is_value];
}

int kv_record_path(const char *model_path, char *out, size_t size)
{
    int length = snprintf(out, size, "%s.codec.json", model_path);
    return length > 0 && (size_t)length < size ? 0 : -TD_ERR_NOSPACE;
}

/* ---- gate -------------------------------------------------------------------------------------------------
 */

const char *kv_gate(const struct kv_record *r, const struct kv_level *level)
{
    const struct kv_level_quality *q = &r->levels[level - KV_LEVEL_LIST];
    if (!q->known)
        return "it was not measured";
    if (r->token_count < KV_GATE_TOKENS_MIN || r->text_count < KV_GATE_TEXTS_MIN)
        return "it was measured on too few tokens or texts";
    /* Written so that a NaN fails. */
    if (!(q->kl_mean <= KV_GATE_KL_MEAN))
        return "its mean divergence is above the limit";
    if (!(q->kl_p99 <= KV_GATE_KL_P99))
        return "its 99th percentile of divergence is above the limit";
    if (!(q->top1 >= KV_GATE_TOP1))
        return "the likeliest token changes too often";
    if (!(q->ppl_change <= KV_GATE_PPL && q->ppl_change_high <= KV_GATE_PPL_HIGH))
        return "perplexity grows by more than the limit";
    return NULL;
}

int kv_level_allowed(const struct kv_level *level, const char *model_path,
                     const uint8_t fingerprint[TD_HASH_SIZE], struct td_error *err)
{
    if (level->codec == KV_RAW || level->codec == KV_L0)
        return 0;
    char path[PATH_SIZE_MAX];
    if (kv_record_path(model_path, path, sizeof path) < 0)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot look for the quality record of a model: the path is too long");
    struct kv_record r;
    struct td_error trouble = {0};
    int rc = kv_record_load(&r, path, fingerprint, &trouble);
    bool measured = rc == 0 && r.levels[level - KV_LEVEL_LIST].known;
    if (level->codec == KV_L1 && !measured && (rc == 0 || rc == -TD_ERR_NOTFOUND))
        return 0;
    if (rc == -TD_ERR_NOTFOUND)
        return td_fail(err, -TD_ERR_BLOCKED,
                       "codec %s is not used with this model: there is no quality record %s; measure it with "
                       "'tandem bench codec'",
                       level->name, path);
    if (rc < 0)
        return td_fail(err, rc, "%s", trouble.text);
    const char *why = kv_gate(&r, level);
    if (why)
        return td_fail(err, -TD_ERR_BLOCKED, "codec %s is not used with this model: %s (%s); choose another",
                       level->name, why, path);
    return 0;
}

int kv_level_choose(const char *model_path, const uint8_t fingerprint[TD_HASH_SIZE],
                    const struct kv_level **out, struct td_error *err)
{
    static const char *const by_size[] = {"l2", "l2-k5", "l2-5bit", "l1", "l0"};
    int rc = -TD_ERR_BLOCKED;
    for (size_t i = 0; i < TD_COUNT(by_size) && rc == -TD_ERR_BLOCKED; i++) {
        struct td_error why = {0};
        *out = kv_level_find(by_size[i]);
        rc = kv_level_allowed(*out, model_path, fingerprint, &why);
        if (rc < 0 && rc != -TD_ERR_BLOCKED)
            return td_fail(err, rc, "%s", why.text);
    }
    return rc;
}

/* ---- file -------------------------------------------------------------------------------------------------
 */

static const struct {
    const char *name;
    size_t offset;
} NUMBERS[] = {
#define NUMBER(member)                                                                                       \
    {                                                                                                        \
#member, offsetof(struct kv_level_quality, member)                                                   \
    }
    NUMBER(bits_per_value), NUMBER(kl_mean),        NUMBER(kl_p99),          NUMBER(top1),
    NUMBER(ppl_change),     NUMBER(ppl_change_low), NUMBER(ppl_change_high), NUMBER(encode_gb_s),
    NUMBER(decode_gb_s),
#undef NUMBER
};

static json_t *level_to_json(const struct kv_level *level, const struct kv_level_quality *q)
{
    json_t *o = json_pack("{s:s,s:i,s:i,s:i}", "level", level->name, "codec", (int)level->codec, "table_k",
                          (int)level->table[0], "table_v", (int)level->table[1]);
    for (size_t i = 0; o && i < TD_COUNT(NUMBERS); i++) {
        double number;
        memcpy(&number, (const uint8_t *)q + NUMBERS[i].offset, sizeof number);
        json_object_set_new(o, NUMBERS[i].name, json_real(number));
    }
    return o;
}

static json_t *record_to_json(const struct kv_record *r)
{
    char hex[2 * TD_HASH_SIZE + 1];
    hex_encode(r->fingerprint, TD_HASH_SIZE, hex);
    json_t *levels = json_array();
    for (size_t i = 0; i < KV_LEVELS; i++)
        if (r->levels[i].known)
            json_array_append_new(levels, level_to_json(&KV_LEVEL_LIST[i], &r->levels[i]));
    return json_pack("{s:s,s:i,s:s,s:I,s:i,s:o}", "format", RECORD_FORMAT, "version", RECORD_VERSION,
                     "fingerprint", hex, "tokens", (json_int_t)r->token_count, "texts", (int)r->text_count,
                     "levels", levels);
}

int kv_record_save(const struct kv_record *r, const char *path, struct td_error *err)
{
    char temporary[PATH_SIZE_MAX];
    int length = snprintf(temporary, sizeof temporary, "%s.new", path);
    if (length < 0 || (size_t)length >= sizeof temporary)
        return td_fail(err, -TD_ERR_ARG, "cannot write the quality record: its path is too long");
    json_t *json = record_to_json(r);
    if (!json)
        return td_fail(err, -TD_ERR_NOMEM, "cannot write %s: out of memory", path);
    int failed = json_dump_file(json, temporary, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
    json_decref(json);
    if (!failed && rename(temporary, path) == 0)
        return 0;
    int code = errno;
    unlink(temporary);
    return td_fail(err, -TD_ERR_IO, "cannot write %s: %s", path, strerror(code));
}

static bool level_from_json(const json_t *o, struct kv_record *r)
{
    const char *name = json_string_value(json_object_get(o, "level"));
    const struct kv_level *level = kv_level_find(name ? name : "");
    if (!level)
        return true; /* of a later version */
    struct kv_level_quality *q = &r->levels[level - KV_LEVEL_LIST];
    for (size_t i = 0; i < TD_COUNT(NUMBERS); i++) {
        const json_t *number = json_object_get(o, NUMBERS[i].name);
        if (!json_is_number(number))
            return false;
        double value = json_number_value(number);
        memcpy((uint8_t *)q + NUMBERS[i].offset, &value, sizeof value);
    }
    /* Of other tables: a measurement of something else. */
    q->known = json_integer_value(json_object_get(o, "codec")) == level->codec &&
               json_integer_value(json_object_get(o, "table_k")) == level->table[0] &&
               json_integer_value(json_object_get(o, "table_v")) == level->table[1];
    return true;
}

static int record_from_json(const json_t *o, const char *path, struct kv_record *r, struct td_error *err)
{
    const char *format = json_string_value(json_object_get(o, "format"));
    const char *hex = json_string_value(json_object_get(o, "fingerprint"));
    const json_t *levels = json_object_get(o, "levels");
    json_int_t tokens = json_integer_value(json_object_get(o, "tokens")),
               texts = json_integer_value(json_object_get(o, "texts"));
    bool good = format && strcmp(format, RECORD_FORMAT) == 0 && hex && strlen(hex) == 2 * TD_HASH_SIZE &&
                hex_decode(hex, r->fingerprint, TD_HASH_SIZE) == 0 && json_is_array(levels) && tokens >= 0 &&
                texts >= 0 && texts <= INT32_MAX;
    if (good && json_integer_value(json_object_get(o, "version")) != RECORD_VERSION)
        return td_fail(err, -TD_ERR_VERSION, "cannot use %s: it is of another version; measure again", path);
    for (size_t i = 0; good && i < json_array_size(levels); i++)
        good = level_from_json(json_array_get(levels, i), r);
    if (!good)
        return td_fail(err, -TD_ERR_FORMAT, "cannot use %s: it is no quality record; measure again", path);
    r->token_count = (uint64_t)tokens;
    r->text_count = (uint32_t)texts;
    return 0;
}

static int file_read(const char *path, char **text, size_t *size, struct td_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return td_fail(err, errno == ENOENT ? -TD_ERR_NOTFOUND : -TD_ERR_IO, "cannot read %s: %s", path,
                       strerror(errno));
    *text = malloc(KV_RECORD_SIZE_MAX);
    ssize_t got = 0;
    *size = 0;
    while (*text && *size < KV_RECORD_SIZE_MAX &&
           (got = read(fd, *text + *size, KV_RECORD_SIZE_MAX - *size)) > 0)
        *size += (size_t)got;
    close(fd);
    if (*text && got >= 0 && *size < KV_RECORD_SIZE_MAX)
        return 0;
    int rc = !*text ? -TD_ERR_NOMEM : got < 0 ? -TD_ERR_IO : -TD_ERR_LIMIT;
    free(*text);
    return td_fail(err, rc, "cannot read %s: %s", path, td_status_text(rc));
}

int kv_record_load(struct kv_record *r, const char *path, const uint8_t fingerprint[TD_HASH_SIZE],
                   struct td_error *err)
{
    char *text = NULL;
    size_t size = 0;
    *r = (struct kv_record){0};
    int rc = file_read(path, &text, &size, err);
    if (rc < 0)
        return rc;
    json_t *json = json_loadb(text, size, JSON_REJECT_DUPLICATES, NULL);
    free(text);
    rc = record_from_json(json, path, r, err);
    json_decref(json);
    if (rc == 0 && memcmp(r->fingerprint, fingerprint, TD_HASH_SIZE) != 0)
        return td_fail(err, -TD_ERR_MISMATCH, "cannot use %s: it is the record of another model", path);
    return rc;
}
