/* kv_seal: what a cloud has sealed comes back as it was or not at all, and under the name that it was sealed with. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <cmocka.h>
#include "shared/kv_codec.h"
#include "shared/kv_seal.h"

#define PIECE_MAX 8192

static uint8_t master[CRYPTO_KEY_SIZE], salt[KV_SEAL_SALT_SIZE], fingerprint[TD_HASH_SIZE],
    layout[TD_HASH_SIZE];
static int32_t ids[2 * KV_BLOCK_TOKENS];

static int set_up(void **state)
{
    (void)state;
    for (size_t i = 0; i < 32; i++) {
        master[i] = (uint8_t)(3 * i + 5);
        salt[i] = (uint8_t)(7 * i + 1);
    }
    memset(fingerprint, 0x5a, sizeof fingerprint);
    memset(layout, 0xa5, sizeof layout);
    for (int32_t i = 0; i < (int32_t)TD_COUNT(ids); i++)
        ids[i] = i;
    return crypto_init();
}

static struct kv_seal seal_of(const uint8_t key[CRYPTO_KEY_SIZE])
{
    struct kv_seal s;
    kv_seal_derive(key, &s);
    return s;
}

/* Of the second of two blocks. */
static struct kv_block_id name_of(const struct kv_seal *s, const char *tenant, const char *principal)
{
    uint8_t key[CRYPTO_KEY_SIZE];
    struct kv_block_id first, second, root = {{0}};
    kv_seal_name_key(s, tenant, principal, key);
    kv_block_id_next(key, &root, fingerprint, layout, ids, &first);
    kv_block_id_next(key, &first, fingerprint, layout, ids + KV_BLOCK_TOKENS, &second);
    return second;
}

static size_t load(const char *name, uint8_t *bytes)
{
    char path[512];
    snprintf(path, sizeof path, "%s/kv/%s", TEST_DATA, name);
    FILE *f = fopen(path, "rb");
    if (!f)
        fail_msg("cannot open %s", path);
    size_t size = fread(bytes, 1, PIECE_MAX, f);
    fclose(f);
    return size;
}

static size_t make_piece(uint8_t *out)
{
    static const uint16_t values[8] = {0x3c00, 0xbc00, 1, 2, 3, 4, 5, 6};
    struct kv_shape shape = {4, 1, 4};
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    struct kv_piece_head head = {.codec = KV_L0,
                                 .is_value = 1,
                                 .quality = {KV_L1, KV_NUMERICS_CUDA_DET_V1, KV_FROM_DEVICE, 0},
                                 .block_index = 1,
                                 .token_count = 2,
                                 .layer = 3,
                                 .kv_head_count = 1,
                                 .head_dim = 4};
    int64_t size = kv_piece_encode(scratch, &head, values, out, PIECE_MAX);
    assert_true(size > 0);
    kv_codec_scratch_destroy(scratch);
    return (size_t)size;
}

static size_t make_sealed(const struct kv_seal *s, const struct kv_block_id *name, uint8_t *out)
{
    uint8_t piece[PIECE_MAX];
    size_t size = make_piece(piece);
    int64_t sealed = kv_seal_piece(s, salt, name, (struct span){piece, size}, out, PIECE_MAX);
    assert_int_equal(sealed, size + KV_SEAL_OVERHEAD);
    return (size_t)sealed;
}

/* What whoever takes sealed pieces does with bytes: are they a whole piece, and ours? */
static int64_t take(const struct kv_seal *s, const uint8_t *bytes, size_t size, struct kv_block_id *name,
                    uint8_t *out)
{
    struct kv_piece_head head;
    struct span payload;
    int rc = kv_piece_parse(bytes, size, &head, &payload);
    return rc < 0 ? rc : kv_seal_open(s, (struct span){bytes, size}, name, out);
}

static void test_golden(void **state)
{
    (void)state;
    uint8_t piece[PIECE_MAX], golden[PIECE_MAX], out[PIECE_MAX];
    size_t piece_size = load("raw.piece", piece), size = load("sealed.bin", golden);
    struct kv_seal s = seal_of(master);
    struct kv_block_id name = name_of(&s, "acme", "ann"), found;
    assert_int_equal(kv_seal_piece(&s, salt, &name, (struct span){piece, piece_size}, out, sizeof out), size);
    assert_memory_equal(out, golden, size);
    assert_int_equal(take(&s, golden, size, &found, out), piece_size);
    assert_memory_equal(out, piece, piece_size);
    assert_memory_equal(&found, &name, sizeof name);
}

/* The head says what it is to whoever only keeps it; nobody can decode it. */
static void test_head(void **state)
{
    (void)state;
    uint8_t sealed[PIECE_MAX];
    struct kv_seal s = seal_of(master);
    struct kv_block_id name = name_of(&s, "acme", "ann");
    size_t size = make_sealed(&s, &name, sealed);
    struct kv_piece_head head;
    struct span payload;
    assert_int_equal(kv_piece_parse(sealed, size, &head, &payload), 0);
    assert_int_equal(head.codec, KV_SEALED);
    assert_int_equal(head.layer, 3);
    assert_int_equal(head.is_value, 1);
    assert_int_equal(head.block_index, 1);
    assert_int_equal(head.quality.fidelity, KV_L1);
    assert_int_equal(head.quality.numerics, KV_NUMERICS_CUDA_DET_V1);
    struct kv_shape shape = {4, 1, 4};
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    uint16_t values[8];
    assert_int_equal(kv_piece_decode(scratch, &head, payload, values, TD_COUNT(values)), -TD_ERR_UNSUPPORTED);
    assert_int_equal(kv_piece_encode(scratch, &head, values, sealed, sizeof sealed), -TD_ERR_UNSUPPORTED);
    kv_codec_scratch_destroy(scratch);
}

/* Whichever bit is another, with its checksum made to fit or not. */
static void test_every_bit_counts(void **state)
{
    (void)state;
    uint8_t sealed[PIECE_MAX], bad[PIECE_MAX], out[PIECE_MAX];
    struct kv_seal s = seal_of(master);
    struct kv_block_id name = name_of(&s, "acme", "ann"), found;
    size_t size = make_sealed(&s, &name, sealed);
    for (size_t bit = 0; bit < 8 * size; bit++)
        for (int fits = 0; fits < 2; fits++) {
            memcpy(bad, sealed, size);
            bad[bit / 8] ^= (uint8_t)(1u << bit % 8);
            if (fits && bit / 8 >= 32 && bit / 8 < 36)
                continue;
            if (fits) {
                store_le32(bad + 32, 0);
                store_le32(bad + 32, crc32c(0, bad, size));
            }
            assert_true(take(&s, bad, size, &found, out) < 0);
        }
    for (size_t less = 1; less <= size; less++) {
        assert_true(take(&s, sealed, size - less, &found, out) < 0);
        assert_true(kv_seal_open(&s, (struct span){sealed, size - less}, &found, out) < 0);
    }
    uint8_t piece[PIECE_MAX];
    size_t plain = make_piece(piece); /* what was never sealed */
    assert_int_equal(kv_seal_open(&s, (struct span){piece, plain}, &found, out), -TD_ERR_FORMAT);
}

/* Under another master key nothing opens, and the tag says so beforehand. */
static void test_other_key(void **state)
{
    (void)state;
    uint8_t sealed[PIECE_MAX], out[PIECE_MAX], other[CRYPTO_KEY_SIZE];
    struct kv_seal s = seal_of(master);
    struct kv_block_id name = name_of(&s, "acme", "ann"), found;
    size_t size = make_sealed(&s, &name, sealed);
    memcpy(other, master, sizeof other);
    other[31] ^= 1;
    struct kv_seal t = seal_of(other);
    assert_int_equal(take(&t, sealed, size, &found, out), -TD_ERR_CRYPTO);
    assert_memory_not_equal(t.tag, s.tag, sizeof s.tag);
    assert_memory_not_equal(s.key, s.names, sizeof s.key);
}

/* The name is another one for everybody else, and for everything else. */
static void test_name_binds(void **state)
{
    (void)state;
    struct kv_seal s = seal_of(master);
    struct kv_block_id name = name_of(&s, "acme", "ann");
    static const char *const others[][2] = {
        {"acme", "bob"}, {"globex", "ann"}, {"acm", "eann"}, {"acmea", "nn"}, {"ann", "acme"}};
    for (size_t i = 0; i < TD_COUNT(others); i++) {
        struct kv_block_id other = name_of(&s, others[i][0], others[i][1]);
        assert_memory_not_equal(&other, &name, sizeof name);
    }
    uint8_t *const inputs[] = {fingerprint, layout, (uint8_t *)&ids[0], (uint8_t *)&ids[127]};
    for (size_t i = 0; i < TD_COUNT(inputs); i++) {
        inputs[i][0] ^= 1;
        struct kv_block_id other = name_of(&s, "acme", "ann");
        assert_memory_not_equal(&other, &name, sizeof name);
        inputs[i][0] ^= 1;
    }
}

static void test_room(void **state)
{
    (void)state;
    uint8_t piece[PIECE_MAX], out[PIECE_MAX];
    struct kv_seal s = seal_of(master);
    struct kv_block_id name = name_of(&s, "acme", "ann");
    size_t size = make_piece(piece);
    assert_int_equal(
        kv_seal_piece(&s, salt, &name, (struct span){piece, size}, out, size + KV_SEAL_OVERHEAD - 1),
        -TD_ERR_NOSPACE);
    assert_true(kv_seal_piece(&s, salt, &name, (struct span){piece, size - 1}, out, sizeof out) < 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),           cmocka_unit_test(test_head),
        cmocka_unit_test(test_every_bit_counts), cmocka_unit_test(test_other_key),
        cmocka_unit_test(test_name_binds),       cmocka_unit_test(test_room),
    };
    return cmocka_run_group_tests_name("kv_seal", tests, set_up, NULL);
}
