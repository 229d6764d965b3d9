/* vault_restorer: placeholders of a streamed reply become values again. What may still become a placeholder is held back,
 * at most VAULT_PLACEHOLDER_MAX bytes; only exact ones that the vault knows are replaced, and values are not looked into. */
#include "edge/vault.h"
#include "shared/crypto.h"
#include <stdlib.h>

struct restorer {
    const struct vault *vault;
    char held[VAULT_PLACEHOLDER_MAX]; /* empty, or the beginning of a placeholder */
    size_t held_size;
};

struct restorer *restorer_create(const struct vault *v)
{
    struct restorer *r = calloc(1, sizeof *r);
    if (r)
        r->vault = v;
    return r;
}

void restorer_destroy(struct restorer *r)
{
    free(r);
}

static int release(struct restorer *r, struct filter_buffer *b)
{
    int rc = filter_buffer_add(b, r->held, r->held_size);
    r->held_size = 0;
    return rc;
}

/* One more byte of something that may be a placeholder. */
static int push_held(struct restorer *r, char c, struct filter_buffer *b)
{
    struct vault_placeholder p;
    r->held[r->held_size++] = c;
    int parsed = vault_placeholder_parse(r->held, r->held_size, &p);
    if (parsed == -TD_ERR_TRUNCATED)
        return 0;
    if (parsed == 0) { /* c is no part of one, but may begin the next */
        bool again = c == '[' && r->held_size > 1;
        r->held_size -= again;
        int rc = release(r, b);
        if (again)
            r->held[r->held_size++] = c;
        return rc;
    }
    struct span value = vault_find(r->vault, p);
    if (!value.size)
        return release(r, b);
    r->held_size = 0;
    return filter_buffer_add(b, (const char *)value.data, value.size);
}

int restorer_push(struct restorer *r, const char *text, size_t size, bool flush, char **out, size_t *out_size)
{
    struct filter_buffer b = {0};
    int rc = filter_buffer_add(&b, "", 0);
    *out = NULL;
    *out_size = 0;
    for (size_t at = 0; rc == 0 && at < size;) {
        if (r->held_size > 0) {
            rc = push_held(r, text[at++], &b);
            continue;
        }
        const char *open = memchr(text + at, '[', size - at);
        size_t plain = open ? (size_t)(open - text) - at : size - at;
        rc = filter_buffer_add(&b, text + at, plain);
        at += plain;
        if (rc == 0 && open)
            rc = push_held(r, text[at++], &b);
    }
    if (rc == 0 && flush)
        rc = release(r, &b);
    if (rc < 0) {
        filter_buffer_free(&b);
        return rc;
    }
    *out = b.data;
    *out_size = b.size;
    return 0;
}
