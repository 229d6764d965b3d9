/* operator: the counts that operators see, pins by request, and the token that lets one ask. */
#include "store/operator.h"
#include "store_fixture.h"

static json_int_t count_in(const json_t *root, const char *name)
{
    const json_t *value = json_object_get(root, name);
    assert_true(json_is_integer(value));
    return json_integer_value(value);
}

static int pin(struct store *s, const char *request, struct td_error *err)
{
    json_t *root = json_loads(request, 0, NULL);
    assert_non_null(root);
    int rc = operator_pin(s, root, err);
    json_decref(root);
    return rc;
}

static void counts_are_by_tenant_and_quality(void **state)
{
    (void)state;
    static const struct kv_quality of_device = {KV_L1, KV_NUMERICS_CPU_V1, KV_FROM_DEVICE, 0};
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct fixture_block f;
    struct store *s = fixture_open(&c);
    for (uint64_t i = 0; i < 3; i++) {
        fixture_block_make(&f, i);
        assert_int_equal(fixture_put(s, "acme", &f), 0);
    }
    fixture_block_of(&f, 9, of_device, 0, FIXTURE_LAYERS);
    assert_int_equal(fixture_put(s, "bank", &f), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "text"), 0);
    json_t *root = operator_stats(s);
    assert_int_equal(count_in(root, "blocks"), 4);
    assert_int_equal(count_in(root, "conversations"), 1);
    assert_int_equal(count_in(root, "limit_bytes"), 1 << 30);
    assert_false(json_is_true(json_object_get(root, "writes_off")));
    const json_t *tenants = json_object_get(root, "tenants");
    assert_int_equal(json_array_size(tenants), 2);
    for (size_t i = 0; i < 2; i++) {
        const json_t *t = json_array_get(tenants, i);
        bool acme = strcmp(json_string_value(json_object_get(t, "tenant")), "acme") == 0;
        assert_int_equal(count_in(t, "blocks"), acme ? 3 : 1);
        assert_int_equal(count_in(t, "lossless"), acme ? 3 : 0);
        assert_int_equal(count_in(t, "l1"), acme ? 0 : 1);
        assert_int_equal(count_in(t, "from_device"), acme ? 0 : 1);
        assert_true(count_in(t, "bytes") > 0);
    }
    json_decref(root);
    store_close(s);
    fixture_remove(dir);
}

static void pins_by_request(void **state)
{
    (void)state;
    char *dir = fixture_directory(), digits[65], text[256];
    struct store_config c = fixture_config(dir);
    struct fixture_block f;
    struct td_error err = {0};
    struct store *s = fixture_open(&c);
    fixture_block_make(&f, 1);
    assert_int_equal(fixture_put(s, "acme", &f), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "c", 0, "text"), 0);
    hex_encode(f.id.bytes, sizeof f.id.bytes, digits);
    snprintf(text, sizeof text, "{\"tenant\":\"acme\",\"block\":\"%s\",\"pinned\":true}", digits);
    assert_int_equal(pin(s, text, &err), 0);
    assert_true(store_is_pinned(s, "acme", &f.id));
    snprintf(text, sizeof text, "{\"tenant\":\"acme\",\"block\":\"%s\",\"pinned\":false}", digits);
    assert_int_equal(pin(s, text, &err), 0);
    assert_int_equal(store_pin_count(s), 0);
    assert_int_equal(
        pin(s, "{\"tenant\":\"acme\",\"principal\":\"ann\",\"conversation\":\"c\",\"pinned\":true}", &err),
        0);
    assert_true(store_conv_is_pinned(s, "acme", "ann", "c"));
    assert_int_equal(
        pin(s, "{\"tenant\":\"acme\",\"principal\":\"bob\",\"conversation\":\"c\",\"pinned\":true}", &err),
        -TD_ERR_NOTFOUND);
    static const char *const bad[] = {"{}",
                                      "{\"tenant\":\"acme\",\"pinned\":true}",
                                      "{\"tenant\":\"a/b\",\"block\":\"00\",\"pinned\":true}",
                                      "{\"tenant\":\"acme\",\"block\":\"00\",\"pinned\":true}",
                                      "{\"tenant\":\"acme\",\"principal\":\"ann\",\"pinned\":true}",
                                      "{\"tenant\":\"acme\",\"principal\":\"ann\",\"conversation\":\"c\"}"};
    for (size_t i = 0; i < TD_COUNT(bad); i++) {
        assert_int_equal(pin(s, bad[i], &err), -TD_ERR_ARG);
        assert_non_null(strstr(err.text, "cannot pin"));
    }
    assert_int_equal(store_pin_count(s), 1);
    store_close(s);
    fixture_remove(dir);
}

/* The same of the same key, another of another, and not the key itself. */
static void the_token_is_of_the_master_key(void **state)
{
    (void)state;
    uint8_t master[CRYPTO_KEY_SIZE] = {1};
    char first[OPERATOR_TOKEN_SIZE + 1], again[sizeof first], other[sizeof first], key[sizeof first];
    operator_token(master, first);
    operator_token(master, again);
    assert_string_equal(first, again);
    hex_encode(master, sizeof master, key);
    assert_string_not_equal(first, key);
    master[0]++;
    operator_token(master, other);
    assert_string_not_equal(first, other);
    assert_int_equal(strlen(first), OPERATOR_TOKEN_SIZE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_are_by_tenant_and_quality),
        cmocka_unit_test(pins_by_request),
        cmocka_unit_test(the_token_is_of_the_master_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
