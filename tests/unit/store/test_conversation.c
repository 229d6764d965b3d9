/* conversation: bytes of the body, history hashes (vectors from tests/golden/make_ids.py), and the index from histories to conversations. */
#include "store_fixture.h"
#include "shared/log.h"
#include "store/conversation.h"

static uint8_t key[32];

/* ---- history ---------------------------------------------------------------------------------------------- */

static void assert_golden(const char *name, const uint8_t value[32])
{
    FILE *f = fopen(TEST_DATA "/kv/ids.txt", "r");
    assert_non_null(f);
    char label[64], hex[80];
    bool found = false;
    while (!found && fscanf(f, "%63s %79s", label, hex) == 2)
        found = strcmp(label, name) == 0;
    fclose(f);
    assert_true(found);
    uint8_t expected[32];
    assert_int_equal(hex_decode(hex, expected, 32), 0);
    assert_memory_equal(value, expected, 32);
}

static void test_history_matches_vectors(void **state)
{
    (void)state;
    uint8_t h[32];
    static const char umlauts[] = "Gr\xc3\xbc\xc3\x9f dich\n";
    conv_history_start(key, 3, h);
    assert_golden("history_0", h);
    conv_history_next(key, h, "system", "Be brief.", 9, h);
    assert_golden("history_1", h);
    conv_history_next(key, h, "user", umlauts, sizeof umlauts - 1, h);
    assert_golden("history_2", h);
    conv_history_next(key, h, "assistant", "", 0, h);
    assert_golden("history_3", h);
}

/* ---- bytes ------------------------------------------------------------------------------------------------ */

static void fill(struct conversation *c, const char *id, uint32_t boundaries, uint8_t salt)
{
    memset(c, 0, sizeof *c);
    strcpy(c->id, id);
    strcpy(c->title, "A title");
    strcpy(c->last_request_key, "00ff");
    memset(c->tokenizer_id, 0x11, 32);
    memset(c->fingerprint, 0x22, 32);
    c->created_us = 0x0102030405060708u;
    c->updated_us = 9;
    c->ids_count = 3 * boundaries;
    c->ids = malloc(c->ids_count * sizeof *c->ids + 1);
    for (uint32_t i = 0; i < c->ids_count; i++)
        c->ids[i] = (int32_t)(1000 * i + salt);
    c->boundary_count = boundaries;
    c->boundaries = calloc(boundaries + 1, sizeof *c->boundaries);
    uint8_t h[32];
    conv_history_start(key, salt, h);
    for (uint32_t i = 0; i < boundaries; i++) {
        conv_history_next(key, h, "user", &i, sizeof i, h);
        c->boundaries[i].ids_count = 3 * (i + 1);
        c->boundaries[i].reply_open = i % 2;
        memcpy(c->boundaries[i].history, h, 32);
    }
    c->vault = malloc(5);
    memcpy(c->vault, "vault", 5);
    c->vault_size = 5;
}

static void test_bytes(void **state)
{
    (void)state;
    struct conversation c, back;
    uint8_t *bytes;
    size_t size;
    fill(&c, "abc", 2, 7);
    assert_int_equal(conv_serialise(&c, &bytes, &size), 0);
    static const uint8_t start[] = {'T', 'D', 'C', 'V', 1, 0, 0,   0,   3,   0,   0,   0,
                                    'a', 'b', 'c', 7,   0, 0, 0,   'A', ' ', 't', 'i', 't',
                                    'l', 'e', 4,   0,   0, 0, '0', '0', 'f', 'f', 0x11};
    static const uint8_t middle[] = {8, 7, 6, 5, 4, 3, 2, 1, 9, 0, 0,    0, 0, 0,
                                     0, 0, 6, 0, 0, 0, 7, 0, 0, 0, 0xef, 3, 0, 0};
    assert_memory_equal(bytes, start, sizeof start);
    size_t at = sizeof start - 1 + 64;
    assert_memory_equal(bytes + at, middle, sizeof middle);
    at += 20 + 24;
    assert_int_equal(load_le32(bytes + at), 2);
    assert_int_equal(load_le32(bytes + at + 4), 3);
    assert_int_equal(load_le32(bytes + at + 8), 0);
    assert_memory_equal(bytes + at + 12, c.boundaries[0].history, 32);
    assert_int_equal(load_le32(bytes + at + 48), 1);
    at += 4 + 2 * 40;
    assert_memory_equal(bytes + at, "\x05\0\0\0vault", 9);
    assert_int_equal(size, at + 9);

    assert_int_equal(conv_parse(bytes, size, &back), 0);
    assert_string_equal(back.id, c.id);
    assert_string_equal(back.title, c.title);
    assert_string_equal(back.last_request_key, c.last_request_key);
    assert_memory_equal(back.tokenizer_id, c.tokenizer_id, 64);
    assert_int_equal(back.ids_count, 6);
    assert_memory_equal(back.ids, c.ids, 6 * sizeof *c.ids);
    assert_int_equal(back.boundary_count, 2);
    assert_true(back.boundaries[1].reply_open && !back.boundaries[0].reply_open);
    assert_memory_equal(back.boundaries[1].history, c.boundaries[1].history, 32);
    assert_memory_equal(back.vault, "vault", 5);
    conv_free(&back);

    for (size_t length = 0; length < size; length++)
        assert_true(conv_parse(bytes, length, &back) < 0);
    bytes[4] = 2;
    assert_int_equal(conv_parse(bytes, size, &back), -TD_ERR_VERSION);
    bytes[4] = 1;
    for (size_t i = 8; i < size; i++) { /* lengths that run away must be noticed; the rest may be anything */
        uint8_t kept = bytes[i];
        bytes[i] = 0xff;
        if (conv_parse(bytes, size, &back) == 0)
            conv_free(&back);
        bytes[i] = kept;
    }
    bytes[12] = 0; /* NUL in the id */
    assert_int_equal(conv_parse(bytes, size, &back), -TD_ERR_FORMAT);
    free(bytes);
    conv_free(&c);
}

static void test_inconsistent_ones_are_refused(void **state)
{
    (void)state;
    struct conversation c;
    uint8_t *bytes;
    size_t size;
    fill(&c, "x", 2, 1);
    c.boundaries[1].ids_count = 7; /* beyond the ids */
    assert_int_equal(conv_serialise(&c, &bytes, &size), -TD_ERR_ARG);
    c.boundaries[1].ids_count = 2; /* before the one before it */
    assert_int_equal(conv_serialise(&c, &bytes, &size), -TD_ERR_ARG);
    c.boundaries[1].ids_count = 6;
    c.id[0] = '\0';
    assert_int_equal(conv_serialise(&c, &bytes, &size), -TD_ERR_ARG);
    conv_free(&c);
    fill(&c, "x", CONV_MESSAGES_MAX + 1, 1);
    assert_int_equal(conv_serialise(&c, &bytes, &size), -TD_ERR_ARG);
    c.boundary_count--;
    assert_int_equal(conv_serialise(&c, &bytes, &size), 0);
    free(bytes);
    c.vault_size = STORE_CONV_SIZE_MAX;
    assert_int_equal(conv_serialise(&c, &bytes, &size), -TD_ERR_LIMIT);
    c.vault_size = 5;
    conv_free(&c);
}

/* ---- index ------------------------------------------------------------------------------------------------ */

static char *directory;
static struct store *store;

static struct conv_index *open_again(size_t entries)
{
    struct store_config config = fixture_config(directory);
    store = fixture_open(&config);
    return conv_index_create(store, entries);
}

static struct conv_index *open_index(size_t entries)
{
    directory = fixture_directory();
    return open_again(entries);
}

static void close_index(struct conv_index *x)
{
    conv_index_destroy(x);
    store_close(store);
}

static void remove_index(struct conv_index *x)
{
    close_index(x);
    fixture_remove(directory);
}

static void history_of(uint8_t salt, uint32_t count, uint8_t (*hashes)[TD_HASH_SIZE])
{
    struct conversation c;
    fill(&c, "x", count, salt);
    for (uint32_t i = 0; i < count; i++)
        memcpy(hashes[i], c.boundaries[i].history, 32);
    conv_free(&c);
}

static int save(struct conv_index *x, const char *principal, const char *id, uint32_t boundaries,
                uint8_t salt, uint64_t expected)
{
    struct conversation c;
    fill(&c, id, boundaries, salt);
    c.updated_us += boundaries; /* longer ones had a turn later */
    int rc = conv_save(x, "acme", principal, expected, &c);
    conv_free(&c);
    return rc;
}

static void assert_match(struct conv_index *x, const char *principal, uint8_t salt, uint32_t count,
                         const char *id, uint32_t boundary)
{
    uint8_t hashes[64][TD_HASH_SIZE];
    char got[STORE_CONV_ID_MAX + 1];
    uint32_t at;
    history_of(salt, count, hashes);
    int rc = conv_index_match(x, "acme", principal, (const uint8_t(*)[TD_HASH_SIZE])hashes, count, got, &at);
    assert_int_equal(rc, id ? 0 : -TD_ERR_NOTFOUND);
    if (id) {
        assert_string_equal(got, id);
        assert_int_equal(at, boundary);
    }
}

/* Saving ends on another thread, which may come to it late. */
static void test_deleted_before_saving_has_ended(void **state)
{
    (void)state;
    struct conv_index *x = open_index(100);
    struct conversation c;
    struct store_waiter *waiter;
    assert_match(x, "ann", 1, 3, NULL, 0);
    fill(&c, "one", 4, 1);
    assert_int_equal(conv_save_begin(x, "acme", "ann", 0, &c, &waiter), 0);
    assert_int_equal(conv_delete(x, "acme", "ann", "one"), 0);
    assert_int_equal(conv_save_end(x, "acme", "ann", 0, &c, waiter), 0);
    assert_match(x, "ann", 1, 4, NULL, 0);
    conv_free(&c);
    remove_index(x);
}

static void test_match_by_longest_history(void **state)
{
    (void)state;
    struct conv_index *x = open_index(100);
    assert_match(x, "ann", 1, 3, NULL, 0);
    assert_int_equal(save(x, "ann", "one", 4, 1, 0), 0);
    assert_int_equal(save(x, "ann", "two", 2, 2, 0), 0);
    for (int i = 0; i < 2; i++) {
        assert_match(x, "ann", 1, 6, "one", 3); /* the client's history is longer by two messages */
        assert_match(x, "ann", 1, 4, "one", 3);
        assert_match(x, "ann", 1, 2, "one", 1); /* it went back */
        assert_match(x, "ann", 2, 9, "two", 1);
        assert_match(x, "ann", 3, 9, NULL, 0);
        assert_match(x, "bob", 1, 4, NULL, 0);
        close_index(x); /* once from what was saved, once from the store */
        x = open_again(100);
    }
    remove_index(x);
}

static void test_save_load_delete(void **state)
{
    (void)state;
    struct conv_index *x = open_index(100);
    struct conversation c;
    uint64_t version;
    assert_int_equal(save(x, "ann", "one", 2, 1, 1), -TD_ERR_CONFLICT);
    assert_int_equal(save(x, "ann", "one", 2, 1, 0), 0);
    assert_int_equal(save(x, "ann", "one", 3, 1, 0), -TD_ERR_CONFLICT);
    assert_match(x, "ann", 1, 3, "one", 1); /* the loser left no trace */
    assert_int_equal(save(x, "ann", "one", 3, 1, 1), 0);
    assert_match(x, "ann", 1, 3, "one", 2);
    assert_int_equal(conv_load(x, "acme", "ann", "one", &version, &c), 0);
    assert_int_equal(version, 2);
    assert_int_equal(c.boundary_count, 3);
    conv_free(&c);
    assert_int_equal(conv_load(x, "acme", "bob", "one", &version, &c), -TD_ERR_NOTFOUND);
    assert_int_equal(conv_delete(x, "acme", "ann", "one"), 0);
    assert_match(x, "ann", 1, 3, NULL, 0);
    assert_int_equal(conv_delete(x, "acme", "ann", "one"), -TD_ERR_NOTFOUND);
    assert_int_equal(conv_load(x, "acme", "ann", "one", &version, &c), -TD_ERR_NOTFOUND);
    /* Gone behind the index's back: loading finds out and forgets it. */
    assert_int_equal(save(x, "ann", "one", 2, 1, 0), 0);
    assert_int_equal(store_conv_delete(store, "acme", "ann", "one", NULL, NULL), 0);
    assert_match(x, "ann", 1, 2, "one", 1);
    assert_int_equal(conv_load(x, "acme", "ann", "one", &version, &c), -TD_ERR_NOTFOUND);
    assert_match(x, "ann", 1, 2, NULL, 0);
    remove_index(x);
}

static void test_shared_histories(void **state)
{
    (void)state;
    struct conv_index *x = open_index(100);
    assert_int_equal(save(x, "ann", "old", 2, 1, 0), 0);
    assert_int_equal(save(x, "ann", "new", 3, 1, 0), 0);
    for (int i = 0; i < 2; i++) {
        assert_match(x, "ann", 1, 2, "old", 1); /* ends there */
        assert_match(x, "ann", 1, 1, "new", 0); /* neither does: had a turn last */
        conv_index_destroy(x);
        x = conv_index_create(store, 100);
    }
    assert_int_equal(conv_delete(x, "acme", "ann", "new"), 0);
    assert_match(x, "ann", 1, 3, "old", 1); /* the other one is still known */
    remove_index(x);
}

static void test_an_erased_tenant_begins_anew(void **state)
{
    (void)state;
    struct conv_index *x = open_index(100);
    assert_int_equal(save(x, "ann", "one", 2, 1, 0), 0);
    assert_match(x, "ann", 1, 2, "one", 1);
    assert_int_equal(store_erase_tenant(store, "acme", NULL), 0);
    conv_index_forget_tenant(x, "other");
    conv_index_forget_tenant(x, "acme");
    assert_match(x, "ann", 1, 2, NULL, 0);
    assert_int_equal(save(x, "ann", "one", 2, 9, 0), 0); /* the same id and version, another history */
    assert_match(x, "ann", 9, 2, "one", 1);
    remove_index(x);
}

static void test_bounded(void **state)
{
    (void)state;
    struct conv_index *x = open_index(20);
    for (uint8_t i = 0; i < 10; i++) {
        char id[8];
        snprintf(id, sizeof id, "c%d", i);
        assert_int_equal(save(x, "ann", id, 4, i, 0), 0);
        if (i > 0)
            assert_match(x, "ann", 0, 4, "c0", 3); /* used all the time: its entry stays */
    }
    assert_match(x, "ann", 9, 4, "c9", 3);
    assert_match(x, "ann", 8, 4, "c8", 3);
    assert_match(x, "ann", 1, 4, NULL, 0); /* evicted */
    for (uint8_t i = 0; i < 3; i++) {      /* somebody else drives all of ann's out */
        char id[8];
        snprintf(id, sizeof id, "b%d", i);
        assert_int_equal(save(x, "bob", id, 20, (uint8_t)(100 + i), 0), 0);
    }
    assert_match(x, "bob", 102, 20, "b2", 19);
    assert_match(x, "ann", 9, 4, "c9", 3); /* read from the store again, the newest half of the room */
    assert_match(x, "ann", 8, 4, "c8", 3);
    assert_match(x, "ann", 7, 4, NULL, 0);
    assert_int_equal(save(x, "ann", "long", 60, 200, 0), 0); /* longer than the index: its end is kept */
    assert_match(x, "ann", 200, 60, "long", 59);
    remove_index(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_history_matches_vectors),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_inconsistent_ones_are_refused),
        cmocka_unit_test(test_match_by_longest_history),
        cmocka_unit_test(test_deleted_before_saving_has_ended),
        cmocka_unit_test(test_save_load_delete),
        cmocka_unit_test(test_shared_histories),
        cmocka_unit_test(test_an_erased_tenant_begins_anew),
        cmocka_unit_test(test_bounded),
    };
    for (int i = 0; i < 32; i++)
        key[i] = (uint8_t)(7 * i + 1);
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
