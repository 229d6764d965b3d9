/* crypto: published vectors (FIPS 180, RFC 4231, RFC 5869, the GCM specification), and values made with
 * OpenSSL 3 through Python's `cryptography` where the published ones do not fit this interface's fixed sizes.
 */
#define MBEDTLS_ALLOW_PRIVATE_ACCESS
#include "shared/gcm.h"
#include "shared/status.h"
#include <mbedtls/aes.h>
#include <mbedtls/gcm.h>
#include <mbedtls/ssl_ciphersuites.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

static void assert_hex(const uint8_t *data, size_t size, const char *expected)
{
    char text[512];
    assert_true(2 * size < sizeof text);
    hex_encode(data, size, text);
    assert_string_equal(text, expected);
}

static void fill_ascending(uint8_t *out, size_t size, uint8_t first)
{
    for (size_t i = 0; i < size; i++)
        out[i] = (uint8_t)(first + i);
}

static int set_up(void **state)
{
    (void)state;
    return crypto_init() == 0 && crypto_init() == 0 ? 0 : -1;
}

/* --- SHA-256: FIPS 180-4's examples --- */

static void test_sha256_vectors(void **state)
{
    (void)state;
    static const struct {
        const char *text, *digest;
    } cases[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
    };
    uint8_t digest[TD_HASH_SIZE];
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        sha256_once(cases[i].text, strlen(cases[i].text), digest);
        assert_hex(digest, sizeof digest, cases[i].digest);
    }
    struct sha256 h; /* a million times "a", in pieces that do not fit blocks */
    char piece[1000];
    memset(piece, 'a', sizeof piece);
    sha256_init(&h);
    for (int i = 0; i < 1000; i++) {
        sha256_update(&h, piece, 333);
        sha256_update(&h, NULL, 0);
        sha256_update(&h, piece + 333, 667);
    }
    sha256_final(&h, digest);
    assert_hex(digest, sizeof digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* --- HMAC: RFC 4231. Keys shorter than 32 bytes are padded with zeros, longer than 64 hashed: both as HMAC
 * itself does --- */

static void check_hmac(const void *key, size_t key_size, const char *text, const char *expected)
{
    uint8_t padded[CRYPTO_KEY_SIZE] = {0}, out[TD_HASH_SIZE];
    if (key_size > sizeof padded)
        sha256_once(key, key_size, padded);
    else
        memcpy(padded, key, key_size);
    size_t size = strlen(text), cut = size / 3;
    const struct span parts[] = {
        {(const uint8_t *)text, cut}, {NULL, 0}, {(const uint8_t *)text + cut, size - cut}};
    hmac_sha256(padded, parts, TD_COUNT(parts), out);
    assert_hex(out, sizeof out, expected);
}

static void test_hmac_vectors(void **state)
{
    (void)state;
    uint8_t key[131];
    memset(key, 0x0b, 20);
    check_hmac(key, 20, "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    check_hmac("Jefe", 4, "what do ya want for nothing?",
               "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof key);
    char text[51] = "";
    memset(text, 0xdd, 50);
    check_hmac(key, 20, text, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    check_hmac(key, 131, "Test Using Larger Than Block-Size Key - Hash Key First",
               "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    check_hmac(key, 131,
               "This is a test using a larger than block-size key and a larger than block-size data. The key "
               "needs to be "
               "hashed before being used by the HMAC algorithm.",
               "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

/* --- HKDF --- */

/* RFC 5869, case 1: its input key has 22 bytes, so the two steps are checked through HMAC, of which HKDF is
 * made. */
static void test_hkdf_steps_of_rfc5869(void **state)
{
    (void)state;
    uint8_t salt[CRYPTO_KEY_SIZE] = {0}, input[22], info[10], out[TD_HASH_SIZE];
    fill_ascending(salt, 13, 0);
    memset(input, 0x0b, sizeof input);
    fill_ascending(info, sizeof info, 0xf0);
    hmac_sha256(salt, &(struct span){input, sizeof input}, 1, out);
    assert_hex(out, sizeof out, "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5");
    uint8_t key[CRYPTO_KEY_SIZE];
    memcpy(key, out, sizeof key);
    hmac_sha256(key, (struct span[]){{info, sizeof info}, {(const uint8_t *)"\x01", 1}}, 2, out);
    assert_hex(out, sizeof out, "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf");
}

static void test_hkdf_against_openssl(void **state)
{
    (void)state;
    uint8_t key[CRYPTO_KEY_SIZE], salt[80], info[56], out[CRYPTO_KEY_SIZE];
    fill_ascending(key, sizeof key, 0);
    hkdf_sha256(key, NULL, 0, NULL, 0, out);
    assert_hex(out, sizeof out, "37ad29109f43265287804b674e2653d0a513718907f97fca97c95bded8104bbf");
    fill_ascending(salt, 32, 0x60);
    hkdf_sha256(key, salt, 32, "tandem record", 13, out);
    assert_hex(out, sizeof out, "6fe03b49561ad9d342801ac5483afa164719562aa37f62855ad093579815b0ce");
    fill_ascending(salt, sizeof salt, 0); /* longer than a hash block */
    fill_ascending(info, sizeof info, 200);
    hkdf_sha256(key, salt, sizeof salt, info, sizeof info, out);
    assert_hex(out, sizeof out, "a644f26e117b50632944d9ac7dd4a85d7d756ddee82c02742263d92a43a766b4");
}

/* --- GCM --- */

/* Test cases 13 and 14 of the GCM specification: key, nonce and text all zero. */
static void test_gcm_vectors_of_the_specification(void **state)
{
    (void)state;
    static const uint8_t zeros[CRYPTO_KEY_SIZE];
    uint8_t out[16], tag[CRYPTO_TAG_SIZE];
    assert_int_equal(gcm_seal(zeros, 0, NULL, 0, NULL, 0, NULL, tag), 0);
    assert_hex(tag, sizeof tag, "530f8afbc74536b9a963b4f1c4cb738b");
    assert_int_equal(gcm_open(zeros, 0, NULL, 0, NULL, 0, NULL, tag), 0);
    assert_int_equal(gcm_seal(zeros, 0, NULL, 0, zeros, 16, out, tag), 0);
    assert_hex(out, sizeof out, "cea7403d4d606b6e074ec5d3baf39d18");
    assert_hex(tag, sizeof tag, "d0d1c8a799996bf0265b98b5d48ab919");
}

static void test_gcm_against_openssl(void **state)
{
    (void)state;
    uint8_t key[CRYPTO_KEY_SIZE], data[50], out[50], tag[CRYPTO_TAG_SIZE];
    fill_ascending(key, sizeof key, 0);
    fill_ascending(data, sizeof data, 0);
    assert_int_equal(gcm_seal(key, 7, "block id and codec", 18, data, sizeof data, out, tag), 0);
    assert_hex(out, sizeof out,
               "eedacde9816cdd61d37ac100c00900b55224829d41ecce6e410997f7c5ec323847e5a47c059a901801a41a182240e"
               "46373af");
    assert_hex(tag, sizeof tag, "1ed3bdee370b6f21b9d1770c346e4e64");
    assert_int_equal(gcm_seal(key, 0xdeadbeef, NULL, 0, "tandemtandemtandem", 18, out, tag), 0);
    assert_hex(out, 18, "22985b70740680bf2d3850f770df3e9d75b1");
    assert_hex(tag, sizeof tag, "75186b2f2a39aa34ac2521ab29904691");
}

struct sealed {
    uint8_t key[CRYPTO_KEY_SIZE], text[300], tag[CRYPTO_TAG_SIZE], aad[20];
};

static int open_sealed(const struct sealed *s, uint32_t index, uint8_t *out)
{
    return gcm_open(s->key, index, s->aad, sizeof s->aad, s->text, sizeof s->text, out, s->tag);
}

#ifdef TANDEM_SODIUM
/* Twins: what one seals the other opens, the bytes are the same, and neither opens what was changed. */
static void test_gcm_engines_agree(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 15, 16, 17, 127, 128, 129, 255, 4096, 20001};
    static uint8_t in[20001], a[20001], b[20001], out[20001];
    uint8_t key[32], nonce[GCM_NONCE_SIZE], aad[300], tag_a[16], tag_b[16];
    if (!gcm_sodium.usable())
        skip();
    gcm_tls_use_sodium(false); /* gcm_mbedtls is mbedTLS's own */
    for (size_t i = 0; i < TD_COUNT(sizes) * 3; i++) {
        size_t size = sizes[i / 3], aad_size = i % 3 * 150;
        crypto_random(key, sizeof key);
        crypto_random(nonce, sizeof nonce);
        crypto_random(aad, sizeof aad);
        crypto_random(in, sizeof in);
        assert_int_equal(gcm_mbedtls.seal(key, nonce, aad, aad_size, in, size, a, tag_a), 0);
        assert_int_equal(gcm_sodium.seal(key, nonce, aad, aad_size, in, size, b, tag_b), 0);
        assert_memory_equal(a, b, size);
        assert_memory_equal(tag_a, tag_b, sizeof tag_a);
        assert_int_equal(gcm_mbedtls.open(key, nonce, aad, aad_size, b, size, out, tag_b), 0);
        assert_memory_equal(out, in, size);
        memcpy(out, a, size); /* in place, as records are opened */
        assert_int_equal(gcm_sodium.open(key, nonce, aad, aad_size, out, size, out, tag_a), 0);
        assert_memory_equal(out, in, size);
        tag_a[i % 16] ^= 1;
        assert_true(gcm_sodium.open(key, nonce, aad, aad_size, a, size, out, tag_a) < 0);
    }
    gcm_tls_use_sodium(true);
}

/* A record in parts, which TLS does not do and nothing takes from mbedTLS. */
static void seal_in_parts(mbedtls_gcm_context *gcm, const uint8_t nonce[GCM_NONCE_SIZE], const uint8_t *aad,
                          size_t aad_size, const uint8_t *in, size_t size, uint8_t *out, uint8_t tag[16])
{
    size_t written, more;
    assert_int_equal(mbedtls_gcm_starts(gcm, MBEDTLS_GCM_ENCRYPT, nonce, GCM_NONCE_SIZE), 0);
    assert_int_equal(mbedtls_gcm_update_ad(gcm, aad, aad_size), 0);
    assert_int_equal(mbedtls_gcm_update(gcm, in, size, out, size, &written), 0);
    assert_int_equal(mbedtls_gcm_finish(gcm, out + written, size - written, &more, tag, 16), 0);
    assert_int_equal(written + more, size);
}

/* What TLS calls for a record, with keys of both kinds: the same bytes as mbedTLS's own, in place too. */
static void test_records_of_tls(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 16, 100, 129, 1460, 16384};
    static uint8_t in[16384], expected[16384], out[16384], zeros[16384];
    uint8_t key[32], nonce[GCM_NONCE_SIZE], aad[13], tag[16], expected_tag[16];
    for (size_t i = 0; i < TD_COUNT(sizes) * 2; i++) {
        size_t size = sizes[i / 2];
        crypto_random(key, sizeof key), crypto_random(nonce, sizeof nonce);
        crypto_random(aad, sizeof aad), crypto_random(in, sizeof in);
        mbedtls_gcm_context gcm;
        mbedtls_gcm_init(&gcm);
        assert_int_equal(mbedtls_gcm_setkey(&gcm, MBEDTLS_CIPHER_ID_AES, key, i % 2 ? 256 : 128), 0);
        seal_in_parts(&gcm, nonce, aad, sizeof aad, in, size, expected, expected_tag);
        memcpy(out, in, size);
        assert_int_equal(mbedtls_gcm_crypt_and_tag(&gcm, MBEDTLS_GCM_ENCRYPT, size, nonce, sizeof nonce, aad,
                                                   sizeof aad, out, out, sizeof tag, tag),
                         0);
        assert_memory_equal(out, expected, size);
        assert_memory_equal(tag, expected_tag, sizeof tag);
        assert_int_equal(mbedtls_gcm_auth_decrypt(&gcm, size, nonce, sizeof nonce, aad, sizeof aad, tag,
                                                  sizeof tag, out, out),
                         0);
        assert_memory_equal(out, in, size);
        tag[i % 16] ^= 1;
        assert_int_equal(mbedtls_gcm_auth_decrypt(&gcm, size, nonce, sizeof nonce, aad, sizeof aad, tag,
                                                  sizeof tag, expected, out),
                         MBEDTLS_ERR_GCM_AUTH_FAILED);
        assert_memory_equal(out, zeros, size);
        mbedtls_gcm_free(&gcm);
    }
}

/* With a key of 256 bits it is libsodium that seals and opens: what mbedTLS alone needs of the context may be anything. */
static void test_records_of_tls_go_through_libsodium(void **state)
{
    (void)state;
    static const uint8_t key[32] = {1}, nonce[GCM_NONCE_SIZE] = {2}, in[100] = {3};
    uint8_t expected[sizeof in], out[sizeof in], expected_tag[16], tag[16];
    mbedtls_gcm_context gcm;
    if (!gcm_sodium.usable())
        skip();
    assert_int_equal(gcm_sodium.seal(key, nonce, NULL, 0, in, sizeof in, expected, expected_tag), 0);
    mbedtls_gcm_init(&gcm);
    assert_int_equal(mbedtls_gcm_setkey(&gcm, MBEDTLS_CIPHER_ID_AES, key, 256), 0);
    mbedtls_aes_context *aes = gcm.cipher_ctx.cipher_ctx;
    aes->buf[aes->rk_offset + sizeof key / 4] ^= 1; /* the third round key */
    for (int yes = 1; yes >= 0; yes--) {
        gcm_tls_use_sodium(yes);
        assert_int_equal(mbedtls_gcm_crypt_and_tag(&gcm, MBEDTLS_GCM_ENCRYPT, sizeof in, nonce, sizeof nonce,
                                                   NULL, 0, in, out, sizeof tag, tag),
                         0);
        assert_int_equal(memcmp(out, expected, sizeof out) == 0, yes);
        assert_int_equal(memcmp(tag, expected_tag, sizeof tag) == 0, yes);
        int opened = mbedtls_gcm_auth_decrypt(&gcm, sizeof in, nonce, sizeof nonce, NULL, 0, expected_tag,
                                              sizeof tag, expected, out);
        assert_int_equal(opened, yes ? 0 : MBEDTLS_ERR_GCM_AUTH_FAILED);
    }
    gcm_tls_use_sodium(true);
    mbedtls_gcm_free(&gcm);
}

static bool is_in(const int *suites, int suite)
{
    while (*suites && *suites != suite)
        suites++;
    return *suites != 0;
}

/* All that mbedTLS was built with (deploy/deps.sh), and first those that libsodium can do. */
static void test_suites_of_tls(void **state)
{
    (void)state;
    if (!gcm_sodium.usable())
        skip();
    const int *ours = mbedtls_ssl_list_ciphersuites();
    gcm_tls_use_sodium(false);
    const int *all = mbedtls_ssl_list_ciphersuites();
    gcm_tls_use_sodium(true);
    assert_ptr_not_equal(ours, all);
    assert_int_equal(ours[0], MBEDTLS_TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384);
    assert_int_equal(ours[1], MBEDTLS_TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384);
    for (size_t i = 0; ours[i] || all[i]; i++) {
        assert_true(is_in(all, ours[i]) && is_in(ours, all[i]));
        assert_non_null(mbedtls_ssl_ciphersuite_from_id(ours[i]));
    }
}
#endif

static void test_gcm_refuses_every_change(void **state)
{
    (void)state;
    static const uint8_t zeros[300];
    uint8_t plain[300], out[300];
    fill_ascending(plain, sizeof plain, 3);
    struct sealed good;
    assert_int_equal(crypto_random(&good, sizeof good), 0);
    memcpy(good.text, plain, sizeof plain);
    assert_int_equal(
        gcm_seal(good.key, 5, good.aad, sizeof good.aad, good.text, sizeof good.text, good.text, good.tag),
        0);
    assert_memory_not_equal(good.text, plain, sizeof plain);
    assert_int_equal(open_sealed(&good, 5, out), 0);
    assert_memory_equal(out, plain, sizeof plain);
    for (size_t i = 0; i < sizeof good; i++) { /* a bit of key, text, tag or aad */
        struct sealed bad = good;
        ((uint8_t *)&bad)[i] ^= (uint8_t)(1 << i % 8);
        memset(out, 0xee, sizeof out);
        assert_int_equal(open_sealed(&bad, 5, out), -TD_ERR_CRYPTO);
        assert_memory_equal(out, zeros, sizeof out);
    }
    memset(out, 0xee, sizeof out);
    assert_int_equal(open_sealed(&good, 4, out), -TD_ERR_CRYPTO);
    assert_memory_equal(out, zeros, sizeof out);
    assert_int_equal(open_sealed(&good, 5, good.text), 0); /* in place */
    assert_memory_equal(good.text, plain, sizeof plain);
}

/* --- the rest --- */

static void test_random_equal_wipe(void **state)
{
    (void)state;
    uint8_t a[300], b[300];
    memset(a, 0, sizeof a);
    assert_int_equal(crypto_random(a, sizeof a), 0);
    assert_int_equal(crypto_random(b, sizeof b), 0);
    assert_int_equal(crypto_random(NULL, 0), 0);
    assert_false(crypto_equal(a, b, sizeof a));
    size_t zero_count = 0;
    for (size_t i = 0; i < sizeof a; i++)
        zero_count += a[i] == 0;
    assert_true(zero_count < 30); /* filled to the end; 30 zeros of 300 are out of reach by chance */

    memcpy(b, a, sizeof b);
    assert_true(crypto_equal(a, b, sizeof a));
    assert_true(crypto_equal(NULL, NULL, 0));
    for (size_t i = 0; i < sizeof a; i += 13) {
        b[i] ^= 0x80;
        assert_false(crypto_equal(a, b, sizeof a));
        b[i] ^= 0x80;
    }
    crypto_wipe(a, 299);
    memset(b, 0, sizeof b);
    b[299] = a[299];
    assert_memory_equal(a, b, sizeof a);
    crypto_wipe(NULL, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sha256_vectors),
        cmocka_unit_test(test_hmac_vectors),
        cmocka_unit_test(test_hkdf_steps_of_rfc5869),
        cmocka_unit_test(test_hkdf_against_openssl),
        cmocka_unit_test(test_gcm_vectors_of_the_specification),
        cmocka_unit_test(test_gcm_against_openssl),
        cmocka_unit_test(test_gcm_refuses_every_change),
#ifdef TANDEM_SODIUM
        cmocka_unit_test(test_gcm_engines_agree),
        cmocka_unit_test(test_records_of_tls),
        cmocka_unit_test(test_records_of_tls_go_through_libsodium),
        cmocka_unit_test(test_suites_of_tls),
#endif
        cmocka_unit_test(test_random_equal_wipe),
    };
    return cmocka_run_group_tests_name("crypto", tests, set_up, NULL);
}
