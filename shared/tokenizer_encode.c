/* tokenizer_encode: text -> fragments -> words -> ids.
 *
 * Special tokens are cut out before anything else, as the reference does it: token by token, the longest text
 * first, each from left to right through what the earlier ones left. User-defined tokens are found
 * everywhere; control tokens only where they lie wholly in a range that the caller marked, because everywhere
 * else they are the words of a user who writes about them. */
#include "shared/tokenizer_internal.h"

#include <stdlib.h>

struct fragment {
    size_t begin, end;
    int32_t id; /* a special token, or -1: raw text */
};

struct fragment_list {
    struct fragment *items;
    size_t count, capacity;
};

struct input {
    const struct tokenizer *t;
    const char *text;
    size_t size;
    const struct text_range *special;
    size_t special_count;
};

static int add_fragment(struct fragment_list *list, size_t begin, size_t end, int32_t id)
{
    if (begin == end)
        return 0;
    if (list->count == list->capacity) {
        size_t capacity = list->capacity ? list->capacity * 2 : 16;
        struct fragment *grown = realloc(list->items, capacity * sizeof *grown);
        if (!grown)
            return -TD_ERR_NOMEM;
        list->items = grown;
        list->capacity = capacity;
    }
    list->items[list->count++] = (struct fragment){begin, end, id};
    return 0;
}

/* First place of token `id` in text[begin, end) where it counts, or SIZE_MAX. *range is where the search in
 * the marked ranges goes on; it only moves forward while begin does. */
static size_t find_token(const struct input *in, int32_t id, size_t begin, size_t end, size_t *range)
{
    const struct vocab_token *token = &in->t->tokens[id];
    if (!token->hidden) {
        const char *hit = memmem(in->text + begin, end - begin, token->text.data, token->text.size);
        return hit ? (size_t)(hit - in->text) : SIZE_MAX;
    }
    for (; *range < in->special_count && in->special[*range].begin < end; ++*range) {
        size_t low = TD_MAX(begin, in->special[*range].begin), high = TD_MIN(end, in->special[*range].end);
        const char *hit =
            low < high ? memmem(in->text + low, high - low, token->text.data, token->text.size) : NULL;
        if (hit)
            return (size_t)(hit - in->text);
        if (in->special[*range].end > end) /* the next fragment may begin in this range */
            break;
    }
    return SIZE_MAX;
}

/* Cut token `id` out of the raw fragments of `list`; `next` is an empty list to build in. */
static int cut_token(const struct input *in, int32_t id, struct fragment_list *list,
                     struct fragment_list *next)
{
    size_t range = 0, size = in->t->tokens[id].text.size;
    int rc = 0;
    next->count = 0;
    for (size_t i = 0; i < list->count && rc == 0; i++) {
        struct fragment f = list->items[i];
        size_t hit;
        while (rc == 0 && f.id < 0 && (hit = find_token(in, id, f.begin, f.end, &range)) != SIZE_MAX) {
            rc = add_fragment(next, f.begin, hit, -1);
            if (rc == 0)
                rc = add_fragment(next, hit, hit + size, id);
            f.begin = hit + size;
        }
        if (rc == 0)
            rc = add_fragment(next, f.begin, f.end, f.id);
    }
    struct fragment_list swap = *list;
    *list = *next;
    *next = swap;
    return rc;
}

static int split_specials(const struct input *in, struct fragment_list *list)
{
    struct fragment_list next = {0};
    int rc = add_fragment(list, 0, in->size, -1);
    for (size_t i = 0; i < in->t->special_count && rc == 0; i++) {
        size_t range = 0;
        int32_t id = in->t->specials[i];
        if (find_token(in, id, 0, in->size, &range) != SIZE_MAX)
            rc = cut_token(in, id, list, &next);
    }
    free(next.items);
    return rc;
}

static int encode_bpe(const struct tokenizer *t, struct merge_scratch *m, const char *text, size_t size,
                      struct token_sink *sink)
{
    int rc = 0;
    for (size_t begin = 0, end; begin < size && rc == 0; begin = end) {
        end = pre_next_word(t->pre, text, begin, size);
        rc = merge_word(t, m, text + begin, end - begin, sink);
    }
    return rc;
}

/* SPM merges a whole fragment at once. Where no token reaches over a border before a blank, cutting there
 * changes nothing and keeps the pieces small. */
static int encode_spm(const struct tokenizer *t, struct merge_scratch *m, const char *text, size_t size,
                      struct token_sink *sink)
{
    size_t used = 0;
    char *blanked = malloc((size + 1) * 3);
    if (!blanked)
        return -TD_ERR_NOMEM;
    if (t->add_space_prefix) { /* raw text begins at the beginning or behind a special token */
        memcpy(blanked, SPM_BLANK, 3);
        used = 3;
    }
    for (size_t i = 0; i < size; i++) {
        if (text[i] == ' ') {
            memcpy(blanked + used, SPM_BLANK, 3);
            used += 3;
        } else {
            blanked[used++] = text[i];
        }
    }
    int rc = 0;
    for (size_t begin = 0, end; begin < used && rc == 0; begin = end) {
        end = t->spaces_lead ? begin : used;
        while (end < used && is_blank(blanked + end, used - end))
            end += 3;
        while (end < used && !is_blank(blanked + end, used - end))
            end++;
        rc = merge_word(t, m, blanked + begin, end - begin, sink);
    }
    free(blanked);
    return rc;
}

static int encode_fragments(const struct input *in, const struct fragment_list *list, struct token_sink *sink)
{
    struct merge_scratch m = {0};
    int rc = 0;
    for (size_t i = 0; i < list->count && rc == 0; i++) {
        const struct fragment *f = &list->items[i];
        const char *text = in->text + f->begin;
        if (f->id >= 0)
            sink_put(sink, f->id);
        else if (in->t->kind == TOKENIZER_BPE)
            rc = encode_bpe(in->t, &m, text, f->end - f->begin, sink);
        else
            rc = encode_spm(in->t, &m, text, f->end - f->begin, sink);
    }
    merge_scratch_free(&m);
    return rc;
}

static bool ranges_valid(const struct text_range *ranges, size_t count, size_t size)
{
    size_t last = 0;
    for (size_t i = 0; i < count; i++) {
        if (ranges[i].begin < last || ranges[i].end < ranges[i].begin || ranges[i].end > size)
            return false;
        last = ranges[i].end;
    }
    return true;
}

int64_t tokenizer_encode(const struct tokenizer *t, const char *text, size_t size,
                         const struct text_range *special, size_t special_count, bool add_bos, int32_t *ids,
                         size_t ids_capacity)
{
    struct input in = {t, text, size, special, special_count};
    struct token_sink sink = {ids, ids_capacity, 0};
    struct fragment_list list = {0};
    if (size > TOKENIZER_TEXT_MAX)
        return -TD_ERR_LIMIT;
    if (!ranges_valid(special, special_count, size))
        return -TD_ERR_ARG;
    if (add_bos && t->bos >= 0)
        sink_put(&sink, t->bos);
    int rc = split_specials(&in, &list);
    if (rc == 0)
        rc = encode_fragments(&in, &list, &sink);
    free(list.items);
    return rc == 0 ? sink.count : rc;
}

int64_t tokenizer_encode_new(const struct tokenizer *t, const char *text, size_t size,
                             const struct text_range *special, size_t special_count, bool add_bos,
                             size_t before, int32_t **ids)
{
    *ids = NULL;
    int64_t count = tokenizer_encode(t, text, size, special, special_count, add_bos, NULL, 0);
    if (count < 0)
        return count;
    int32_t *all = malloc((before + (size_t)count + 1) * sizeof *all);
    int64_t rc =
        all ? tokenizer_encode(t, text, size, special, special_count, add_bos, all + before, (size_t)count)
            : -TD_ERR_NOMEM;
    if (rc < 0) /* memory that was enough for counting need not be for this */
        free(all);
    else
        *ids = all;
    return rc;
}
