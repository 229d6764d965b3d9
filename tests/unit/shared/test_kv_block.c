/* Block ids and quality. Ids against vectors that tests/golden/make_ids.py computed with hashlib and hmac. */
#include "shared/crypto.h"
#include "shared/kv_block.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static uint8_t key[32], fingerprint[32];
static const struct kv_block_id root;

static void golden(const char *name, uint8_t out[32])
{
    FILE *f = fopen(TEST_DATA "/kv/ids.txt", "r");
    assert_non_null(f);
    char label[64], hex[80];
    bool found = false;
    while (!found && fscanf(f, "%63s %79s", label, hex) == 2)
        found = strcmp(label, name) == 0;
    fclose(f);
    assert_true(found);
    assert_int_equal(hex_decode(hex, out, 32), 0);
}

static void assert_golden(const char *name, const uint8_t value[32])
{
    uint8_t expected[32];
    golden(name, expected);
    assert_memory_equal(value, expected, 32);
}

static void tokens(int block, int32_t ids[KV_BLOCK_TOKENS])
{
    for (int i = 0; i < KV_BLOCK_TOKENS; i++)
        ids[i] = (int32_t)((uint64_t)(64 * block + i) * 2654435761u % 49152);
}

static struct kv_layout layout_plain(void)
{
    return (struct kv_layout){.block_tokens = 64,
                              .dtype = 1,
                              .rope_dim = 64,
                              .rope_base = 10000.0f,
                              .rope_scale = 1.0f,
                              .version = KV_LAYOUT_VERSION};
}

static int setup(void **state)
{
    (void)state;
    for (int i = 0; i < 32; i++)
        key[i] = (uint8_t)(7 * i + 1);
    sha256_once("fingerprint", 11, fingerprint);
    return crypto_init();
}

static void test_layout_hash_matches_vectors(void **state)
{
    (void)state;
    uint8_t hash[32];
    struct kv_layout l = layout_plain();
    kv_layout_hash(&l, hash);
    assert_golden("layout_plain", hash);
    l.rope_kind = 1;
    l.rope_dim = 128;
    l.rope_base = 500000.0f;
    l.rope_scale = 8.0f;
    sha256_once("factors", 7, l.rope_factors);
    sha256_once("adapter", 7, l.adapter);
    kv_layout_hash(&l, hash);
    assert_golden("layout_scaled", hash);
}

static void test_layout_hash_depends_on_every_field(void **state)
{
    (void)state;
    struct kv_layout variants[10];
    uint8_t hashes[10][32];
    for (int i = 0; i < 10; i++)
        variants[i] = layout_plain();
    variants[1].block_tokens++;
    variants[2].dtype++;
    variants[3].rope_kind++;
    variants[4].rope_dim++;
    variants[5].rope_base++;
    variants[6].rope_scale++;
    variants[7].rope_factors[31]++;
    variants[8].adapter[0]++;
    variants[9].version++;
    for (int i = 0; i < 10; i++) {
        kv_layout_hash(&variants[i], hashes[i]);
        for (int j = 0; j < i; j++)
            assert_memory_not_equal(hashes[i], hashes[j], 32);
    }
}

static void test_chain_matches_vectors(void **state)
{
    (void)state;
    static const char *const names[] = {"shared_0", "shared_1", "shared_2"};
    struct kv_layout l = layout_plain();
    uint8_t layout[32];
    kv_layout_hash(&l, layout);
    struct kv_block_id id = root;
    for (int b = 0; b < 3; b++) {
        int32_t ids[KV_BLOCK_TOKENS];
        tokens(b, ids);
        kv_block_id_next(key, &id, fingerprint, layout, ids, &id); /* parent and out may be one */
        assert_golden(names[b], id.bytes);
    }
}

static void test_principal_namespace_matches_vectors(void **state)
{
    (void)state;
    uint8_t alice[32], bob[32], layout[32];
    kv_principal_key(key, "alice", alice);
    assert_golden("principal_alice", alice);
    kv_principal_key(key, "bob", bob);
    assert_memory_not_equal(alice, bob, 32);

    struct kv_layout l = layout_plain();
    kv_layout_hash(&l, layout);
    int32_t ids[KV_BLOCK_TOKENS];
    tokens(0, ids);
    struct kv_block_id own;
    kv_block_id_next(alice, &root, fingerprint, layout, ids, &own);
    assert_golden("own_0", own.bytes);
}

static void test_layout_and_weights_enter_the_id(void **state)
{
    (void)state;
    struct kv_layout l = layout_plain();
    uint8_t layout[32], other_fingerprint[32];
    l.rope_kind = 1;
    l.rope_dim = 128;
    l.rope_base = 500000.0f;
    l.rope_scale = 8.0f;
    sha256_once("factors", 7, l.rope_factors);
    sha256_once("adapter", 7, l.adapter);
    kv_layout_hash(&l, layout);
    int32_t ids[KV_BLOCK_TOKENS];
    tokens(0, ids);
    struct kv_block_id id, other;
    kv_block_id_next(key, &root, fingerprint, layout, ids, &id);
    assert_golden("scaled_0", id.bytes);
    sha256_once("other weights", 13, other_fingerprint);
    kv_block_id_next(key, &root, other_fingerprint, layout, ids, &other);
    assert_memory_not_equal(id.bytes, other.bytes, 32);
    ids[63]++;
    kv_block_id_next(key, &root, fingerprint, layout, ids, &other);
    assert_memory_not_equal(id.bytes, other.bytes, 32);
}

static struct kv_quality quality(int fidelity, int numerics, int provenance)
{
    return (struct kv_quality){(uint8_t)fidelity, (uint8_t)numerics, (uint8_t)provenance, 0};
}

static void test_quality_accepts(void **state)
{
    (void)state;
    const enum kv_numerics cpu = KV_NUMERICS_CPU_V1, fast = KV_NUMERICS_CUDA_FAST;
    assert_true(kv_quality_accepts(quality(KV_L0, cpu, KV_FROM_DEVICE), KV_ACCEPT_EXACT, cpu));
    assert_false(kv_quality_accepts(quality(KV_L0, cpu, KV_FROM_CLOUD), KV_ACCEPT_EXACT, fast));
    assert_false(kv_quality_accepts(quality(KV_L1, cpu, KV_FROM_CLOUD), KV_ACCEPT_EXACT, cpu));
    assert_true(kv_quality_accepts(quality(KV_L1, fast, KV_FROM_CLOUD), KV_ACCEPT_VISIBLE_LOSSLESS, cpu));
    assert_false(kv_quality_accepts(quality(KV_L2, cpu, KV_FROM_CLOUD), KV_ACCEPT_VISIBLE_LOSSLESS, cpu));
    assert_true(kv_quality_accepts(quality(KV_L4, fast, KV_FROM_DEVICE), KV_ACCEPT_ANY, cpu));
    assert_false(kv_quality_accepts(quality(5, cpu, KV_FROM_CLOUD), KV_ACCEPT_ANY, cpu));
    assert_false(kv_quality_accepts(quality(KV_L0, cpu, KV_FROM_CLOUD), (enum kv_accept)9, cpu));
}

/* KV from pages of 8 bits goes to engines with such pages, unless anything does; theirs may be made from any other. */
static void test_quality_of_8bit_pages(void **state)
{
    (void)state;
    const enum kv_numerics fast = KV_NUMERICS_CUDA_FAST, fp8 = KV_NUMERICS_CUDA_FAST_FP8,
                           fp8_det = KV_NUMERICS_CUDA_DET_V1_FP8, int8 = KV_NUMERICS_CUDA_FAST_INT8;
    const enum kv_accept visible = KV_ACCEPT_VISIBLE_LOSSLESS;
    static const enum kv_numerics v2[] = {KV_NUMERICS_CUDA_DET_V2, KV_NUMERICS_CUDA_DET_V2_FP8,
                                          KV_NUMERICS_CUDA_DET_V2_INT8},
                                  fasts[] = {KV_NUMERICS_CUDA_FAST, KV_NUMERICS_CUDA_FAST_FP8,
                                             KV_NUMERICS_CUDA_FAST_INT8};
    for (int kind = 0; kind < 3; kind++) {
        struct kv_quality q = quality(KV_L0, v2[kind], KV_FROM_CLOUD);
        assert_int_equal(kv_numerics_mixed(v2[kind], KV_NUMERICS_CPU_V1), fasts[kind]);
        assert_true(kv_quality_accepts(q, KV_ACCEPT_EXACT, v2[kind]));
        assert_false(kv_quality_accepts(q, KV_ACCEPT_EXACT, v2[(kind + 1) % 3]));
        for (int of = 0; of < 3; of++)
            assert_int_equal(kv_quality_accepts(q, visible, fasts[of]), kind == 0 || kind == of);
    }
    assert_false(kv_quality_accepts(quality(KV_L0, KV_NUMERICS_CUDA_DET_V1, KV_FROM_CLOUD), KV_ACCEPT_EXACT,
                                    KV_NUMERICS_CUDA_DET_V2));
    for (uint32_t kind = 0; kind < 3;
         kind++) { /* other devices: each kind has its own, and that of its pages */
        enum kv_numerics a100 = kv_numerics_cuda_det(false, 80, kind),
                         newer = kv_numerics_cuda_det(false, 120, kind);
        struct kv_quality q = quality(KV_L0, a100, KV_FROM_CLOUD);
        assert_true(kv_numerics_known(a100) && kv_quality_accepts(q, KV_ACCEPT_EXACT, a100));
        assert_false(kv_quality_accepts(q, KV_ACCEPT_EXACT, newer));
        assert_false(kv_quality_accepts(q, KV_ACCEPT_EXACT, v2[kind]));
        assert_int_equal(kv_numerics_mixed(a100, newer), fasts[kind]);
        for (int of = 0; of < 3; of++)
            assert_int_equal(kv_quality_accepts(q, visible, fasts[of]), kind == 0 || kind == (uint32_t)of);
        assert_int_equal(kv_numerics_cuda_det(true, 90, kind), v2[kind]);
        assert_int_equal(kv_numerics_cuda_det(false, 149, 2), KV_NUMERICS_LAST);
        assert_int_equal(kv_numerics_cuda_det(false, 150, kind), fasts[kind]);
    }
    assert_true(kv_quality_accepts(quality(KV_L0, fp8_det, KV_FROM_CLOUD), KV_ACCEPT_EXACT, fp8_det));
    assert_false(kv_quality_accepts(quality(KV_L0, fp8, KV_FROM_CLOUD), KV_ACCEPT_EXACT, fast));
    assert_false(kv_quality_accepts(quality(KV_L0, fast, KV_FROM_CLOUD), KV_ACCEPT_EXACT, fp8));
    assert_false(kv_quality_accepts(quality(KV_L0, fp8, KV_FROM_CLOUD), visible, fast));
    assert_false(kv_quality_accepts(quality(KV_L0, fp8_det, KV_FROM_CLOUD), visible, KV_NUMERICS_CPU_V1));
    assert_false(kv_quality_accepts(quality(KV_L0, fp8, KV_FROM_CLOUD), visible, int8));
    assert_true(kv_quality_accepts(quality(KV_L0, fp8, KV_FROM_CLOUD), visible, fp8_det));
    assert_true(kv_quality_accepts(quality(KV_L1, KV_NUMERICS_CPU_V1, KV_FROM_DEVICE), visible, fp8));
    assert_true(kv_quality_accepts(quality(KV_L0, int8, KV_FROM_CLOUD), KV_ACCEPT_ANY, fast));

    assert_true(kv_quality_better(quality(0, fast, 0), quality(0, fp8_det, 0)));
    assert_false(kv_quality_better(quality(0, fp8_det, 0), quality(0, fast, 0)));
    assert_true(kv_quality_better(quality(0, fp8_det, 0), quality(0, fp8, 0)));

    assert_int_equal(kv_numerics_mixed(fp8_det, fp8_det), fp8_det);
    assert_int_equal(kv_numerics_mixed(KV_NUMERICS_CPU_V1, fp8_det), fp8);
    assert_int_equal(kv_numerics_mixed(KV_NUMERICS_CUDA_DET_V1_INT8, fast), int8);
    struct kv_quality q = kv_quality_worst(quality(KV_L0, fast, 0), quality(KV_L0, fp8, 0));
    assert_int_equal(q.numerics, fp8);
    assert_int_equal(q.fidelity, KV_L0);
    q = kv_quality_worst(quality(KV_L0, int8, 0), quality(KV_L0, fp8, 0)); /* pages of no kind lose both */
    assert_false(kv_quality_accepts(q, visible, int8) || kv_quality_accepts(q, visible, fp8));
}

static void test_quality_better_is_a_strict_order(void **state)
{
    (void)state;
    /* From best to worst; two deterministic numerics are equals. */
    const struct kv_quality best_first[] = {
        quality(KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD),
        quality(KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_DEVICE),
        quality(KV_L0, KV_NUMERICS_CUDA_FAST, KV_FROM_CLOUD),
        quality(KV_L0, KV_NUMERICS_CUDA_FAST, KV_FROM_DEVICE),
        quality(KV_L1, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD),
        quality(KV_L2, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD),
    };
    for (size_t a = 0; a < TD_COUNT(best_first); a++)
        for (size_t b = 0; b < TD_COUNT(best_first); b++)
            assert_int_equal(kv_quality_better(best_first[a], best_first[b]), a < b);
    assert_false(
        kv_quality_better(quality(0, KV_NUMERICS_CUDA_DET_V1, 0), quality(0, KV_NUMERICS_CPU_V1, 0)));
    assert_false(
        kv_quality_better(quality(0, KV_NUMERICS_CPU_V1, 0), quality(0, KV_NUMERICS_CUDA_DET_V1, 0)));
}

static void test_quality_worst(void **state)
{
    (void)state;
    struct kv_quality q = kv_quality_worst(quality(KV_L1, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD),
                                           quality(KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_DEVICE));
    assert_int_equal(q.fidelity, KV_L1);
    assert_int_equal(q.numerics, KV_NUMERICS_CPU_V1);
    assert_int_equal(q.provenance, KV_FROM_DEVICE);
    assert_int_equal(q.reserved, 0);
    q = kv_quality_worst(quality(0, KV_NUMERICS_CPU_V1, 0), quality(0, KV_NUMERICS_CUDA_DET_V1, 0));
    assert_int_equal(q.numerics, KV_NUMERICS_CUDA_FAST); /* a mixture repeats under neither */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout_hash_matches_vectors),
        cmocka_unit_test(test_layout_hash_depends_on_every_field),
        cmocka_unit_test(test_chain_matches_vectors),
        cmocka_unit_test(test_principal_namespace_matches_vectors),
        cmocka_unit_test(test_layout_and_weights_enter_the_id),
        cmocka_unit_test(test_quality_accepts),
        cmocka_unit_test(test_quality_of_8bit_pages),
        cmocka_unit_test(test_quality_better_is_a_strict_order),
        cmocka_unit_test(test_quality_worst),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
