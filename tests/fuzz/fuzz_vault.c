/* fuzz_vault: any bytes as a stored vault. What parses is written back to bytes that parse to the same, and all its placeholders
 * restore. */
#include "edge/vault.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool condition)
{
    if (!condition)
        abort();
}

static void check_all_restore(const struct vault *v)
{
    size_t found = 0;
    for (uint8_t kind = 0; kind < PII_KIND_COUNT; kind++)
        for (unsigned number = 1; number <= VAULT_NUMBER_MAX; number++) {
            struct vault_placeholder p = {kind, (uint16_t)number};
            struct span value = vault_find(v, p);
            if (!value.size)
                continue;
            found++;
            char name[VAULT_PLACEHOLDER_MAX + 1], *out;
            size_t name_size = vault_placeholder_print(p, name), out_size;
            struct restorer *r = restorer_create(v);
            require(restorer_push(r, name, name_size, true, &out, &out_size) == 0);
            require(out_size == value.size && memcmp(out, value.data, out_size) == 0);
            free(out);
            restorer_destroy(r);
        }
    require(found == vault_count(v));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct vault *v, *back;
    uint8_t *bytes, *again;
    size_t bytes_size, again_size;
    if (vault_parse(data, size, &v) < 0)
        return 0;
    check_all_restore(v);
    require(vault_serialise(v, &bytes, &bytes_size) == 0 && bytes_size == size);
    require(vault_parse(bytes, bytes_size, &back) == 0 && vault_count(back) == vault_count(v));
    require(vault_serialise(back, &again, &again_size) == 0);
    require(again_size == bytes_size && memcmp(again, bytes, again_size) == 0);
    struct filter_spans spans = {0};
    require(vault_scan(v, (const char *)data, size, &spans) == 0);
    filter_spans_free(&spans);
    free(again);
    free(bytes);
    vault_destroy(back);
    vault_destroy(v);
    return 0;
}
