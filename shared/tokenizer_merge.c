/* tokenizer_merge: one word -> ids.
 *
 * Both kinds join neighbours until nothing joins any more; they differ in what may join and in which order:
 *   BPE  a pair that the merge list names, the earliest in the list first
 *   SPM  a pair whose joined text is a token, the highest score first
 * and of equals the leftmost. A heap of (rank, index of the left symbol) over a linked list makes that O(n
 * log n), so that a megabyte without a space is no attack. Entries are never removed from the heap: one that
 * is popped is looked up again and is void unless the pair which stands there now has the same rank. (A pair
 * never comes back with other neighbours: symbols only grow.) */
#include "shared/tokenizer_internal.h"

#include <stdlib.h>

#define HEAP_START 64

void merge_scratch_free(struct merge_scratch *m)
{
    free(m->symbols);
    free(m->heap);
}

static int heap_push(struct merge_scratch *m, uint64_t key)
{
    if (m->heap_count == m->heap_capacity) {
        size_t capacity = m->heap_capacity ? m->heap_capacity * 2 : HEAP_START;
        uint64_t *grown = realloc(m->heap, capacity * sizeof *grown);
        if (!grown)
            return -TD_ERR_NOMEM;
        m->heap = grown;
        m->heap_capacity = capacity;
    }
    size_t i = m->heap_count++;
    while (i > 0 && m->heap[(i - 1) / 2] > key) {
        m->heap[i] = m->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    m->heap[i] = key;
    return 0;
}

static uint64_t heap_pop(struct merge_scratch *m)
{
    uint64_t top = m->heap[0], key = m->heap[--m->heap_count];
    size_t i = 0, count = m->heap_count;
    for (size_t child = 1; child < count; child = 2 * i + 1) {
        if (child + 1 < count && m->heap[child + 1] < m->heap[child])
            child++;
        if (m->heap[child] >= key)
            break;
        m->heap[i] = m->heap[child];
        i = child;
    }
    m->heap[i] = key;
    return top;
}

static bool find_pair(const struct tokenizer *t, uint32_t left, uint32_t right, uint32_t *rank,
                      uint32_t *merged)
{
    size_t mask = t->pair_slot_count - 1;
    for (size_t i = (size_t)mix64((uint64_t)left << 32 | right) & mask;; i = (i + 1) & mask) {
        const struct pair_slot *slot = &t->pairs[i];
        if (slot->left == left && slot->right == right) {
            *rank = slot->rank;
            *merged = slot->merged;
            return true;
        }
        if (slot->left == SYMBOL_NONE)
            return false;
    }
}

struct word {
    const struct tokenizer *t;
    struct merge_scratch *m;
    const char *text;
    size_t size;
};

static size_t symbol_end(const struct word *w, uint32_t index)
{
    uint32_t next = w->m->symbols[index].next;
    return next == SYMBOL_NONE ? w->size : w->m->symbols[next].begin;
}

/* May the symbol at `left` join its right neighbour? */
static bool joins(const struct word *w, uint32_t left, uint32_t *rank, uint32_t *merged)
{
    const struct merge_symbol *a = &w->m->symbols[left];
    if (a->next == SYMBOL_NONE)
        return false;
    if (w->t->kind == TOKENIZER_BPE)
        return find_pair(w->t, a->id, w->m->symbols[a->next].id, rank, merged);
    size_t size = symbol_end(w, a->next) - a->begin;
    if (size > w->t->text_size_max)
        return false;
    *merged = text_table_find(w->t, w->text + a->begin, size);
    if (*merged == SYMBOL_NONE || !w->t->tokens[*merged].plain)
        return false;
    *rank = w->t->tokens[*merged].rank;
    return true;
}

static int offer(const struct word *w, uint32_t left)
{
    uint32_t rank, merged;
    if (left == SYMBOL_NONE || !joins(w, left, &rank, &merged))
        return 0;
    return heap_push(w->m, (uint64_t)rank << 32 | left);
}

/* Bytes of the SPM symbol at `at`: as many as its first byte announces, were it UTF-8, but never into a
 * blank. */
static size_t spm_symbol_size(const char *text, size_t at, size_t size)
{
    uint8_t lead = (uint8_t)text[at];
    size_t wanted = lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4, have = 1;
    while (have < wanted && at + have < size && !is_blank(text + at + have, size - at - have))
        have++;
    return have;
}

/* Fill the list with what merging begins from: bytes (BPE) or characters (SPM). */
static int first_symbols(const struct word *w, uint32_t *count)
{
    struct merge_scratch *m = w->m;
    if (m->symbol_capacity < w->size) {
        free(m->symbols);
        m->symbol_capacity = 0;
        m->symbols = malloc(w->size * 2 * sizeof *m->symbols);
        if (!m->symbols)
            return -TD_ERR_NOMEM;
        m->symbol_capacity = w->size * 2;
    }
    uint32_t n = 0;
    for (size_t at = 0; at < w->size; n++) {
        struct merge_symbol *s = &m->symbols[n];
        size_t size = w->t->kind == TOKENIZER_SPM ? spm_symbol_size(w->text, at, w->size) : 1;
        s->begin = (uint32_t)at;
        if (w->t->kind == TOKENIZER_BPE)
            s->id = w->t->byte_symbol[(uint8_t)w->text[at]];
        else
            s->id = text_table_find(w->t, w->text + at, size);
        s->prev = n - 1; /* SYMBOL_NONE for the first */
        s->next = n + 1;
        at += size;
    }
    m->symbols[n - 1].next = SYMBOL_NONE;
    *count = n;
    return 0;
}

static int merge_all(const struct word *w)
{
    struct merge_symbol *symbols = w->m->symbols;
    int rc = 0;
    while (rc == 0 && w->m->heap_count) {
        uint64_t top = heap_pop(w->m);
        uint32_t left = (uint32_t)top, rank, merged;
        if (symbols[left].begin == SYMBOL_NONE || !joins(w, left, &rank, &merged) || rank != top >> 32)
            continue;
        uint32_t right = symbols[left].next;
        symbols[left].id = merged;
        symbols[left].next = symbols[right].next;
        if (symbols[right].next != SYMBOL_NONE)
            symbols[symbols[right].next].prev = left;
        symbols[right].begin = SYMBOL_NONE; /* gone */
        rc = offer(w, symbols[left].prev);
        if (rc == 0)
            rc = offer(w, left);
    }
    return rc;
}

static void put_symbols(const struct word *w, struct token_sink *sink)
{
    for (uint32_t i = 0; i != SYMBOL_NONE; i = w->m->symbols[i].next) {
        uint32_t id = w->m->symbols[i].id;
        if (id < w->t->vocab_count && w->t->tokens[id].plain) {
            sink_put(sink, (int32_t)id);
            continue;
        }
        for (size_t at = w->m->symbols[i].begin; at < symbol_end(w, i); at++) {
            int32_t byte = w->t->byte_token[(uint8_t)w->text[at]];
            if (byte >= 0) /* else the vocabulary cannot say it */
                sink_put(sink, byte);
        }
    }
}

/* BPE: the token whose text is the whole word, or -1. */
static int32_t whole_word(const struct tokenizer *t, const char *word, size_t size)
{
    char text[512];
    size_t used = 0;
    for (size_t i = 0; i < size; i++) {
        uint8_t b = (uint8_t)word[i];
        if (used + 2 > sizeof text)
            return -1;
        memcpy(text + used, t->byte_text[b], t->byte_text_size[b]);
        used += t->byte_text_size[b];
    }
    uint32_t id = text_table_find(t, text, used);
    return id < t->vocab_count && t->tokens[id].plain ? (int32_t)id : -1;
}

int merge_word(const struct tokenizer *t, struct merge_scratch *m, const char *word, size_t size,
               struct token_sink *sink)
{
    struct word w = {t, m, word, size};
    uint32_t count;
    if (t->ignore_merges) {
        int32_t id = whole_word(t, word, size);
        if (id >= 0) {
            sink_put(sink, id);
            return 0;
        }
    }
    m->heap_count = 0;
    int rc = first_symbols(&w, &count);
    for (uint32_t i = 0; i + 1 < count && rc == 0; i++)
        rc = offer(&w, i);
    if (rc == 0)
        rc = merge_all(&w);
    if (rc == 0)
        put_symbols(&w, sink);
    return rc;
}
