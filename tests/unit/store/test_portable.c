/* portable, bundle: sealed files, and stores that move in them. The key of a file is checked against Python's hashlib; a bundle by what the
 * other store then finds under ids that are computed here anew. */
#include "store_fixture.h"
#include "shared/log.h"
#include "store/bundle.h"
#include "store/conversation.h"
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define WORDS "a long line of words"
enum { ITERATIONS = 3, BLOCKS = 4 };

static char *directory;

static const char *in_directory(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static int set_up(void **state)
{
    (void)state;
    directory = fixture_directory();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    fixture_remove(directory);
    return 0;
}

/* ---- files ---------------------------------------------------------------------------------------------------- */

/* hashlib.pbkdf2_hmac("sha256", sha256(WORDS).digest(), bytes(range(32)), 1000) */
static void test_key(void **state)
{
    (void)state;
    uint8_t salt[32], key[32];
    char hex[65];
    for (uint8_t i = 0; i < 32; i++)
        salt[i] = i;
    portable_key(WORDS, salt, 1000, key);
    hex_encode(key, sizeof key, hex);
    assert_string_equal(hex, "8ce5623b594686565faa0a475e5e1557472bef8e9338d528a5746747ad531b6d");
}

static void write_file(const char *name)
{
    struct portable *p;
    struct td_error err = {0};
    assert_int_equal(portable_create_with(in_directory(name), WORDS, ITERATIONS, &p, &err), 0);
    assert_int_equal(portable_write(p, "first frame", 11, &err), 0);
    assert_int_equal(portable_write(p, "", 0, &err), 0);
    assert_int_equal(portable_write(p, "third", 5, &err), 0);
    assert_int_equal(portable_finish(p, &err), 0);
}

/* Read all of it: 0, or the first error. The text of frames that were given out must be right. */
static int read_file(const char *name, const char *words, int *frames)
{
    static const char *const texts[] = {"first frame", "", "third"};
    struct portable *p;
    struct td_error err = {0};
    uint8_t *data;
    size_t size;
    int rc = portable_open(in_directory(name), words, &p, &err);
    *frames = 0;
    if (rc < 0)
        return rc;
    while ((rc = portable_read(p, &data, &size, &err)) > 0) {
        assert_true(*frames < 3);
        assert_int_equal(size, strlen(texts[*frames]));
        assert_memory_equal(data, texts[(*frames)++], size);
        free(data);
    }
    assert_true(rc == 0 || err.text[0]);
    portable_close(p);
    return rc;
}

static size_t slurp(const char *name, uint8_t *out, size_t capacity)
{
    FILE *f = fopen(in_directory(name), "rb");
    size_t size = fread(out, 1, capacity, f);
    fclose(f);
    return size;
}

static void spit(const char *name, const uint8_t *data, size_t size)
{
    FILE *f = fopen(in_directory(name), "wb");
    assert_int_equal(fwrite(data, 1, size, f), size);
    fclose(f);
}

static void test_file(void **state)
{
    (void)state;
    struct portable *p;
    struct td_error err = {0};
    struct stat st;
    uint8_t bytes[1024];
    int frames;
    write_file("file");
    assert_int_equal(stat(in_directory("file"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(read_file("file", WORDS, &frames), 0);
    assert_int_equal(frames, 3);
    assert_int_equal(read_file("file", "other words", &frames), -TD_ERR_CRYPTO);
    assert_null(memmem(bytes, slurp("file", bytes, sizeof bytes), "first", 5));
    assert_int_equal(portable_create_with(in_directory("file"), WORDS, ITERATIONS, &p, &err), -TD_ERR_EXISTS);
    assert_int_equal(read_file("file", WORDS, &frames), 0); /* is as it was */
    /* Given up: nothing is left. */
    assert_int_equal(portable_create_with(in_directory("half"), WORDS, ITERATIONS, &p, &err), 0);
    assert_int_equal(portable_write(p, "x", 1, &err), 0);
    portable_close(p);
    assert_int_equal(stat(in_directory("half"), &st), -1);
}

/* Whoever is killed in mid-export has made no export, and the next one finds its name free. */
static void test_killed_in_the_middle(void **state)
{
    (void)state;
    static uint8_t frame[1 << 20];
    struct stat st;
    int status, frames;
    pid_t child = fork();
    if (child == 0) {
        struct portable *p;
        struct td_error err = {0};
        if (portable_create_with(in_directory("killed"), WORDS, ITERATIONS, &p, &err) == 0 &&
            portable_write(p, frame, sizeof frame, &err) == 0)
            raise(SIGKILL);
        _exit(1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(stat(in_directory("killed"), &st), -1);
    write_file("killed");
    assert_int_equal(read_file("killed", WORDS, &frames), 0);
}

/* Any byte changed, any length cut: no error goes unnoticed, and no wrong text comes out. */
static void test_damage(void **state)
{
    (void)state;
    uint8_t bytes[1024], damaged[1024];
    int frames;
    write_file("file");
    size_t size = slurp("file", bytes, sizeof bytes);
    for (size_t i = 0; i < size; i++) {
        if (i >= 40 && i < 44)
            continue; /* iterations: another number of them, perhaps ten million */
        memcpy(damaged, bytes, size);
        damaged[i] ^= 0x01;
        spit("damaged", damaged, size);
        assert_true(read_file("damaged", WORDS, &frames) < 0);
        spit("damaged", bytes, i);
        assert_true(read_file("damaged", WORDS, &frames) < 0);
    }
    memcpy(damaged, bytes, size);
    damaged[40] ^= 1;
    spit("damaged", damaged, size);
    assert_int_equal(read_file("damaged", WORDS, &frames), -TD_ERR_CRYPTO);
    store_le32(damaged + 40, PORTABLE_ITERATIONS_MAX + 1);
    spit("damaged", damaged, size);
    assert_int_equal(read_file("damaged", WORDS, &frames), -TD_ERR_FORMAT);
    /* Two frames that change places. */
    memcpy(damaged, bytes, size);
    size_t first = 64, second = first + 8 + 11 + 16, third = second + 8 + 16;
    memcpy(damaged + first, bytes + second, third - second);
    memcpy(damaged + first + (third - second), bytes + first, second - first);
    spit("damaged", damaged, size);
    assert_int_equal(read_file("damaged", WORDS, &frames), -TD_ERR_CRYPTO);
    assert_int_equal(frames, 0);
}

/* ---- bundles -------------------------------------------------------------------------------------------------- */

static const uint8_t fingerprint[TD_HASH_SIZE] = {0xf1}, layout[TD_HASH_SIZE] = {0x1a};

static struct conversation make_conversation(const char *id, int32_t salt)
{
    struct conversation c = {.ids_count = BLOCKS * KV_BLOCK_TOKENS + 5, .boundary_count = 1};
    strcpy(c.id, id);
    c.ids = malloc(c.ids_count * sizeof *c.ids);
    for (uint32_t i = 0; i < c.ids_count; i++)
        c.ids[i] =
            (int32_t)i < KV_BLOCK_TOKENS ? (int32_t)i : (int32_t)i + salt; /* the first block is shared */
    c.boundaries = calloc(1, sizeof *c.boundaries);
    c.boundaries[0].ids_count = c.ids_count;
    return c;
}

static void put_conversation(struct store *s, const char *tenant, const char *principal,
                             const struct conversation *c)
{
    uint8_t *body;
    size_t size;
    struct fixture_done d = {0, 1};
    assert_int_equal(conv_serialise(c, &body, &size), 0);
    assert_int_equal(store_conv_put(s, tenant, principal, c->id, 0, body, size, fixture_on_done, &d), 0);
    store_flush(s);
    assert_int_equal(d.status, 0);
    free(body);
}

/* The chain of a conversation at a store, anew. own: the principal's namespace. */
static void chain_of(struct store *s, const char *tenant, const char *principal, bool own,
                     const struct conversation *c, struct kv_block_id ids[BLOCKS])
{
    uint8_t chain[32], key[32];
    struct td_error err = {0};
    struct kv_block_id parent = {{0}};
    assert_int_equal(store_chain_key(s, tenant, chain, &err), 0);
    kv_principal_key(chain, principal, key);
    for (int i = 0; i < BLOCKS; i++) {
        kv_block_id_next(own ? key : chain, &parent, fingerprint, layout, c->ids + 64 * i, &ids[i]);
        parent = ids[i];
    }
}

static void put_block(struct store *s, const char *tenant, const struct kv_block_id *id, uint64_t index,
                      struct kv_quality quality)
{
    struct fixture_block f;
    fixture_block_of(&f, index, quality, 0, FIXTURE_LAYERS);
    f.id = f.block.id = *id;
    assert_int_equal(fixture_put(s, tenant, &f), 0);
}

static bool has_block(struct store *s, const char *tenant, const struct kv_block_id *id, uint64_t index,
                      struct kv_quality quality)
{
    struct fixture_block f;
    struct store_block_info info;
    fixture_block_of(&f, index, quality, 0, FIXTURE_LAYERS);
    f.id = *id;
    return store_find(s, tenant, id, &info) == 0 && memcmp(&info.quality, &quality, sizeof quality) == 0 &&
           fixture_block_reads(s, tenant, &f);
}

static const struct kv_quality from_device = {KV_L1, KV_NUMERICS_CPU_V1, KV_FROM_DEVICE, 0};

struct watched { /* progress: it never runs backwards, and ends at its total */
    int calls;
    uint64_t done, total;
};
static void watch(void *ctx, uint64_t done, uint64_t total)
{
    struct watched *w = ctx;
    assert_true(done > 0 && done <= total);
    assert_true(w->calls++ == 0 || done * w->total >= w->done * total);
    w->done = done;
    w->total = total;
}

static int export_to(struct store *s, const char *name, const char *principal, struct bundle_counts *n)
{
    struct portable *p;
    struct td_error err = {0};
    assert_int_equal(portable_create_with(in_directory(name), WORDS, ITERATIONS, &p, &err), 0);
    struct watched w = {0};
    int rc = bundle_export(s, "acme", principal, fingerprint, layout, p, &(struct bundle_progress){watch, &w},
                           n, &err);
    if (rc == 0) {
        assert_true(w.calls > 1 && w.done == w.total);
        return portable_finish(p, &err);
    }
    portable_close(p);
    return rc;
}

static int import_as(struct store *s, const char *name, const char *tenant, const char *principal,
                     bool trusted, struct bundle_counts *n)
{
    struct portable *p;
    struct td_error err = {0};
    assert_int_equal(portable_open(in_directory(name), WORDS, &p, &err), 0);
    struct watched w = {0};
    int rc = bundle_import(s, tenant, principal, trusted, p, &(struct bundle_progress){watch, &w}, n, &err);
    assert_true(rc == 0 ? w.calls > 1 && w.done == w.total : err.text[0]);
    portable_close(p);
    return rc;
}

static int import_from(struct store *s, const char *name, const char *tenant, const char *principal,
                       struct bundle_counts *n)
{
    return import_as(s, name, tenant, principal, true, n);
}

static void test_bundle(void **state)
{
    (void)state;
    char *here = fixture_directory(), *there = fixture_directory();
    struct store_config config = fixture_config(here), other = fixture_config(there);
    memset(other.master_key, 8, sizeof other.master_key);
    struct store *a = fixture_open(&config), *b = fixture_open(&other);
    struct conversation one = make_conversation("one", 1), two = make_conversation("two", 2);
    struct kv_block_id shared[BLOCKS], own[BLOCKS], second[BLOCKS], ids[BLOCKS];
    struct bundle_counts n;
    put_conversation(a, "acme", "ann", &one);
    put_conversation(a, "acme", "ann", &two);
    put_conversation(a, "acme", "bob", &one);
    chain_of(a, "acme", "ann", false, &one, shared);
    chain_of(a, "acme", "ann", true, &one, own);
    chain_of(a, "acme", "ann", false, &two, second);
    for (uint64_t i = 0; i < BLOCKS; i++)
        if (i != 2) /* a gap */
            put_block(a, "acme", &shared[i], i, quality_exact);
    put_block(a, "acme", &own[1], 1, from_device);
    put_block(a, "acme", &second[3], 3, quality_lossy);
    put_block(a, "other", &second[1], 1, quality_exact); /* another tenant's of the same id: not ours */

    assert_int_equal(export_to(a, "none", "nobody", &n), -TD_ERR_NOTFOUND);
    assert_int_equal(access(in_directory("none"), F_OK), -1);
    assert_int_equal(export_to(a, "bundle", "ann", &n), 0);
    assert_int_equal(n.conversations, 2);
    assert_int_equal(n.blocks, 5); /* the first one, which both have, once */

    assert_int_equal(import_from(b, "bundle", "other", "", &n), -TD_ERR_MISMATCH);
    assert_int_equal(import_from(b, "bundle", "acme", "bob", &n), -TD_ERR_MISMATCH);
    assert_int_equal(import_from(b, "bundle", "", "", &n), 0);
    assert_true(n.conversations == 2 && n.blocks == 5 && n.kept == 0);
    chain_of(b, "acme", "ann", false, &one, ids);
    assert_memory_not_equal(ids, shared, sizeof ids); /* the keys differ, so do the names */
    for (uint64_t i = 0; i < BLOCKS; i++)
        assert_int_equal(has_block(b, "acme", &ids[i], i, quality_exact), i != 2);
    chain_of(b, "acme", "ann", true, &one, ids);
    assert_true(has_block(b, "acme", &ids[1], 1, from_device)); /* as little trusted as before */
    assert_false(has_block(b, "acme", &ids[0], 0, quality_exact));
    chain_of(b, "acme", "ann", false, &two, ids);
    assert_true(has_block(b, "acme", &ids[3], 3, quality_lossy));
    assert_false(has_block(b, "acme", &ids[1], 1, quality_exact));
    chain_of(b, "other", "ann", false, &one, ids);
    assert_false(has_block(b, "other", &ids[0], 0, quality_exact));
    uint64_t version;
    char *text = fixture_conv_get(b, "acme", "ann", "two", &version);
    assert_non_null(text);
    free(text);
    assert_null(fixture_conv_get(b, "acme", "bob", "one", &version));

    assert_int_equal(import_from(b, "bundle", "acme", "ann", &n), 0); /* again: nothing changes */
    assert_true(n.conversations == 0 && n.kept == 2);
    struct store_stats stats;
    store_stats(b, &stats);
    assert_true(stats.blocks == 5 && stats.conversations == 2);
    store_close(a);
    store_close(b);
    conv_free(&one);
    conv_free(&two);
    fixture_remove(here);
    fixture_remove(there);
}

/* Who knows the words can call any block the cloud's and anybody's. Without the operator's word for it, it is the principal's own. */
static void test_claims_of_a_bundle_are_not_believed(void **state)
{
    (void)state;
    static const struct kv_quality device_exact = {KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_DEVICE, 0},
                                   device_lossy = {KV_L1, KV_NUMERICS_CPU_V1, KV_FROM_DEVICE, 0};
    char *here = fixture_directory(), *there = fixture_directory();
    struct store_config config = fixture_config(here), other = fixture_config(there);
    struct store *a = fixture_open(&config), *b = fixture_open(&other);
    struct conversation one = make_conversation("one", 1);
    struct kv_block_id shared[BLOCKS], own[BLOCKS];
    struct store_block_info info;
    struct bundle_counts n;
    put_conversation(a, "acme", "ann", &one);
    chain_of(a, "acme", "ann", false, &one, shared);
    for (uint64_t i = 0; i < BLOCKS; i++)
        put_block(a, "acme", &shared[i], i, i == 1 ? quality_lossy : quality_exact);
    assert_int_equal(export_to(a, "claims", "ann", &n), 0);
    assert_int_equal(import_as(b, "claims", "acme", "ann", false, &n), 0);
    assert_true(n.conversations == 1 && n.blocks == BLOCKS);
    chain_of(b, "acme", "ann", false, &one, shared);
    chain_of(b, "acme", "ann", true, &one, own);
    for (uint64_t i = 0; i < BLOCKS; i++) {
        const struct kv_quality *expected = i == 1 ? &device_lossy : &device_exact;
        assert_int_equal(store_find(b, "acme", &shared[i], &info), -TD_ERR_NOTFOUND);
        assert_int_equal(store_find(b, "acme", &own[i], &info), 0);
        assert_memory_equal(&info.quality, expected, sizeof *expected);
    }
    chain_of(b, "acme", "bob", true, &one, own);
    assert_int_equal(store_find(b, "acme", &own[0], &info), -TD_ERR_NOTFOUND);
    store_close(a);
    store_close(b);
    conv_free(&one);
    fixture_remove(here);
    fixture_remove(there);
}

/* Whoever knows the words can seal anything: what is in such a file is hostile all the same. */
static void test_hostile_bundle(void **state)
{
    (void)state;
    static const char head[] =
        "{\"format\":\"tandem-store\",\"version\":1,\"tenant\":\"acme\",\"principal\":\"ann\","
        "\"fingerprint\":\""
        "f100000000000000000000000000000000000000000000000000000000000000"
        "\",\"layout\":\""
        "1a00000000000000000000000000000000000000000000000000000000000000"
        "\"}";
    static const struct {
        const char *data;
        size_t size;
    } frames[] = {{"", 0},
                  {"X", 1},
                  {"C", 1},
                  {"Cnonsense", 9},
                  {"B", 1},
                  {"B\0\0\0\0\0\0\0\0\1\0\0\0\0\1\0", 16},
                  {"B\7\0\0\0\0\0\0\0\1\0\0\0\0\1\0", 16},
                  {"B\0\0\0\0\0\0\0\0\1\0\0\0\0\xff\xff", 16}};
    char *there = fixture_directory();
    struct store_config config = fixture_config(there);
    struct store *s = fixture_open(&config);
    struct bundle_counts n;
    struct td_error err = {0};
    for (size_t i = 0; i < TD_COUNT(frames); i++) {
        struct portable *p;
        char name[16];
        snprintf(name, sizeof name, "hostile%zu", i);
        assert_int_equal(portable_create_with(in_directory(name), WORDS, ITERATIONS, &p, &err), 0);
        assert_int_equal(portable_write(p, head, sizeof head - 1, &err), 0);
        assert_int_equal(portable_write(p, frames[i].data, frames[i].size, &err), 0);
        assert_int_equal(portable_finish(p, &err), 0);
        assert_true(import_from(s, name, "", "", &n) < 0);
    }
    struct store_stats stats;
    store_stats(s, &stats);
    assert_true(stats.blocks == 0 && stats.conversations == 0);
    store_close(s);
    fixture_remove(there);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_key),
        cmocka_unit_test_setup_teardown(test_file, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_killed_in_the_middle, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_damage, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_bundle, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_claims_of_a_bundle_are_not_believed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_hostile_bundle, set_up, tear_down),
    };
    crypto_init();
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
