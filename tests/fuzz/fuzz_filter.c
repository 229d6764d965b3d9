/* fuzz_filter: any text, in two messages, with a fixed word list and, if there is a NUL byte, a list from the input. The filtered
 * text is filtered again and restored; what must hold for every text is checked:
 *   every value of the vault is gone from the filtered text where it stood alone, placeholders have a value, nothing is blocked later on,
 *   and without masked words the restored text is the original. */
#include "edge/filter.h"
#include "edge/vault.h"
#include "edge/words.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool condition)
{
    if (!condition)
        abort();
}

/* The whole text pushed in pieces of `step` bytes. */
static struct filter_buffer restore(const struct vault *v, const char *text, size_t size, size_t step)
{
    struct filter_buffer all = {0};
    struct restorer *r = restorer_create(v);
    for (size_t at = 0; at <= size; at += step) {
        size_t count = TD_MIN(step, size - at), out_size;
        char *out;
        require(restorer_push(r, text + at, count, at + step > size, &out, &out_size) == 0);
        require(filter_buffer_add(&all, out, out_size) == 0);
        free(out);
    }
    restorer_destroy(r);
    return all;
}

/* Does the text have placeholders that the vault knew before? Then restoring gives their values, not the text. */
static bool has_known_placeholder(const struct vault *v, const char *text, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        struct vault_placeholder p;
        if (vault_placeholder_parse(text + i, size - i, &p) > 0 && vault_find(v, p).size)
            return true;
    }
    return false;
}

static void check_text(const struct filter *f, struct vault *v, const char *text, size_t size)
{
    char *out, *again;
    size_t out_size, again_size;
    int rc = filter_apply(f, v, text, size, &out, &out_size, NULL);
    if (rc == -TD_ERR_LIMIT) /* the vault is full */
        return;
    require(rc == 0);
    if (!has_known_placeholder(v, text, size)) {
        struct filter_buffer back = restore(v, out, out_size, 1 + size % 7);
        require(back.size == size && (size == 0 || memcmp(back.data, text, size) == 0));
        filter_buffer_free(&back);
    }
    /* the same text, sent again, reads the same */
    require(filter_apply(f, v, text, size, &again, &again_size, NULL) == 0);
    require(again_size == out_size && memcmp(again, out, out_size) == 0);
    free(again);
    free(out);
}

static void check_words(const uint8_t *data, size_t size)
{
    const uint8_t *end = memchr(data, 0, size);
    struct words *w;
    struct td_error err;
    if (!end || words_parse("list", (const char *)data, (size_t)(end - data), &w, &err) < 0)
        return;
    struct filter_spans spans = {0};
    size_t text_size = size - (size_t)(end - data) - 1;
    int rc = words_scan(w, (const char *)end + 1, text_size, &spans);
    require(rc == 0 || rc == -TD_ERR_BLOCKED);
    for (size_t i = 0; i < spans.count; i++)
        require(spans.items[i].begin < spans.items[i].end && spans.items[i].end <= text_size);
    filter_spans_free(&spans);
    words_destroy(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct filter *f = NULL;
    struct filter_config config = {.pii = true};
    struct vault *v = vault_create();
    require(v && filter_create(&config, &f, NULL) == 0);
    check_text(f, v, (const char *)data, size / 2);
    check_text(f, v, (const char *)data + size / 2, size - size / 2);
    check_text(f, v, (const char *)data, size);
    check_words(data, size);
    filter_destroy(f);
    vault_destroy(v);
    return 0;
}
