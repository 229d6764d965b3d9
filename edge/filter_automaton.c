/* filter_automaton: see filter_automaton.h.
 *
 * The trie is numbered breadth first over the sorted strings, so the children of a state are neighbours in
 * order of their labels: state s has the children first[s] .. first[s + 1), and a label is found by bisection.
 * That takes 17 bytes a state where a full table would take 1 KiB, which 100,000 words could not afford. Only
 * the root, where most of a text is spent, has a full table.
 *
 * Invariants: fail[s] < s for s > 0 and is the longest proper suffix of s that is a state; link[s] is the
 * nearest state on the chain of fail[] where a string ends. */
#include "edge/filter_automaton.h"
#include "shared/crypto.h"
#include <stdlib.h>

struct automaton {
    uint32_t state_count;
    uint32_t root[256]; /* child of state 0, or 0 */
    uint32_t *first;    /* state_count + 1 */
    uint32_t *fail, *link, *word;
    uint8_t *label; /* of the edge that leads to the state */
};

struct entry { /* one string while building */
    struct span text;
    uint32_t index;
};
struct builder {
    struct entry *entries; /* sorted */
    size_t count;
    uint32_t *begin, *end; /* entries that a state's prefix is shared by */
};

static int compare_entries(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    int order = memcmp(x->text.data, y->text.data, TD_MIN(x->text.size, y->text.size));
    if (order != 0)
        return order;
    if (x->text.size != y->text.size)
        return x->text.size < y->text.size ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

static uint32_t child_of(const struct automaton *a, uint32_t state, uint8_t byte)
{
    if (state == 0)
        return a->root[byte];
    uint32_t low = a->first[state], high = a->first[state + 1];
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (a->label[middle] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low < a->first[state + 1] && a->label[low] == byte ? low : 0;
}

/* One child of `parent`, over entries [begin, end). */
static void add_child(struct automaton *a, struct builder *b, uint32_t parent, size_t begin, size_t end,
                      uint8_t byte)
{
    uint32_t child = a->state_count++, fail = 0;
    b->begin[child] = (uint32_t)begin;
    b->end[child] = (uint32_t)end;
    a->label[child] = byte;
    if (parent == 0) {
        a->root[byte] = child;
    } else {
        uint32_t suffix = a->fail[parent];
        while ((fail = child_of(a, suffix, byte)) == 0 && suffix != 0)
            suffix = a->fail[suffix];
    }
    a->fail[child] = fail;
}

/* States are expanded in the order of their numbers; depth is the length of a state's prefix. */
static void expand(struct automaton *a, struct builder *b, uint32_t state, size_t depth)
{
    size_t at = b->begin[state], end = b->end[state];
    a->first[state] = a->state_count;
    a->word[state] = AUTOMATON_NONE;
    if (at < end && b->entries[at].text.size == depth)
        a->word[state] = b->entries[at].index;
    while (at < end && b->entries[at].text.size == depth)
        at++;
    while (at < end) {
        uint8_t byte = b->entries[at].text.data[depth];
        size_t next = at + 1;
        while (next < end && b->entries[next].text.data[depth] == byte)
            next++;
        add_child(a, b, state, at, next, byte);
        at = next;
    }
    a->first[state + 1] = a->state_count;
    uint32_t fail = a->fail[state];
    a->link[state] = state == 0 ? AUTOMATON_NONE : a->word[fail] != AUTOMATON_NONE ? fail : a->link[fail];
}

static void build(struct automaton *a, struct builder *b)
{
    b->begin[0] = 0;
    b->end[0] = (uint32_t)b->count;
    a->state_count = 1;
    uint32_t level_end = 1;
    size_t depth = 0;
    for (uint32_t state = 0; state < a->state_count; state++) {
        if (state == level_end) {
            depth++;
            level_end = a->state_count;
        }
        expand(a, b, state, depth);
    }
}

static int sort_entries(const struct span *words, size_t count, struct builder *b, size_t *size)
{
    *size = 0;
    b->entries = malloc((count + 1) * sizeof *b->entries);
    if (!b->entries)
        return -TD_ERR_NOMEM;
    for (size_t i = 0; i < count; i++) {
        if (words[i].size == 0)
            return -TD_ERR_ARG;
        if (words[i].size > AUTOMATON_BYTES_MAX - *size)
            return -TD_ERR_LIMIT;
        *size += words[i].size;
        b->entries[i] = (struct entry){words[i], (uint32_t)i};
    }
    b->count = count;
    qsort(b->entries, count, sizeof *b->entries, compare_entries);
    return 0;
}

static int allocate(struct automaton *a, struct builder *b, size_t states_max)
{
    a->first = calloc(states_max + 1, sizeof *a->first);
    a->fail = calloc(states_max, sizeof *a->fail);
    a->link = calloc(states_max, sizeof *a->link);
    a->word = calloc(states_max, sizeof *a->word);
    a->label = calloc(states_max, 1);
    b->begin = calloc(states_max, sizeof *b->begin);
    b->end = calloc(states_max, sizeof *b->end);
    return a->first && a->fail && a->link && a->word && a->label && b->begin && b->end ? 0 : -TD_ERR_NOMEM;
}

int automaton_create(const struct span *words, size_t count, struct automaton **out)
{
    struct builder b = {0};
    size_t size;
    *out = NULL;
    struct automaton *a = calloc(1, sizeof *a);
    if (!a)
        return -TD_ERR_NOMEM;
    int rc = sort_entries(words, count, &b, &size);
    if (rc == 0)
        rc = allocate(a, &b, size + 1);
    if (rc == 0)
        build(a, &b);
    free(b.entries);
    free(b.begin);
    free(b.end);
    if (rc < 0) {
        automaton_destroy(a);
        return rc;
    }
    *out = a;
    return 0;
}

void automaton_destroy(struct automaton *a)
{
    if (!a)
        return;
    if (a->label)
        crypto_wipe(a->label, a->state_count);
    free(a->first);
    free(a->fail);
    free(a->link);
    free(a->word);
    free(a->label);
    free(a);
}

uint32_t automaton_step(const struct automaton *a, uint32_t state, uint8_t byte)
{
    for (;;) {
        uint32_t child = child_of(a, state, byte);
        if (child != 0 || state == 0)
            return child;
        state = a->fail[state];
    }
}

uint32_t automaton_match(const struct automaton *a, uint32_t state)
{
    return a->word[state] != AUTOMATON_NONE ? state : a->link[state];
}

uint32_t automaton_next(const struct automaton *a, uint32_t match)
{
    return a->link[match];
}

uint32_t automaton_word(const struct automaton *a, uint32_t match)
{
    return a->word[match];
}
