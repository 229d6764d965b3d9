/* Quality records and the gate: each limit at its edge, files that are none, and who may use what. */
#include "shared/kv_record.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#define L2 3 /* place of "l2" in the list */

static char model_path[64], record_path[128];
static uint8_t fingerprint[TD_HASH_SIZE];

static int setup(void **state)
{
    (void)state;
    snprintf(model_path, sizeof model_path, "/tmp/tandem-record-%ld", (long)getpid());
    for (size_t i = 0; i < TD_HASH_SIZE; i++)
        fingerprint[i] = (uint8_t)(3 * i);
    return kv_record_path(model_path, record_path, sizeof record_path);
}

static int teardown(void **state)
{
    (void)state;
    unlink(record_path);
    return 0;
}

static struct kv_record perfect(void)
{
    struct kv_record r = {.token_count = KV_GATE_TOKENS_MIN, .text_count = KV_GATE_TEXTS_MIN};
    memcpy(r.fingerprint, fingerprint, TD_HASH_SIZE);
    r.levels[L2] = (struct kv_level_quality){.known = true,
                                             .bits_per_value = 4.25,
                                             .encode_gb_s = 2,
                                             .decode_gb_s = 3,
                                             .kl_mean = KV_GATE_KL_MEAN,
                                             .kl_p99 = KV_GATE_KL_P99,
                                             .top1 = KV_GATE_TOP1,
                                             .ppl_change = KV_GATE_PPL,
                                             .ppl_change_low = -1,
                                             .ppl_change_high = KV_GATE_PPL_HIGH};
    return r;
}

static void assert_fails(struct kv_record r)
{
    assert_non_null(kv_gate(&r, &KV_LEVEL_LIST[L2]));
}

static void test_levels_have_names(void **state)
{
    (void)state;
    assert_int_equal(kv_level_find("l1")->codec, KV_L1);
    const struct kv_level *l = kv_level_find("l2-k5");
    assert_true(l->codec == KV_L2 && l->table[0] == 1 && l->table[1] == 0);
    assert_ptr_equal(kv_level_find("l2"), &KV_LEVEL_LIST[L2]);
    assert_null(kv_level_find("l3"));
    assert_int_equal(kv_level_table(l, 0, 0), 1);
    assert_int_equal(kv_level_table(l, 1, 9), 0);
    assert_int_equal(kv_level_table(kv_level_find("l1"), 1, 1), 1);
    assert_int_equal(kv_level_table(kv_level_find("l1"), 1, 0), 0); /* the first token has its own scale */
}

static void test_each_limit_of_the_gate(void **state)
{
    (void)state;
    struct kv_record r = perfect();
    assert_null(kv_gate(&r, &KV_LEVEL_LIST[L2]));
    double *numbers[] = {&r.levels[L2].kl_mean, &r.levels[L2].kl_p99, &r.levels[L2].ppl_change,
                         &r.levels[L2].ppl_change_high};
    for (size_t i = 0; i < TD_COUNT(numbers); i++) {
        double kept = *numbers[i];
        *numbers[i] = kept * 1.01;
        assert_fails(r);
        *numbers[i] = NAN;
        assert_fails(r);
        *numbers[i] = kept;
    }
    r.levels[L2].top1 -= 0.0001;
    assert_fails(r);
    r = perfect();
    r.token_count--;
    assert_fails(r);
    r = perfect();
    r.text_count--;
    assert_fails(r);
    r = perfect();
    r.levels[L2].known = false;
    assert_fails(r);
}

static void test_a_record_comes_back(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct kv_record r = perfect(), back;
    assert_int_equal(kv_record_save(&r, record_path, &err), 0);
    assert_int_equal(kv_record_load(&back, record_path, fingerprint, &err), 0);
    assert_int_equal(back.token_count, r.token_count);
    assert_int_equal(back.text_count, r.text_count);
    for (size_t i = 0; i < KV_LEVELS; i++)
        assert_int_equal(back.levels[i].known, i == L2);
    assert_true(fabs(back.levels[L2].ppl_change_high - KV_GATE_PPL_HIGH) < 1e-9);
    assert_true(back.levels[L2].bits_per_value == 4.25 && back.levels[L2].decode_gb_s == 3);
    uint8_t other[TD_HASH_SIZE] = {1};
    assert_int_equal(kv_record_load(&back, record_path, other, &err), -TD_ERR_MISMATCH);
    assert_int_equal(kv_record_save(&r, "/nowhere/at/all", &err), -TD_ERR_IO);
}

static void write_text(const char *text)
{
    FILE *f = fopen(record_path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void test_files_that_are_none(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "",
        "[]",
        "{\"format\": \"tandem-codec-quality\"",
        "{\"format\": \"other\", \"version\": 1, \"fingerprint\": \"%s\", \"tokens\": 1, \"texts\": 1, "
        "\"levels\": []}",
        "{\"format\": \"tandem-codec-quality\", \"version\": 1, \"fingerprint\": \"00\", \"tokens\": 1, "
        "\"texts\": 1, "
        "\"levels\": []}",
        "{\"format\": \"tandem-codec-quality\", \"version\": 1, \"fingerprint\": \"%s\", \"tokens\": -1, "
        "\"texts\": 1, "
        "\"levels\": []}",
        "{\"format\": \"tandem-codec-quality\", \"version\": 1, \"fingerprint\": \"%s\", \"tokens\": 1, "
        "\"texts\": 1, "
        "\"levels\": 7}",
        "{\"format\": \"tandem-codec-quality\", \"version\": 1, \"fingerprint\": \"%s\", \"tokens\": 1, "
        "\"texts\": 1, "
        "\"levels\": [{\"level\": \"l2\", \"codec\": 2, \"table_k\": 0, \"table_v\": 0, \"kl_mean\": "
        "\"0\"}]}",
    };
    char hex[2 * TD_HASH_SIZE + 1], text[1024];
    struct td_error err = {0};
    struct kv_record r;
    hex_encode(fingerprint, TD_HASH_SIZE, hex);
    for (size_t i = 0; i < TD_COUNT(texts); i++) {
        const char *place = strstr(texts[i], "%s");
        snprintf(text, sizeof text, "%.*s%s%s", place ? (int)(place - texts[i]) : (int)strlen(texts[i]),
                 texts[i], place ? hex : "", place ? place + 2 : "");
        write_text(text);
        assert_int_equal(kv_record_load(&r, record_path, fingerprint, &err), -TD_ERR_FORMAT);
    }
    snprintf(text, sizeof text,
             "{\"format\": \"tandem-codec-quality\", \"version\": 2, \"fingerprint\": \"%s\", \"tokens\": 1, "
             "\"texts\": 1, \"levels\": []}",
             hex);
    write_text(text);
    assert_int_equal(kv_record_load(&r, record_path, fingerprint, &err), -TD_ERR_VERSION);
}

static int allowed(const char *level)
{
    struct td_error err = {0};
    int rc = kv_level_allowed(kv_level_find(level), model_path, fingerprint, &err);
    assert_true((rc == 0) == (err.code == 0));
    return rc;
}

static const char *chosen(void)
{
    struct td_error err = {0};
    const struct kv_level *level;
    int rc = kv_level_choose(model_path, fingerprint, &level, &err);
    return rc == 0 ? level->name : td_status_text(rc);
}

static void test_the_smallest_that_passes(void **state)
{
    (void)state;
    enum { L1 = 2, L2_K5 = 4 };
    struct td_error err = {0};
    struct kv_record r = perfect();
    unlink(record_path);
    assert_string_equal(chosen(), "l1");
    assert_int_equal(kv_record_save(&r, record_path, &err), 0);
    assert_string_equal(chosen(), "l2");
    r.levels[L2_K5] = r.levels[L1] = r.levels[L2];
    r.levels[L2].kl_mean = 1;
    assert_int_equal(kv_record_save(&r, record_path, &err), 0);
    assert_string_equal(chosen(), "l2-k5");
    r.levels[L2_K5].kl_mean = 1;
    assert_int_equal(kv_record_save(&r, record_path, &err), 0);
    assert_string_equal(chosen(), "l1");
    r.levels[L1].kl_mean = 1;
    assert_int_equal(kv_record_save(&r, record_path, &err), 0);
    assert_string_equal(chosen(), "l0");
    write_text("{");
    assert_string_equal(chosen(), td_status_text(-TD_ERR_FORMAT));
}

static void test_who_may_use_what(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct kv_record r = perfect();
    unlink(record_path);
    assert_int_equal(allowed("l0"), 0);
    assert_int_equal(allowed("l1"), 0);
    assert_int_equal(allowed("l2"), -TD_ERR_BLOCKED);
    assert_int_equal(kv_record_save(&r, record_path, &err), 0);
    assert_int_equal(allowed("l1"), 0); /* not measured */
    assert_int_equal(allowed("l2"), 0);
    assert_int_equal(allowed("l2-k5"), -TD_ERR_BLOCKED);
    r.levels[2] = r.levels[L2]; /* L1, measured, and as bad as can be */
    r.levels[2].kl_mean = r.levels[L2].kl_mean = 1;
    assert_int_equal(kv_record_save(&r, record_path, &err), 0);
    assert_int_equal(allowed("raw"), 0);
    assert_int_equal(allowed("l1"), -TD_ERR_BLOCKED);
    assert_int_equal(allowed("l2"), -TD_ERR_BLOCKED);
    char hex[2 * TD_HASH_SIZE + 1], text[1024];
    hex_encode(fingerprint, TD_HASH_SIZE, hex);
    snprintf(
        text, sizeof text,
        "{\"format\": \"tandem-codec-quality\", \"version\": 1, \"fingerprint\": \"%s\", \"tokens\": 9999, "
        "\"texts\": 9, \"levels\": [{\"level\": \"l2\", \"codec\": 2, \"table_k\": 1, \"table_v\": 0, "
        "\"bits_per_value\": 4, \"kl_mean\": 0, \"kl_p99\": 0, \"top1\": 1, \"ppl_change\": 0, "
        "\"ppl_change_low\": 0, "
        "\"ppl_change_high\": 0, \"encode_gb_s\": 1, \"decode_gb_s\": 1}]}",
        hex);
    write_text(text);
    assert_int_equal(allowed("l2"), -TD_ERR_BLOCKED); /* measured with other tables: not measured */
    write_text("{}");
    assert_int_equal(allowed("l0"), 0);
    assert_int_equal(allowed("l1"), -TD_ERR_FORMAT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_levels_have_names),   cmocka_unit_test(test_each_limit_of_the_gate),
        cmocka_unit_test(test_a_record_comes_back), cmocka_unit_test(test_files_that_are_none),
        cmocka_unit_test(test_who_may_use_what),    cmocka_unit_test(test_the_smallest_that_passes),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
