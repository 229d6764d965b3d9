/* vault: see vault.h and filter.h. As bytes:
 *
 *     "TDVT" | u16 version = 1 | u16 zero | u32 entry count | entries
 *     entry: u8 kind | u8 zero | u16 number | u16 size | value        size 0: the number is reserved
 *
 * Invariants: a value occurs once; a (kind, number) has one value or is reserved; numbers are given in order of
 * first appearance, the reserved ones left out. */
#include "edge/vault.h"
#include "edge/filter_automaton.h"
#include "shared/crypto.h"
#include "shared/tokenizer.h"
#include <stdlib.h>

#define VAULT_VERSION   1
#define HEAD_SIZE       12u
#define ENTRY_HEAD_SIZE 6u
#define SLOT_COUNT      8192u /* of the hash table; a power of two, twice FILTER_VAULT_MAX */
#define RESERVED        UINT16_MAX

static const char *const kind_names[PII_KIND_COUNT] = {"EMAIL", "PHONE", "CARD", "IP", "IBAN"};

struct value {
    char *text;
    uint16_t size;
    struct vault_placeholder placeholder;
};
struct vault {
    struct value *values;
    size_t count, capacity;
    uint16_t slots[SLOT_COUNT];                               /* value index + 1, by hash of the value */
    uint16_t by_number[PII_KIND_COUNT][VAULT_NUMBER_MAX + 1]; /* value index + 1, RESERVED, or 0 */
    uint16_t next[PII_KIND_COUNT];                            /* no smaller number is free */
    struct automaton *automaton; /* over the first automaton_count values, or NULL */
    size_t automaton_count;
};

/* ---- placeholders ---- */

/* How far text agrees with `name`: 1 whole, 0 not, -1 as far as text goes. */
static int agrees(const char *text, size_t size, const char *name)
{
    size_t length = strlen(name);
    if (memcmp(text, name, TD_MIN(size, length)) != 0)
        return 0;
    return size >= length ? 1 : -1;
}

/* At the number, after "[KIND_". */
static int parse_number(const char *text, size_t size, size_t at, uint16_t *number)
{
    unsigned value = 0;
    size_t begin = at;
    for (; at < size && text[at] >= '0' && text[at] <= '9'; at++) {
        value = value * 10 + (unsigned)(text[at] - '0');
        if (value == 0 || value > VAULT_NUMBER_MAX)
            return 0;
    }
    if (at == size)
        return -TD_ERR_TRUNCATED;
    if (at == begin || text[at] != ']')
        return 0;
    *number = (uint16_t)value;
    return (int)at + 1;
}

int vault_placeholder_parse(const char *text, size_t size, struct vault_placeholder *out)
{
    if (size == 0 || text[0] != '[')
        return size == 0 ? -TD_ERR_TRUNCATED : 0;
    bool partly = false;
    for (uint8_t kind = 0; kind < PII_KIND_COUNT; kind++) {
        size_t length = strlen(kind_names[kind]);
        int agreed = agrees(text + 1, size - 1, kind_names[kind]);
        partly = partly || agreed < 0;
        if (agreed != 1)
            continue;
        if (size == 1 + length)
            return -TD_ERR_TRUNCATED;
        if (text[1 + length] != '_')
            continue;
        out->kind = kind;
        return parse_number(text, size, length + 2, &out->number);
    }
    return partly ? -TD_ERR_TRUNCATED : 0;
}

size_t vault_placeholder_print(struct vault_placeholder p, char out[VAULT_PLACEHOLDER_MAX + 1])
{
    char digits[5];
    size_t size = 0, count = 0, length = strlen(kind_names[p.kind]);
    out[size++] = '[';
    memcpy(out + size, kind_names[p.kind], length);
    size += length;
    out[size++] = '_';
    for (unsigned n = p.number; n > 0; n /= 10)
        digits[count++] = (char)('0' + n % 10);
    while (count > 0)
        out[size++] = digits[--count];
    out[size++] = ']';
    out[size] = '\0';
    return size;
}

/* ---- life ---- */

struct vault *vault_create(void)
{
    struct vault *v = calloc(1, sizeof *v);
    for (int kind = 0; v && kind < PII_KIND_COUNT; kind++)
        v->next[kind] = 1;
    return v;
}

void vault_destroy(struct vault *v)
{
    if (!v)
        return;
    for (size_t i = 0; i < v->count; i++) {
        crypto_wipe(v->values[i].text, v->values[i].size);
        free(v->values[i].text);
    }
    free(v->values);
    automaton_destroy(v->automaton);
    free(v);
}

size_t vault_count(const struct vault *v)
{
    return v->count;
}

/* ---- values ---- */

/* The slot of a value, or the empty one where it belongs. */
static uint16_t *slot_of(struct vault *v, const char *text, size_t size)
{
    uint32_t at = crc32c(0, text, size) % SLOT_COUNT;
    for (; v->slots[at]; at = (at + 1) % SLOT_COUNT) {
        const struct value *value = &v->values[v->slots[at] - 1];
        if (value->size == size && memcmp(value->text, text, size) == 0)
            break;
    }
    return &v->slots[at];
}

/* A value that is not there, under a free number. */
static int insert(struct vault *v, struct vault_placeholder p, const char *text, size_t size, uint16_t *slot)
{
    if (v->count == FILTER_VAULT_MAX || size == 0 || size > FILTER_VALUE_MAX)
        return -TD_ERR_LIMIT;
    if (v->count == v->capacity) {
        size_t capacity = v->capacity ? 2 * v->capacity : 8;
        struct value *values = realloc(v->values, capacity * sizeof *values);
        if (!values)
            return -TD_ERR_NOMEM;
        v->values = values;
        v->capacity = capacity;
    }
    char *copy = malloc(size);
    if (!copy)
        return -TD_ERR_NOMEM;
    memcpy(copy, text, size);
    v->values[v->count++] = (struct value){copy, (uint16_t)size, p};
    *slot = (uint16_t)v->count;
    v->by_number[p.kind][p.number] = (uint16_t)v->count;
    return 0;
}

struct span vault_find(const struct vault *v, struct vault_placeholder p)
{
    uint16_t index = v->by_number[p.kind][p.number];
    if (index == 0 || index == RESERVED)
        return (struct span){NULL, 0};
    const struct value *value = &v->values[index - 1];
    return (struct span){(const uint8_t *)value->text, value->size};
}

int vault_put(struct vault *v, uint8_t kind, const char *text, size_t size, struct vault_placeholder *out)
{
    uint16_t *slot = slot_of(v, text, size);
    if (*slot) {
        *out = v->values[*slot - 1].placeholder;
        return 0;
    }
    uint16_t number = v->next[kind];
    while (number <= VAULT_NUMBER_MAX && v->by_number[kind][number])
        number++;
    v->next[kind] = number;
    if (number > VAULT_NUMBER_MAX)
        return -TD_ERR_LIMIT;
    *out = (struct vault_placeholder){kind, number};
    return insert(v, *out, text, size, slot);
}

void vault_reserve(struct vault *v, struct vault_placeholder p)
{
    uint16_t *entry = &v->by_number[p.kind][p.number];
    if (*entry == 0)
        *entry = RESERVED;
}

/* ---- values in a text ---- */

static int refresh_automaton(struct vault *v)
{
    if (v->automaton_count == v->count)
        return 0;
    automaton_destroy(v->automaton);
    v->automaton = NULL;
    v->automaton_count = 0;
    struct span *spans = malloc(v->count * sizeof *spans);
    if (!spans)
        return -TD_ERR_NOMEM;
    for (size_t i = 0; i < v->count; i++)
        spans[i] = (struct span){(const uint8_t *)v->values[i].text, v->values[i].size};
    int rc = automaton_create(spans, v->count, &v->automaton);
    free(spans);
    if (rc == 0)
        v->automaton_count = v->count;
    return rc;
}

/* Not a part of a longer word or number. */
static bool stands_alone(const char *text, size_t size, size_t begin, size_t end)
{
    bool joined_before =
        filter_is_word(filter_after(text, size, begin)) && filter_is_word(filter_before(text, begin));
    uint32_t after = filter_after(text, size, end);
    bool joined_after = filter_is_word(filter_before(text, end)) && filter_is_word(after);
    return !joined_before && !joined_after;
}

int vault_scan(struct vault *v, const char *text, size_t size, struct filter_spans *out)
{
    int rc = refresh_automaton(v);
    if (rc < 0 || v->count == 0)
        return rc;
    uint32_t state = 0;
    for (size_t i = 0; i < size; i++) {
        state = automaton_step(v->automaton, state, (uint8_t)text[i]);
        uint32_t match = automaton_match(v->automaton, state);
        for (; match != AUTOMATON_NONE; match = automaton_next(v->automaton, match)) {
            const struct value *value = &v->values[automaton_word(v->automaton, match)];
            size_t end = i + 1, begin = end - value->size;
            if (!stands_alone(text, size, begin, end))
                continue;
            if (filter_spans_add(out, begin, end, value->placeholder.kind) < 0)
                return -TD_ERR_NOMEM;
            break; /* the longest */
        }
    }
    return 0;
}

/* ---- bytes ---- */

/* Entries of the reserved numbers are written to `out` unless it is NULL; their count is returned. */
static size_t write_reserved(const struct vault *v, uint8_t *out)
{
    size_t count = 0;
    for (uint8_t kind = 0; kind < PII_KIND_COUNT; kind++)
        for (uint16_t number = 1; number <= VAULT_NUMBER_MAX; number++) {
            if (v->by_number[kind][number] != RESERVED)
                continue;
            if (out) {
                uint8_t *entry = out + ENTRY_HEAD_SIZE * count;
                memset(entry, 0, ENTRY_HEAD_SIZE);
                entry[0] = kind;
                store_le16(entry + 2, number);
            }
            count++;
        }
    return count;
}

int vault_serialise(const struct vault *v, uint8_t **out, size_t *size)
{
    size_t reserved = write_reserved(v, NULL), total = HEAD_SIZE + ENTRY_HEAD_SIZE * (reserved + v->count);
    for (size_t i = 0; i < v->count; i++)
        total += v->values[i].size;
    uint8_t *bytes = malloc(total), *p = bytes;
    *out = NULL;
    if (!bytes)
        return -TD_ERR_NOMEM;
    memcpy(p, "TDVT", 4);
    store_le16(p + 4, VAULT_VERSION);
    store_le16(p + 6, 0);
    store_le32(p + 8, (uint32_t)(reserved + v->count));
    p += HEAD_SIZE;
    for (size_t i = 0; i < v->count; i++) {
        const struct value *value = &v->values[i];
        p[0] = value->placeholder.kind;
        p[1] = 0;
        store_le16(p + 2, value->placeholder.number);
        store_le16(p + 4, value->size);
        memcpy(p + ENTRY_HEAD_SIZE, value->text, value->size);
        p += ENTRY_HEAD_SIZE + value->size;
    }
    write_reserved(v, p);
    *out = bytes;
    *size = total;
    return 0;
}

static int parse_entry(struct vault *v, struct reader *r)
{
    struct vault_placeholder p = {.kind = reader_u8(r)};
    uint8_t zero = reader_u8(r);
    p.number = reader_u16(r);
    uint16_t size = reader_u16(r);
    const char *text = (const char *)reader_take(r, size);
    if (r->bad)
        return -TD_ERR_TRUNCATED;
    if (p.kind >= PII_KIND_COUNT || zero != 0 || p.number == 0 || p.number > VAULT_NUMBER_MAX ||
        v->by_number[p.kind][p.number])
        return -TD_ERR_FORMAT;
    if (size == 0) {
        vault_reserve(v, p);
        return 0;
    }
    uint16_t *slot = slot_of(v, text, size);
    if (*slot || !utf8_valid(text, size))
        return -TD_ERR_FORMAT;
    return insert(v, p, text, size, slot);
}

int vault_parse(const void *data, size_t size, struct vault **out)
{
    struct reader r = reader_over(data, size);
    const uint8_t *magic = reader_take(&r, 4);
    uint16_t version = reader_u16(&r), zero = reader_u16(&r);
    uint32_t count = reader_u32(&r);
    *out = NULL;
    if (r.bad)
        return -TD_ERR_TRUNCATED;
    if (memcmp(magic, "TDVT", 4) != 0 || zero != 0)
        return -TD_ERR_FORMAT;
    if (version != VAULT_VERSION)
        return -TD_ERR_VERSION;
    struct vault *v = vault_create();
    int rc = v ? 0 : -TD_ERR_NOMEM;
    for (uint32_t i = 0; rc == 0 && i < count; i++)
        rc = parse_entry(v, &r);
    if (rc == 0 && r.next != r.end)
        rc = -TD_ERR_FORMAT;
    if (rc < 0) {
        vault_destroy(v);
        return rc;
    }
    *out = v;
    return 0;
}
