/* filter: see filter.h.
 *
 * One text: blocked and masked words are looked for; then placeholders that the text already has, values of the vault and what
 * the recognisers find make up the protected spans. Where these overlap they become one, named after the longest of them, so no part of
 * a value is left behind. A protected span wins over a masked word in it: its placeholder hides the word as well. */
#include "edge/filter.h"
#include "edge/pii.h"
#include "edge/vault.h"
#include "edge/words.h"
#include <stdlib.h>

#define KIND_KEPT  PII_KIND_COUNT /* a span that stays as it is */
#define MASK       "***"
#define ROUNDS_MAX 8 /* new values seldom make new ones, by crossing each other: two rounds nearly always */

struct filter {
    struct words *words; /* NULL: none */
    bool pii;
};

int filter_create(const struct filter_config *config, struct filter **out, struct td_error *err)
{
    *out = NULL;
    struct filter *f = calloc(1, sizeof *f);
    if (!f)
        return td_fail(err, -TD_ERR_NOMEM, "cannot set up the filter: out of memory");
    f->pii = config->pii;
    int rc = config->words_path ? words_load(config->words_path, &f->words, err) : 0;
    if (rc < 0) {
        filter_destroy(f);
        return rc;
    }
    *out = f;
    return 0;
}

void filter_destroy(struct filter *f)
{
    if (!f)
        return;
    words_destroy(f->words);
    free(f);
}

/* ---- spans ---- */

/* Placeholders in the text: those without a value are nobody's from now on. */
static int scan_placeholders(struct vault *v, const char *text, size_t size, struct filter_spans *out)
{
    const char *open;
    for (size_t at = 0; (open = memchr(text + at, '[', size - at)); at++) {
        struct vault_placeholder p;
        at = (size_t)(open - text);
        int bytes = vault_placeholder_parse(open, size - at, &p);
        if (bytes <= 0)
            continue;
        vault_reserve(v, p);
        if (filter_spans_add(out, at, at + (size_t)bytes, KIND_KEPT) < 0)
            return -TD_ERR_NOMEM;
    }
    return 0;
}

/* Overlapping spans of a sorted list become one, unless it would be too long for a value: then the later begins behind the
 * earlier. */
static void unite(struct filter_spans *s)
{
    size_t count = 0;
    uint32_t longest = 0; /* of those that are one now */
    for (size_t i = 0; i < s->count; i++) {
        struct filter_span next = s->items[i], *last = count ? &s->items[count - 1] : NULL;
        if (last && next.begin < last->end) {
            if (next.end <= last->end && next.end - next.begin <= longest)
                continue;
            bool keep = last->kind == KIND_KEPT || next.kind == KIND_KEPT;
            if (!keep && TD_MAX(next.end, last->end) - last->begin <= FILTER_VALUE_MAX) {
                if (next.end - next.begin > longest) {
                    longest = next.end - next.begin;
                    last->kind = next.kind;
                }
                last->end = TD_MAX(next.end, last->end);
                continue;
            }
            if (next.end <= last->end)
                continue;
            next.begin = last->end;
        }
        longest = next.end - next.begin;
        s->items[count++] = next;
    }
    s->count = count;
}

/* Overlapping masks of a sorted list become one. */
static void unite_masks(struct filter_spans *s)
{
    size_t count = 0;
    for (size_t i = 0; i < s->count; i++) {
        struct filter_span *last = count ? &s->items[count - 1] : NULL;
        if (last && s->items[i].begin < last->end)
            last->end = TD_MAX(last->end, s->items[i].end);
        else
            s->items[count++] = s->items[i];
    }
    s->count = count;
}

/* One round: what was found in the text, and where values of the vault stand. */
static int gather(struct vault *v, const char *text, size_t size, const struct filter_spans *found,
                  struct filter_spans *out)
{
    int rc = 0;
    out->count = 0;
    for (size_t i = 0; rc == 0 && i < found->count; i++)
        rc = filter_spans_add(out, found->items[i].begin, found->items[i].end, found->items[i].kind);
    if (rc == 0)
        rc = vault_scan(v, text, size, out);
    filter_spans_sort(out);
    unite(out);
    return rc;
}

static int put_values(struct vault *v, const char *text, const struct filter_spans *s)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < s->count; i++) {
        struct vault_placeholder p;
        struct filter_span span = s->items[i];
        if (span.kind != KIND_KEPT)
            rc = vault_put(v, span.kind, text + span.begin, span.end - span.begin, &p);
    }
    return rc;
}

/* A value that is recognised in one place ("phone 5550123") is masked in every place of the text, so new values are looked for
 * like the known ones, until there are no more new ones. */
static int find_protected(const struct filter *f, struct vault *v, const char *text, size_t size,
                          struct filter_spans *out)
{
    struct filter_spans found = {0};
    int rc = scan_placeholders(v, text, size, &found);
    if (rc == 0 && f->pii)
        rc = pii_scan(text, size, &found);
    for (int round = 0; rc == 0 && round < ROUNDS_MAX; round++) {
        size_t known = vault_count(v);
        rc = gather(v, text, size, &found, out);
        if (rc == 0)
            rc = put_values(v, text, out);
        if (vault_count(v) == known)
            break;
    }
    filter_spans_free(&found);
    return rc;
}

/* ---- the filtered text ---- */

struct rewriting {
    struct vault *vault;
    const char *text;
    const struct filter_spans *masked; /* sorted, apart from each other */
    size_t next_mask;                  /* the first that may reach behind what is written */
    struct filter_buffer out;
};

/* text[begin..end) lies between protected spans: only masks apply, or what of them lies here. */
static int write_plain(struct rewriting *w, uint32_t begin, uint32_t end)
{
    int rc = 0;
    for (; rc == 0 && w->next_mask < w->masked->count; w->next_mask++) {
        struct filter_span m = w->masked->items[w->next_mask];
        if (m.begin >= end)
            break;
        if (m.end <= begin)
            continue;
        uint32_t from = TD_MAX(m.begin, begin);
        rc = filter_buffer_add(&w->out, w->text + begin, from - begin);
        if (rc == 0 && from < end)
            rc = filter_buffer_add(&w->out, MASK, sizeof MASK - 1);
        begin = TD_MIN(m.end, end);
        if (m.end > end)
            break;
    }
    return rc < 0 ? rc : filter_buffer_add(&w->out, w->text + begin, end - begin);
}

static int write_protected(struct rewriting *w, struct filter_span s)
{
    if (s.kind == KIND_KEPT)
        return filter_buffer_add(&w->out, w->text + s.begin, s.end - s.begin);
    struct vault_placeholder p;
    char name[VAULT_PLACEHOLDER_MAX + 1];
    int rc = vault_put(w->vault, s.kind, w->text + s.begin, s.end - s.begin, &p);
    return rc < 0 ? rc : filter_buffer_add(&w->out, name, vault_placeholder_print(p, name));
}

static int rewrite(struct rewriting *w, size_t size, const struct filter_spans *protected)
{
    uint32_t at = 0;
    int rc = filter_buffer_add(&w->out, "", 0);
    for (size_t i = 0; rc == 0 && i < protected->count; i++) {
        rc = write_plain(w, at, protected->items[i].begin);
        if (rc == 0)
            rc = write_protected(w, protected->items[i]);
        at = protected->items[i].end;
    }
    return rc < 0 ? rc : write_plain(w, at, (uint32_t)size);
}

static int explain(int rc, struct td_error *err)
{
    if (rc == -TD_ERR_BLOCKED)
        return td_fail(err, rc, "the text has a word that this device's word list blocks; nothing was sent");
    if (rc == -TD_ERR_LIMIT)
        return td_fail(
            err, rc,
            "cannot protect the text: more than %u personal values in one conversation; start a new one",
            FILTER_VAULT_MAX);
    return td_fail(err, rc, "cannot filter the text: %s", td_status_text(rc));
}

int filter_apply(const struct filter *f, struct vault *v, const char *text, size_t size, char **out,
                 size_t *out_size, struct td_error *err)
{
    struct filter_spans masked = {0}, protected = {0};
    struct rewriting w = {.vault = v, .text = text, .masked = &masked};
    *out = NULL;
    *out_size = 0;
    if (size > FILTER_TEXT_MAX)
        return td_fail(err, -TD_ERR_LIMIT, "a text of %zu bytes is too long to filter; at most %u are taken",
                       size, FILTER_TEXT_MAX);
    int rc = f->words ? words_scan(f->words, text, size, &masked) : 0;
    if (rc == 0)
        rc = find_protected(f, v, text, size, &protected);
    if (rc == 0) {
        filter_spans_sort(&masked);
        unite_masks(&masked);
        rc = rewrite(&w, size, &protected);
    }
    filter_spans_free(&masked);
    filter_spans_free(&protected);
    if (rc < 0) {
        filter_buffer_free(&w.out);
        return explain(rc, err);
    }
    *out = w.out.data;
    *out_size = w.out.size;
    return 0;
}
