/* tokenizer: creation, look-ups, pieces and decoding. See tokenizer.h; the parts are listed in
 * tokenizer_internal.h. */
#include "shared/tokenizer_internal.h"

#include <stdlib.h>

int tokenizer_create(const struct gguf *g, const char *pre_override, struct tokenizer **out,
                     struct td_error *err)
{
    *out = NULL;
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t)
        return td_fail(err, -TD_ERR_NOMEM, "cannot load the tokenizer: out of memory");
    int rc = tokenizer_load(t, g, pre_override, err);
    if (rc != 0) {
        tokenizer_destroy(t);
        return rc;
    }
    *out = t;
    return 0;
}

void tokenizer_destroy(struct tokenizer *t)
{
    if (!t)
        return;
    free(t->tokens);
    free(t->pool);
    free(t->symbols);
    free(t->table.slots);
    free(t->pairs);
    free(t->merge_pool);
    free(t->specials);
    free(t);
}

uint32_t text_table_find(const struct tokenizer *t, const char *text, size_t size)
{
    size_t mask = t->table.slot_count - 1;
    for (size_t i = (size_t)text_hash(text, size) & mask; t->table.slots[i]; i = (i + 1) & mask) {
        struct span known = t->symbols[t->table.slots[i] - 1];
        if (known.size == size && memcmp(known.data, text, size) == 0)
            return t->table.slots[i] - 1;
    }
    return SYMBOL_NONE;
}

static const struct vocab_token *token_at(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->vocab_count ? &t->tokens[id] : NULL;
}

struct span tokenizer_piece(const struct tokenizer *t, int32_t id, bool render_special)
{
    const struct vocab_token *token = token_at(t, id);
    if (!token || (token->hidden && !render_special))
        return (struct span){NULL, 0};
    return token->piece;
}

int64_t tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t count, bool render_special,
                         char *out, size_t capacity)
{
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        struct span piece = tokenizer_piece(t, ids[i], render_special);
        if (used < capacity && piece.size)
            memcpy(out + used, piece.data, TD_MIN(piece.size, capacity - used));
        used += piece.size;
    }
    return (int64_t)used;
}

bool tokenizer_strips_leading_space(const struct tokenizer *t)
{
    return t->kind == TOKENIZER_SPM && t->add_space_prefix;
}

uint32_t tokenizer_vocab_count(const struct tokenizer *t)
{
    return t->vocab_count;
}

bool tokenizer_add_bos(const struct tokenizer *t)
{
    return t->add_bos;
}

bool tokenizer_is_end(const struct tokenizer *t, int32_t id)
{
    const struct vocab_token *token = token_at(t, id);
    return token && token->end;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *piece)
{
    uint32_t symbol = text_table_find(t, piece, strlen(piece));
    return symbol < t->vocab_count ? (int32_t)symbol : -1;
}

void tokenizer_id(const struct tokenizer *t, uint8_t out[TD_HASH_SIZE])
{
    memcpy(out, t->id, TD_HASH_SIZE);
}
