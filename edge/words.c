/* words: see words.h.
 *
 * Blocked entries come first, so that an entry is a blocked one exactly if its index is below blocked_count and,
 * of the same entry under both actions, the automaton keeps the blocked one. While a text runs through, a ring
 * remembers where the last folded bytes came from: long enough for the longest entry. A match is decided when
 * the character behind it is known. */
#include "edge/words.h"
#include "edge/filter.h"
#include "edge/filter_automaton.h"
#include "shared/tokenizer.h"
#include "shared/utf8.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#define RING_SIZE    512u /* a power of two, at least WORDS_SIZE_MAX + 4 */
#define DAMAGED_BYTE 0xff /* occurs in no UTF-8 */

struct words {
    struct automaton *automaton;
    uint16_t *sizes; /* folded bytes of each entry */
    size_t count, blocked_count;
};

static size_t encode(uint32_t c, uint8_t out[4])
{
    if (c == UTF8_INVALID) {
        out[0] = DAMAGED_BYTE;
        return 1;
    }
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    size_t size = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = size; i-- > 1; c >>= 6)
        out[i] = (uint8_t)(0x80 | (c & 0x3f));
    out[0] = (uint8_t)(c | (0xf00u >> size));
    return size;
}

/* ---- the list ---- */

struct loading {
    const char *name;
    struct filter_buffer folded[2]; /* entries of [0] blocked, [1] masked, one after the other */
    size_t *ends[2];
    size_t counts[2], capacities[2];
    size_t size; /* of the entry being folded */
    struct filter_buffer *target;
};

static int add_folded(void *ctx, const struct folded *c)
{
    struct loading *l = ctx;
    uint8_t bytes[4];
    size_t size = encode(c->code_point, bytes);
    l->size += size;
    if (l->size > WORDS_SIZE_MAX + 1) /* one more: a last blank goes */
        return -TD_ERR_LIMIT;
    return filter_buffer_add(l->target, (const char *)bytes, size);
}

static int add_end(struct loading *l, int action)
{
    if (l->counts[action] == l->capacities[action]) {
        size_t capacity = l->capacities[action] ? 2 * l->capacities[action] : 64;
        size_t *ends = realloc(l->ends[action], capacity * sizeof *ends);
        if (!ends)
            return -TD_ERR_NOMEM;
        l->ends[action] = ends;
        l->capacities[action] = capacity;
    }
    l->ends[action][l->counts[action]++] = l->folded[action].size;
    return 0;
}

static int add_entry(struct loading *l, int action, const char *text, size_t size, unsigned line,
                     struct td_error *err)
{
    if (l->counts[0] + l->counts[1] == FILTER_WORDS_MAX)
        return td_fail(err, -TD_ERR_LIMIT, "%s:%u: more than %u words; shorten the list", l->name, line,
                       FILTER_WORDS_MAX);
    if (!utf8_valid(text, size))
        return td_fail(err, -TD_ERR_FORMAT, "%s:%u: not valid UTF-8; save the list as UTF-8", l->name, line);
    struct filter_buffer *target = &l->folded[action];
    size_t begin = target->size;
    l->target = target;
    l->size = 0;
    int rc = filter_fold(text, size, add_folded, l);
    if (rc == 0 && target->size > begin && target->data[target->size - 1] == ' ')
        target->size--;
    if (rc == -TD_ERR_LIMIT || target->size - begin > WORDS_SIZE_MAX)
        return td_fail(err, -TD_ERR_LIMIT, "%s:%u: the entry is longer than %u bytes; shorten it", l->name,
                       line, WORDS_SIZE_MAX);
    if (rc == 0 && target->size == begin)
        return td_fail(err, -TD_ERR_FORMAT, "%s:%u: nothing to look for; give words after the action",
                       l->name, line);
    if (rc == 0)
        rc = add_end(l, action);
    return rc < 0 ? td_fail(err, rc, "cannot load the word list %s: %s", l->name, td_status_text(rc)) : 0;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

static int parse_line(struct loading *l, const char *text, size_t size, unsigned line, struct td_error *err)
{
    while (size > 0 && is_blank(text[size - 1]))
        size--;
    while (size > 0 && is_blank(*text))
        text++, size--;
    if (size == 0 || *text == '#')
        return 0;
    size_t word = 0;
    while (word < size && !is_blank(text[word]))
        word++;
    int action = word == 5 && memcmp(text, "block", 5) == 0  ? 0
                 : word == 4 && memcmp(text, "mask", 4) == 0 ? 1
                                                             : -1;
    if (action < 0)
        return td_fail(err, -TD_ERR_FORMAT, "%s:%u: a line begins with 'block', 'mask' or '#'", l->name,
                       line);
    size_t rest = word;
    while (rest < size && is_blank(text[rest]))
        rest++;
    return add_entry(l, action, text + rest, size - rest, line, err);
}

static int parse_lines(struct loading *l, const char *text, size_t size, struct td_error *err)
{
    if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) /* a byte order mark, as some editors write it */
        text += 3, size -= 3;
    int rc = 0;
    unsigned line = 1;
    for (; rc == 0 && size > 0; line++) {
        const char *end = memchr(text, '\n', size);
        size_t line_size = end ? (size_t)(end - text) : size;
        rc = parse_line(l, text, line_size, line, err);
        line_size += end != NULL;
        text += line_size;
        size -= line_size;
    }
    return rc;
}

static int make_automaton(const struct loading *l, struct words *w)
{
    size_t count = l->counts[0] + l->counts[1], i = 0;
    struct span *entries = malloc((count + 1) * sizeof *entries);
    w->sizes = malloc((count + 1) * sizeof *w->sizes);
    int rc = entries && w->sizes ? 0 : -TD_ERR_NOMEM;
    for (int action = 0; rc == 0 && action < 2; action++)
        for (size_t n = 0, begin = 0; n < l->counts[action]; begin = l->ends[action][n++], i++) {
            entries[i] =
                (struct span){(const uint8_t *)l->folded[action].data + begin, l->ends[action][n] - begin};
            w->sizes[i] = (uint16_t)entries[i].size;
        }
    w->count = count;
    w->blocked_count = l->counts[0];
    if (rc == 0)
        rc = automaton_create(entries, count, &w->automaton);
    free(entries);
    return rc;
}

int words_parse(const char *name, const char *text, size_t size, struct words **out, struct td_error *err)
{
    struct loading l = {.name = name};
    *out = NULL;
    struct words *w = calloc(1, sizeof *w);
    int rc = w ? parse_lines(&l, text, size, err) : -TD_ERR_NOMEM;
    if (rc == 0) {
        rc = make_automaton(&l, w);
        if (rc < 0)
            td_fail(err, rc, "cannot load the word list %s: %s", name, td_status_text(rc));
    }
    for (int action = 0; action < 2; action++) {
        filter_buffer_free(&l.folded[action]);
        free(l.ends[action]);
    }
    if (rc < 0) {
        words_destroy(w);
        return rc;
    }
    *out = w;
    return 0;
}

static int read_file(const char *path, char **out, size_t *size, struct td_error *err)
{
    static const char advice[] = "give another --words-file or none";
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK); /* a FIFO must not hold us up */
    FILE *f = fd < 0 ? NULL : fdopen(fd, "rb");
    if (!f)
        return td_fail(err, -TD_ERR_IO, "cannot read the word list %s: %s; %s", path, strerror(errno),
                       advice);
    int rc = 0;
    char *text = NULL;
    size_t count = 0;
    if (fstat(fileno(f), &status) < 0 || !S_ISREG(status.st_mode))
        rc = td_fail(err, -TD_ERR_IO, "cannot read the word list %s: not a regular file; %s", path, advice);
    else if ((uint64_t)status.st_size > WORDS_FILE_SIZE_MAX)
        rc = td_fail(err, -TD_ERR_LIMIT, "the word list %s is larger than %u MiB; shorten it", path,
                     WORDS_FILE_SIZE_MAX >> 20);
    else if (!(text = malloc((size_t)status.st_size + 1)))
        rc = td_fail(err, -TD_ERR_NOMEM, "cannot read the word list %s: out of memory", path);
    else if ((count = fread(text, 1, (size_t)status.st_size, f)) < (size_t)status.st_size)
        rc = td_fail(err, -TD_ERR_IO, "cannot read the word list %s to its end; %s", path, advice);
    fclose(f);
    if (rc < 0) {
        free(text);
        return rc;
    }
    *out = text;
    *size = count;
    return 0;
}

int words_load(const char *path, struct words **out, struct td_error *err)
{
    char *text = NULL;
    size_t size = 0;
    *out = NULL;
    int rc = read_file(path, &text, &size, err);
    if (rc < 0)
        return rc;
    rc = words_parse(path, text, size, out, err);
    free(text);
    return rc;
}

void words_destroy(struct words *w)
{
    if (!w)
        return;
    automaton_destroy(w->automaton);
    free(w->sizes);
    free(w);
}

/* ---- the search ---- */

struct place { /* of one folded byte */
    uint32_t begin;
    bool joined_before; /* its character and the one before are both in words */
};
struct search {
    const struct words *words;
    struct filter_spans *masked;
    struct place ring[RING_SIZE];
    size_t count; /* folded bytes so far */
    uint32_t state;
    uint32_t last_end;
    bool last_is_word;
};

/* The entries that end at the character before `next` (NULL: at the end of the text). */
static int decide(struct search *s, const struct folded *next)
{
    const struct words *w = s->words;
    uint32_t match = automaton_match(w->automaton, s->state);
    if (match == AUTOMATON_NONE)
        return 0;
    if (next && (filter_is_mark(next->code_point) || (s->last_is_word && filter_is_word(next->code_point))))
        return 0;
    bool found = false;
    for (; match != AUTOMATON_NONE; match = automaton_next(w->automaton, match)) {
        uint32_t entry = automaton_word(w->automaton, match);
        const struct place *first = &s->ring[(s->count - w->sizes[entry]) % RING_SIZE];
        if (first->joined_before)
            continue;
        if (entry < w->blocked_count)
            return -TD_ERR_BLOCKED;
        if (!found && filter_spans_add(s->masked, first->begin, s->last_end, 0) < 0)
            return -TD_ERR_NOMEM;
        found = true; /* the longest covers the others; these are looked at only for blocked ones */
    }
    return 0;
}

static int search_next(void *ctx, const struct folded *c)
{
    struct search *s = ctx;
    int rc = decide(s, c);
    if (rc < 0)
        return rc;
    uint8_t bytes[4];
    size_t size = encode(c->code_point, bytes);
    bool is_word = filter_is_word(c->code_point);
    for (size_t i = 0; i < size; i++) {
        s->ring[s->count++ % RING_SIZE] = (struct place){c->begin, is_word && s->last_is_word};
        s->state = automaton_step(s->words->automaton, s->state, bytes[i]);
    }
    s->last_end = c->end;
    s->last_is_word = is_word;
    return 0;
}

int words_scan(const struct words *w, const char *text, size_t size, struct filter_spans *masked)
{
    if (w->count == 0)
        return 0;
    struct search s = {.words = w, .masked = masked};
    int rc = filter_fold(text, size, search_next, &s);
    return rc < 0 ? rc : decide(&s, NULL);
}
