/* tokenizer_load: the tokenizer.ggml.* keys of a model file -> the tables of struct tokenizer.
 *
 * Everything is copied, so the file may be closed afterwards. What the keys say is checked here once: counts
 * that agree, ids inside the vocabulary, no token twice. Where a key is missing the defaults are those of the
 * format's reference implementation. */
#include "shared/tokenizer_internal.h"
#include "shared/crypto.h"
#include "shared/utf8.h"

#include <stdio.h>
#include <stdlib.h>

struct loader {
    struct tokenizer *t;
    const struct gguf *g;
    const struct gguf_value *tokens, *types, *scores, *merges;
    char *pool_next;       /* free part of t->pool */
    char *merge_pool_next; /* free part of t->merge_pool */
    char model[16], pre[64];
    struct td_error *err;
};

static int fail(struct loader *l, int code, const char *what)
{
    const char *path = gguf_path(l->g);
    return td_fail(l->err, code, "cannot use the tokenizer of %s: %s", path[0] ? path : "the model", what);
}

static int fail_damaged(struct loader *l, const char *what, uint64_t index)
{
    const char *path = gguf_path(l->g);
    return td_fail(l->err, -TD_ERR_FORMAT,
                   "cannot use the tokenizer of %s: %s %llu; the file is damaged, download it again",
                   path[0] ? path : "the model", what, (unsigned long long)index);
}

/* --- strings and symbols -------------------------------------------------------------------------------- */

uint64_t text_hash(const char *text, size_t size)
{
    uint64_t h = size * 0x9e3779b97f4a7c15u, word;
    for (; size >= 8; text += 8, size -= 8) {
        memcpy(&word, text, 8);
        h = mix64(h ^ word);
    }
    word = 0;
    memcpy(&word, text, size);
    return mix64(h ^ word);
}

static void table_put(struct tokenizer *t, uint32_t symbol)
{
    struct span text = t->symbols[symbol];
    size_t mask = t->table.slot_count - 1;
    size_t i = (size_t)text_hash((const char *)text.data, text.size) & mask;
    while (t->table.slots[i])
        i = (i + 1) & mask;
    t->table.slots[i] = symbol + 1;
}

/* Room for `count` symbols and for a table of them that is at most half full. */
static int reserve_symbols(struct loader *l, size_t count)
{
    struct tokenizer *t = l->t;
    size_t slot_count = 1024;
    while (slot_count < count * 2)
        slot_count *= 2;
    struct span *symbols = realloc(t->symbols, count * sizeof *symbols);
    if (symbols)
        t->symbols = symbols;
    uint32_t *slots = calloc(slot_count, sizeof *slots);
    if (!symbols || !slots) {
        free(slots);
        return fail(l, -TD_ERR_NOMEM, "out of memory");
    }
    free(t->table.slots);
    t->table = (struct text_table){slots, slot_count};
    t->symbol_capacity = (uint32_t)count;
    for (uint32_t i = 0; i < t->symbol_count; i++)
        if (t->symbols[i].size)
            table_put(t, i);
    return 0;
}

/* The symbol of a string, added when it is new; `text` must live as long as the tokenizer. */
static int intern(struct loader *l, const char *text, size_t size, uint32_t *symbol)
{
    struct tokenizer *t = l->t;
    *symbol = text_table_find(t, text, size);
    if (*symbol != SYMBOL_NONE)
        return 0;
    if (t->symbol_count == t->symbol_capacity) {
        int rc = reserve_symbols(l, (size_t)t->symbol_capacity * 2);
        if (rc != 0)
            return rc;
    }
    *symbol = t->symbol_count++;
    t->symbols[*symbol] = (struct span){(const uint8_t *)text, size};
    table_put(t, *symbol);
    return 0;
}

/* --- keys ----------------------------------------------------------------------------------------------- */

static bool copy_string(const struct gguf *g, const char *key, char *out, size_t size)
{
    struct span s;
    if (!gguf_get_string(g, key, &s) || s.size >= size || memchr(s.data, 0, s.size))
        return false;
    memcpy(out, s.data, s.size);
    out[s.size] = 0;
    return true;
}

static int load_kind(struct loader *l)
{
    struct tokenizer *t = l->t;
    if (!gguf_find(l->g, "tokenizer.ggml.model"))
        return fail(l, -TD_ERR_NOTFOUND,
                    "the file has none (no key tokenizer.ggml.model); use a complete model file");
    copy_string(l->g, "tokenizer.ggml.model", l->model, sizeof l->model);
    if (strcmp(l->model, "gpt2") == 0)
        t->kind = TOKENIZER_BPE;
    else if (strcmp(l->model, "llama") == 0)
        t->kind = TOKENIZER_SPM;
    else
        return fail(l, -TD_ERR_UNSUPPORTED,
                    "tokenizer.ggml.model is none of gpt2 and llama; use a model of these kinds");
    return 0;
}

static int load_pre(struct loader *l, const char *override)
{
    static const struct {
        const char *name;
        enum pre_kind kind;
    } known[] = {
        {"smollm", PRE_SMOLLM},    {"llama-bpe", PRE_LLAMA_BPE}, {"llama-v3", PRE_LLAMA_BPE},
        {"llama3", PRE_LLAMA_BPE}, {"qwen2", PRE_QWEN2},         {"deepseek-r1-qwen", PRE_QWEN2},
    };
    if (l->t->kind != TOKENIZER_BPE)
        return 0;
    if (override)
        snprintf(l->pre, sizeof l->pre, "%s", override);
    else if (!copy_string(l->g, "tokenizer.ggml.pre", l->pre, sizeof l->pre))
        return fail(l, -TD_ERR_UNSUPPORTED,
                    "it names no pre-tokenizer (key tokenizer.ggml.pre); if you know it, give --pretokenizer "
                    "smollm, llama-bpe or qwen2");
    for (size_t i = 0; i < TD_COUNT(known); i++) {
        if (strcmp(l->pre, known[i].name) == 0) {
            l->t->pre = known[i].kind;
            l->t->ignore_merges = known[i].kind == PRE_LLAMA_BPE;
            return 0;
        }
    }
    return fail(l, -TD_ERR_UNSUPPORTED,
                "its pre-tokenizer is none of smollm, llama-bpe and qwen2; use another model, or "
                "--pretokenizer if it is the same under another name");
}

static const struct gguf_value *array_of(const struct gguf *g, const char *key, enum gguf_value_type type)
{
    const struct gguf_value *v = gguf_find(g, key);
    return v && v->type == GGUF_VALUE_ARRAY && v->element_type == type ? v : NULL;
}

static int load_arrays(struct loader *l)
{
    l->tokens = array_of(l->g, "tokenizer.ggml.tokens", GGUF_VALUE_STRING);
    l->types = gguf_find(l->g, "tokenizer.ggml.token_type");
    l->scores = array_of(l->g, "tokenizer.ggml.scores", GGUF_VALUE_F32);
    l->merges = array_of(l->g, "tokenizer.ggml.merges", GGUF_VALUE_STRING);
    if (!l->tokens || l->tokens->count == 0)
        return fail(l, -TD_ERR_FORMAT,
                    "it lists no tokens (key tokenizer.ggml.tokens); use a complete model file");
    if ((l->types && l->types->count != l->tokens->count) ||
        (l->scores && l->scores->count != l->tokens->count))
        return fail(l, -TD_ERR_FORMAT,
                    "tokens, token_type and scores differ in length; the file is damaged, download it again");
    if (l->t->kind == TOKENIZER_BPE && !l->merges)
        return fail(l, -TD_ERR_FORMAT,
                    "it has no merges (key tokenizer.ggml.merges); use a complete model file");
    l->t->vocab_count = (uint32_t)l->tokens->count;
    return 0;
}

static int load_id(struct loader *l, const char *key, int32_t *out)
{
    uint32_t id;
    *out = -1;
    if (!gguf_get_u32(l->g, key, &id))
        return 0;
    if (id >= l->t->vocab_count)
        return fail_damaged(l, "a special token lies outside the vocabulary: id", id);
    *out = (int32_t)id;
    return 0;
}

/* --- bytes and pieces ----------------------------------------------------------------------------------- */

/* Byte-level BPE writes every byte as a visible character: printable Latin-1 as itself, the others as U+0100
 * on, in order. */
static void fill_byte_text(struct tokenizer *t)
{
    uint32_t other = 256;
    for (uint32_t b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);
        uint32_t cp = printable ? b : other++;
        if (cp < 0x80) {
            t->byte_text[b][0] = (char)cp;
            t->byte_text_size[b] = 1;
        } else {
            t->byte_text[b][0] = (char)(0xc0 | cp >> 6);
            t->byte_text[b][1] = (char)(0x80 | (cp & 0x3f));
            t->byte_text_size[b] = 2;
        }
    }
}

/* The byte that code point cp stands for in a BPE vocabulary, or -1. */
static int byte_of(const struct tokenizer *t, const char *text, size_t size)
{
    for (int b = 0; b < 256; b++)
        if (t->byte_text_size[b] == size && memcmp(t->byte_text[b], text, size) == 0)
            return b;
    return -1;
}

/* "<0x41>" -> 0x41; -1 for other texts. */
static int parse_byte_token(struct span text)
{
    static const char digits[] = "0123456789ABCDEF";
    if (text.size != 6 || memcmp(text.data, "<0x", 3) != 0 || text.data[5] != '>')
        return -1;
    const char *high = memchr(digits, text.data[3], 16), *low = memchr(digits, text.data[4], 16);
    return high && low ? (int)((high - digits) * 16 + (low - digits)) : -1;
}

/* Write the bytes that a normal token stands for; never more than its text. */
static size_t decode_text(const struct tokenizer *t, struct span text, const int16_t byte_of_cp[512],
                          char *out)
{
    const char *s = (const char *)text.data;
    size_t used = 0, step;
    for (size_t i = 0; i < text.size; i += step) {
        uint32_t cp;
        step = utf8_decode(s + i, text.size - i, &cp);
        if (t->kind == TOKENIZER_SPM && cp == 0x2581) {
            out[used++] = ' ';
        } else if (t->kind == TOKENIZER_BPE && cp < 512 && byte_of_cp[cp] >= 0) {
            out[used++] = (char)byte_of_cp[cp];
        } else {
            memcpy(out + used, s + i, step);
            used += step;
        }
    }
    return used;
}

/* Scores are merged from the highest down; this maps them to integers that go from the lowest up. */
static uint32_t rank_of_score(float score)
{
    uint32_t bits;
    if (score != score)
        return UINT32_MAX;
    score += 0.0f; /* -0 and +0 are the same score */
    memcpy(&bits, &score, sizeof bits);
    uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return ~ascending;
}

/* --- vocabulary ----------------------------------------------------------------------------------------- */

static int allocate_vocab(struct loader *l)
{
    struct tokenizer *t = l->t;
    size_t text_size = 0;
    for (uint64_t i = 0; i < l->tokens->count; i++) {
        struct span text;
        gguf_array_string(l->tokens, i, &text);
        text_size += text.size;
    }
    t->tokens = calloc(t->vocab_count, sizeof *t->tokens);
    t->pool = malloc(text_size * 2 + 1); /* a text and its piece, which is never longer */
    if (!t->tokens || !t->pool)
        return fail(l, -TD_ERR_NOMEM, "out of memory");
    l->pool_next = t->pool;
    return reserve_symbols(l, (size_t)t->vocab_count + 512);
}

static char *pool_copy(struct loader *l, const void *data, size_t size)
{
    char *at = l->pool_next;
    memcpy(at, data, size);
    l->pool_next += size;
    return at;
}

static int load_token(struct loader *l, uint32_t id, const int16_t byte_of_cp[512])
{
    struct tokenizer *t = l->t;
    struct vocab_token *token = &t->tokens[id];
    struct span text;
    int64_t type = TOKEN_NORMAL;
    float score = 0;
    gguf_array_string(l->tokens, id, &text);
    if (l->types && (!gguf_array_i64(l->types, id, &type) || type < 0 || type > 255))
        return fail_damaged(l, "a wrong type of token", id);
    if (l->scores)
        gguf_array_f32(l->scores, id, &score);
    token->text = (struct span){(uint8_t *)pool_copy(l, text.data, text.size), text.size};
    token->type = (uint8_t)type;
    token->rank = rank_of_score(score);
    token->hidden = type == TOKEN_CONTROL || type == TOKEN_UNKNOWN;

    int byte = type == TOKEN_BYTE ? parse_byte_token(text) : -1;
    size_t piece_size = text.size;
    if (byte >= 0)
        *l->pool_next = (char)byte, piece_size = 1;
    else if (token->hidden || type == TOKEN_USER_DEFINED)
        memcpy(l->pool_next, text.data, text.size);
    else
        piece_size = decode_text(t, text, byte_of_cp, l->pool_next);
    token->piece = (struct span){(uint8_t *)l->pool_next, piece_size};
    l->pool_next += piece_size;

    token->plain = !token->hidden && type != TOKEN_BYTE && text.size > 0;
    t->text_size_max = TD_MAX(t->text_size_max, text.size);
    t->symbols[id] = token->text;
    if (text.size == 0) /* padding: cannot be found, stands for nothing */
        return 0;
    if (text_table_find(t, (const char *)text.data, text.size) != SYMBOL_NONE)
        return fail_damaged(l, "one text belongs to two tokens, the second is", id);
    table_put(t, id);
    return 0;
}

static int load_vocab(struct loader *l)
{
    int16_t byte_of_cp[512];
    int rc = allocate_vocab(l);
    if (l->t->kind == TOKENIZER_BPE)
        fill_byte_text(l->t);
    for (uint32_t cp = 0; cp < TD_COUNT(byte_of_cp); cp++) {
        char text[2] = {(char)(0xc0 | cp >> 6), (char)(0x80 | (cp & 0x3f))};
        if (cp < 0x80)
            text[0] = (char)cp;
        byte_of_cp[cp] = (int16_t)byte_of(l->t, text, cp < 0x80 ? 1 : 2);
    }
    for (uint32_t id = 0; id < l->t->vocab_count && rc == 0; id++)
        rc = load_token(l, id, byte_of_cp);
    l->t->symbol_count = l->t->vocab_count;
    return rc;
}

/* SPM: a border between a character and a blank that no token crosses is a place where text may be cut. */
static bool spaces_lead(const struct tokenizer *t)
{
    for (uint32_t id = 0; id < t->vocab_count; id++) {
        const char *text = (const char *)t->tokens[id].text.data;
        size_t size = t->tokens[id].text.size;
        for (size_t i = 1; i + 3 <= size; i++)
            if (is_blank(text + i, size - i) && !(i >= 3 && is_blank(text + i - 3, 3)))
                return false;
    }
    return true;
}

/* Which token stands for a byte that merging left alone. */
static int load_bytes(struct loader *l)
{
    struct tokenizer *t = l->t;
    for (uint32_t b = 0; b < 256; b++) {
        char text[8];
        uint32_t symbol;
        if (t->kind == TOKENIZER_BPE) {
            int rc = intern(l, t->byte_text[b], t->byte_text_size[b], &symbol);
            if (rc != 0)
                return rc;
            t->byte_symbol[b] = symbol;
            t->byte_token[b] = symbol < t->vocab_count && t->tokens[symbol].plain ? (int32_t)symbol : -1;
            continue;
        }
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
        symbol = text_table_find(t, text, 6);
        if (symbol == SYMBOL_NONE || t->tokens[symbol].type != TOKEN_BYTE) {
            text[0] = (char)b;
            symbol = text_table_find(t, text, 1);
        }
        t->byte_token[b] =
            symbol < t->vocab_count && !t->tokens[symbol].hidden ? (int32_t)symbol : t->unknown;
    }
    return 0;
}

/* --- merges --------------------------------------------------------------------------------------------- */

static void put_pair(struct tokenizer *t, struct pair_slot pair)
{
    size_t mask = t->pair_slot_count - 1;
    size_t i = (size_t)mix64((uint64_t)pair.left << 32 | pair.right) & mask;
    for (; t->pairs[i].left != SYMBOL_NONE; i = (i + 1) & mask)
        if (t->pairs[i].left == pair.left && t->pairs[i].right == pair.right)
            return; /* the first mention counts */
    t->pairs[i] = pair;
}

/* "left right"; the second blank on belongs to right, and a blank in front to left. */
static int load_merge(struct loader *l, uint64_t index)
{
    struct tokenizer *t = l->t;
    struct span merge;
    struct pair_slot pair = {.rank = (uint32_t)index};
    gguf_array_string(l->merges, index, &merge);
    const uint8_t *blank = merge.size > 1 ? memchr(merge.data + 1, ' ', merge.size - 1) : NULL;
    if (!blank || blank + 1 == merge.data + merge.size)
        return fail_damaged(l, "no two parts in merge", index);
    char *text = l->merge_pool_next;
    size_t left = (size_t)(blank - merge.data), right = merge.size - left - 1;
    memcpy(text, merge.data, left);
    memcpy(text + left, blank + 1, right);
    uint32_t before = t->symbol_count;
    int rc = intern(l, text, left, &pair.left);
    if (rc == 0)
        rc = intern(l, text + left, right, &pair.right);
    if (rc == 0)
        rc = intern(l, text, left + right, &pair.merged);
    if (rc == 0)
        put_pair(t, pair);
    if (t->symbol_count != before) /* the copy is in use */
        l->merge_pool_next += left + right;
    return rc;
}

static int load_merges(struct loader *l)
{
    struct tokenizer *t = l->t;
    if (t->kind != TOKENIZER_BPE)
        return 0;
    t->pair_slot_count = 1024;
    while (t->pair_slot_count < l->merges->count * 2)
        t->pair_slot_count *= 2;
    t->pairs = malloc(t->pair_slot_count * sizeof *t->pairs);
    t->merge_pool = malloc(l->merges->raw.size + 1);
    if (!t->pairs || !t->merge_pool)
        return fail(l, -TD_ERR_NOMEM, "out of memory");
    memset(t->pairs, 0xff, t->pair_slot_count * sizeof *t->pairs); /* left = SYMBOL_NONE */
    l->merge_pool_next = t->merge_pool;
    int rc = 0;
    for (uint64_t i = 0; i < l->merges->count && rc == 0; i++)
        rc = load_merge(l, i);
    return rc;
}

/* --- special tokens ------------------------------------------------------------------------------------- */

/* Tokens that are control tokens by their name even where a file calls them normal or user-defined, and which
 * of them end a reply. The reference implementation overrides the same names, so a file gives the same ids in
 * both. */
static const struct {
    const char *name;
    bool end;
} well_known[] = {
    {"<|eot_id|>", true},
    {"<|eom_id|>", true},
    {"<|im_end|>", true},
    {"<|end|>", true},
    {"<|end_of_text|>", true},
    {"<|endoftext|>", true},
    {"<end_of_turn>", true},
    {"<end_of_utterance>", true},
    {"</s>", true},
    {"<EOT>", true},
    {"_<EOT>", true},
    {"[EOT]", true},
    {"[EOS]", true},
    {"<eos>", true},
    {"<|return|>", true},
    {"<|call|>", true},
    {"<|fim_prefix|>", false},
    {"<|fim_suffix|>", false},
    {"<|fim_middle|>", false},
    {"<|fim_pad|>", false},
    {"<|repo_name|>", false},
    {"<|file_sep|>", false},
    {"<fim_prefix>", false},
    {"<fim_suffix>", false},
    {"<fim_middle>", false},
    {"<fim_pad>", false},
};

static void hide(struct vocab_token *token)
{
    token->hidden = true;
    token->plain = false;
}

static int load_ends(struct loader *l)
{
    struct tokenizer *t = l->t;
    int32_t ids[3];
    int rc = load_id(l, "tokenizer.ggml.bos_token_id", &t->bos);
    if (rc == 0)
        rc = load_id(l, "tokenizer.ggml.eos_token_id", &t->eos);
    if (rc == 0)
        rc = load_id(l, "tokenizer.ggml.unknown_token_id", &t->unknown);
    if (rc == 0)
        rc = load_id(l, "tokenizer.ggml.eot_token_id", &ids[1]);
    if (rc == 0)
        rc = load_id(l, "tokenizer.ggml.eom_token_id", &ids[2]);
    if (rc != 0)
        return rc;
    ids[0] = t->eos;
    for (size_t i = 0; i < TD_COUNT(ids); i++)
        if (ids[i] >= 0)
            t->tokens[ids[i]].end = true;
    for (size_t i = 0; i < TD_COUNT(well_known); i++) {
        int32_t id = tokenizer_find(t, well_known[i].name);
        if (id >= 0) {
            hide(&t->tokens[id]);
            t->tokens[id].end |= well_known[i].end;
        }
    }
    return 0;
}

static int compare_specials(const void *a, const void *b, void *ctx)
{
    const struct tokenizer *t = ctx;
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    size_t x_size = t->tokens[x].text.size, y_size = t->tokens[y].text.size;
    if (x_size != y_size)
        return x_size < y_size ? 1 : -1;
    return (x > y) - (x < y);
}

static int load_specials(struct loader *l)
{
    struct tokenizer *t = l->t;
    size_t count = 0;
    for (uint32_t id = 0; id < t->vocab_count; id++)
        count += t->tokens[id].hidden || t->tokens[id].type == TOKEN_USER_DEFINED;
    t->specials = malloc((count + 1) * sizeof *t->specials);
    if (!t->specials)
        return fail(l, -TD_ERR_NOMEM, "out of memory");
    for (uint32_t id = 0; id < t->vocab_count; id++)
        if (t->tokens[id].text.size && (t->tokens[id].hidden || t->tokens[id].type == TOKEN_USER_DEFINED))
            t->specials[t->special_count++] = (int32_t)id;
    qsort_r(t->specials, t->special_count, sizeof *t->specials, compare_specials, t);
    return 0;
}

/* --- identity ------------------------------------------------------------------------------------------- */

static void hash_u64(struct sha256 *h, uint64_t value)
{
    uint8_t bytes[8];
    store_le64(bytes, value);
    sha256_update(h, bytes, sizeof bytes);
}

static void hash_bytes(struct sha256 *h, const void *data, size_t size)
{
    hash_u64(h, size);
    sha256_update(h, data, size);
}

/* What decides which ids a text gets and what they mean, each part with its length in front. */
static void compute_id(struct loader *l)
{
    struct tokenizer *t = l->t;
    struct sha256 h;
    sha256_init(&h);
    hash_bytes(&h, "tandem-tokenizer-v1", 19);
    hash_u64(&h, t->kind);
    hash_u64(&h, t->kind == TOKENIZER_BPE ? t->pre : 0);
    hash_u64(&h, t->add_space_prefix);
    hash_u64(&h, t->add_bos);
    hash_u64(&h, (uint64_t)(int64_t)t->bos);
    hash_u64(&h, (uint64_t)(int64_t)t->eos);
    hash_u64(&h, t->vocab_count);
    for (uint32_t id = 0; id < t->vocab_count; id++) {
        hash_bytes(&h, t->tokens[id].text.data, t->tokens[id].text.size);
        hash_u64(&h, (uint64_t)t->tokens[id].rank << 16 | (uint64_t)t->tokens[id].type << 8 |
                         t->tokens[id].hidden);
    }
    if (t->kind == TOKENIZER_BPE)
        hash_bytes(&h, l->merges->raw.data, l->merges->raw.size);
    sha256_final(&h, t->id);
}

int tokenizer_load(struct tokenizer *t, const struct gguf *g, const char *pre_override, struct td_error *err)
{
    struct loader l = {.t = t, .g = g, .err = err};
    int rc = load_kind(&l);
    if (rc == 0)
        rc = load_pre(&l, pre_override);
    if (rc == 0)
        rc = load_arrays(&l);
    if (rc == 0)
        rc = load_vocab(&l);
    if (rc == 0)
        rc = load_ends(&l);
    if (rc == 0)
        rc = load_bytes(&l);
    if (rc == 0)
        rc = load_merges(&l);
    if (rc == 0)
        rc = load_specials(&l);
    if (rc != 0)
        return rc;
    t->add_bos = t->kind == TOKENIZER_SPM || t->pre == PRE_LLAMA_BPE;
    t->add_space_prefix = t->kind == TOKENIZER_SPM;
    gguf_get_bool(g, "tokenizer.ggml.add_bos_token", &t->add_bos);
    if (t->kind == TOKENIZER_SPM)
        gguf_get_bool(g, "tokenizer.ggml.add_space_prefix", &t->add_space_prefix);
    t->spaces_lead = spaces_lead(t);
    compute_id(&l);
    return 0;
}
