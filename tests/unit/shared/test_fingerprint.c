/* fingerprint, slices and verification: fingerprints against golden/fingerprints.json (another implementation), the digest cache
 * used when and only when it belongs to the file, slices that show their model's fingerprint, and damage found. */
#include "gguf_build.h"
#include "shared/crypto.h"
#include <fcntl.h>
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char folder[] = "/tmp/td-fingerprint-XXXXXX";
static char model_path[96], sidecar_path[96], slice_path[96];

static int make_folder(void **state)
{
    (void)state;
    if (!mkdtemp(folder))
        return -1;
    snprintf(model_path, sizeof model_path, "%s/m.gguf", folder);
    snprintf(sidecar_path, sizeof sidecar_path, "%s/m.gguf.digests", folder);
    snprintf(slice_path, sizeof slice_path, "%s/s.gguf", folder);
    return 0;
}

static int empty_folder(void **state)
{
    (void)state;
    char sidecar[128];
    snprintf(sidecar, sizeof sidecar, "%s.digests", slice_path);
    chmod(folder, 0700);
    unlink(model_path);
    unlink(sidecar_path);
    unlink(slice_path);
    unlink(sidecar);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    return rmdir(folder); /* fails if anything was left behind, a temporary file for one */
}

static uint8_t *read_file(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *size = (size_t)ftell(f);
    rewind(f);
    uint8_t *data = malloc(*size + 1);
    assert_int_equal(fread(data, 1, *size, f), *size);
    fclose(f);
    return data;
}

static void write_file(const char *path, const void *data, size_t size)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    fclose(f);
}

/* A model of three layers with one tensor of every role; `salt` changes one weight, `name` a key that does not count. */
static void write_model(uint8_t salt, const char *name, uint32_t alignment)
{
    struct gguf_build b = {.alignment = alignment};
    float weights[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    static const char *const tensors[] = {
        "token_embd.weight",   "rope_freqs.weight",    "blk.0.attn_q.weight", "blk.1.attn_q.weight",
        "blk.2.attn_q.weight", "blk.10.attn_q.weight", "output_norm.weight",  "output.weight"};
    key_string(&b, "general.architecture", "llama");
    key_string(&b, "general.name", name);
    key_u32(&b, "llama.block_count", 11);
    key_strings(&b, "tokenizer.ggml.tokens", (const char *const[]){"a", "b"}, 2);
    for (size_t i = 0; i < TD_COUNT(tensors); i++) {
        weights[0] = (float)i;
        if (i == 3)
            weights[7] += salt;
        tensor(&b, tensors[i], GGUF_F32, 4, 2, weights, sizeof weights);
    }
    struct bytes file = gguf_build_end(&b);
    write_file(model_path, file.data, file.size);
    free(file.data);
}

static struct gguf *open_model(const char *path)
{
    struct gguf *g;
    struct td_error err = {0};
    int rc = gguf_open(path, &g, &err);
    assert_string_equal(err.text, "");
    assert_int_equal(rc, 0);
    return g;
}

static void fingerprint_of(const char *path, char out[2 * TD_HASH_SIZE + 1])
{
    uint8_t hash[TD_HASH_SIZE];
    struct td_error err = {0};
    struct gguf *g = open_model(path);
    assert_int_equal(gguf_fingerprint(g, hash, NULL, NULL, &err), 0);
    hex_encode(hash, sizeof hash, out);
    gguf_close(g);
}

static void test_golden(void **state)
{
    (void)state;
    json_error_t error;
    json_t *golden = json_load_file(TEST_DATA "/fingerprints.json", 0, &error), *want;
    const char *name;
    size_t compared = 0;
    assert_non_null(golden);
    json_object_foreach(golden, name, want)
    {
        char path[512], got[2 * TD_HASH_SIZE + 1];
        size_t size;
        snprintf(path, sizeof path, "%s/tiny/%s", TEST_DATA, name);
        if (access(path, R_OK) != 0) /* the real model is no part of the repository */
            continue;
        uint8_t *data = read_file(path, &size);
        write_file(model_path, data, size); /* a copy, so that no sidecar appears among the golden files */
        free(data);
        for (int round = 0; round < 2; round++) { /* computed, then from the sidecar */
            fingerprint_of(model_path, got);
            assert_string_equal(got, json_string_value(want));
        }
        unlink(sidecar_path);
        compared++;
    }
    json_decref(golden);
    assert_true(compared >= 10);
}

static void test_what_counts(void **state)
{
    (void)state;
    char first[65], other[65];
    write_model(0, "one name", 0);
    fingerprint_of(model_path, first);
    write_model(0, "another name", 64);
    unlink(sidecar_path);
    fingerprint_of(model_path, other);
    assert_string_equal(first, other);
    write_model(1, "one name", 0); /* one weight differs; same size, maybe the same time */
    unlink(sidecar_path);
    fingerprint_of(model_path, other);
    assert_string_not_equal(first, other);
}

/* Change a digest in the sidecar; with the sum made right again it is a sidecar that lies, and shows whether it is read. */
static void tamper_sidecar(bool fix_sum)
{
    size_t size;
    uint8_t *data = read_file(sidecar_path, &size);
    assert_int_equal(size, 48 + 8 * 32 + 32); /* FINGERPRINT.md */
    assert_memory_equal(data, "TDGD\2\0\0\0", 8);
    data[48] ^= 1;
    if (fix_sum)
        sha256_once(data, size - 32, data + size - 32);
    write_file(sidecar_path, data, size);
    free(data);
}

static void test_sidecar_belongs_to_one_file(void **state)
{
    (void)state;
    char truth[65], got[65];
    struct stat st;
    write_model(0, "m", 0);
    fingerprint_of(model_path, truth);
    assert_int_equal(stat(sidecar_path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0644);
    tamper_sidecar(false); /* damaged: not used, and replaced */
    fingerprint_of(model_path, got);
    assert_string_equal(got, truth);
    tamper_sidecar(true);
    fingerprint_of(model_path, got);
    assert_string_not_equal(got, truth); /* the control: a whole one is used */
    struct timespec times[2] = {{1, 0}, {1, 5}};
    assert_int_equal(utimensat(AT_FDCWD, model_path, times, 0), 0);
    fingerprint_of(model_path, got); /* other time: not used */
    assert_string_equal(got, truth);
    tamper_sidecar(true);
    char moved[128];
    snprintf(moved, sizeof moved, "%s.new", model_path);
    size_t size;
    uint8_t *data = read_file(model_path, &size);
    write_file(moved, data, size); /* same bytes and time, other inode */
    free(data);
    assert_int_equal(utimensat(AT_FDCWD, moved, times, 0), 0);
    assert_int_equal(rename(moved, model_path), 0);
    fingerprint_of(model_path, got);
    assert_string_equal(got, truth);
    data = read_file(sidecar_path, &size);
    write_file(sidecar_path, data, size - 1); /* cut short */
    fingerprint_of(model_path, got);
    assert_string_equal(got, truth);
    data = realloc(data, size + 1);
    data[size] = 0;
    write_file(sidecar_path, data, size + 1); /* something behind it */
    free(data);
    fingerprint_of(model_path, got);
    assert_string_equal(got, truth);
}

/* Other weights of the same size at the same place, once more with the time of those before; clocks of files are coarse. */
static void write_over(uint8_t salt, bool hide)
{
    struct stat before, after;
    assert_int_equal(stat(model_path, &before), 0);
    struct timespec times[2] = {before.st_atim, before.st_mtim};
    do {
        write_model(salt, "m", 0);
        assert_int_equal(stat(model_path, &after), 0);
    } while (after.st_ctim.tv_sec == before.st_ctim.tv_sec &&
             after.st_ctim.tv_nsec == before.st_ctim.tv_nsec);
    if (hide)
        assert_int_equal(utimensat(AT_FDCWD, model_path, times, 0), 0);
}

static void test_sidecar_of_what_was_written_over(void **state)
{
    (void)state;
    char first[65], second[65], got[65];
    write_model(0, "m", 0);
    fingerprint_of(model_path, first);
    write_over(1, true);
    fingerprint_of(model_path, got);
    unlink(sidecar_path);
    fingerprint_of(model_path, second);
    assert_string_equal(got, second);
    assert_string_not_equal(got, first);
}

static struct gguf *open_hashed(void)
{
    uint8_t hash[TD_HASH_SIZE];
    write_model(0, "m", 0);
    struct gguf *g = open_model(model_path);
    assert_int_equal(gguf_fingerprint(g, hash, NULL, NULL, NULL), 0);
    assert_true(gguf_intact(g));
    return g;
}

static void test_a_file_in_use_is_written_into(void **state)
{
    (void)state;
    struct timespec times[2] = {{1, 0}, {1, 5}};
    struct gguf *g = open_hashed();
    assert_int_equal(utimensat(AT_FDCWD, model_path, times, 0), 0);
    assert_true(gguf_intact(g)); /* the same bytes at another time */
    write_over(1, false);
    assert_false(gguf_intact(g));
    write_over(0, false);
    assert_false(gguf_intact(g)); /* what was computed meanwhile is not made good */
    gguf_close(g);

    g = open_hashed();
    assert_int_equal(truncate(model_path, 10), 0);
    assert_false(gguf_intact(g)); /* and nothing of it is read, which would be the end */
    gguf_close(g);

    write_model(0, "m", 0);
    unlink(sidecar_path);
    g = open_model(model_path);
    assert_int_equal(utimensat(AT_FDCWD, model_path, times, 0), 0);
    assert_false(gguf_intact(g)); /* never hashed: nothing to compare with */
    gguf_close(g);
}

static void test_works_without_sidecar(void **state)
{
    (void)state;
    char truth[65], got[65];
    write_model(0, "m", 0);
    fingerprint_of(model_path, truth);
    unlink(sidecar_path);
    assert_int_equal(mkdir(sidecar_path, 0700), 0); /* cannot be replaced by a file, even by root */
    fingerprint_of(model_path, got);
    rmdir(sidecar_path);
    assert_string_equal(got, truth);
}

struct watch {
    uint64_t done, total;
    size_t calls;
};

static void watch_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct watch *w = ctx;
    assert_true(done >= w->done && done <= total && total > 0);
    assert_true(w->calls == 0 || total == w->total);
    w->done = done, w->total = total;
    w->calls++;
}

static void cut(uint32_t layer_end)
{
    struct gguf *g = open_model(model_path);
    struct td_error err = {0};
    struct watch w = {0};
    int rc = gguf_slice(g, layer_end, slice_path, watch_progress, &w, &err);
    assert_string_equal(err.text, "");
    assert_int_equal(rc, 0);
    assert_true(w.calls > 0 && w.done == w.total);
    gguf_close(g);
}

static void test_slice_shows_the_model(void **state)
{
    (void)state;
    char model[65], slice[65];
    static const uint32_t ends[] = {1, 2, 3, 10, 11};
    write_model(0, "m", 64);
    fingerprint_of(model_path, model);
    struct gguf *g = open_model(model_path);
    for (size_t i = 0; i < TD_COUNT(ends); i++) {
        cut(ends[i]);
        fingerprint_of(slice_path, slice);
        assert_string_equal(slice, model);
        struct gguf *s = open_model(slice_path);
        struct td_error err = {0};
        assert_int_equal(gguf_layers_held(s), ends[i]);
        assert_int_equal(gguf_tensor_count(s), gguf_tensor_count(g));
        assert_int_equal(gguf_verify(s, NULL, NULL, &err), 0);
        for (size_t t = 0; t < gguf_tensor_count(g); t++) {
            const struct gguf_tensor *whole = gguf_tensor_at(g, t), *part = gguf_tensor_at(s, t);
            char name[32] = {0};
            memcpy(name, whole->name.data, whole->name.size);
            unsigned layer = 0;
            bool last = strncmp(name, "output", 6) == 0, in_layer = sscanf(name, "blk.%u.", &layer) == 1;
            bool wanted = last ? ends[i] == 11 : !in_layer || layer < ends[i];
            assert_true(part->size == whole->size && part->type == whole->type &&
                        part->dim_count == whole->dim_count);
            assert_ptr_equal(gguf_tensor(s, name), part);
            assert_true((part->data != NULL) == wanted);
            if (wanted)
                assert_memory_equal(part->data, whole->data, whole->size);
        }
        assert_true(gguf_find(s, "general.name") && gguf_find(s, "tokenizer.ggml.tokens"));
        gguf_close(s);
    }
    gguf_close(g);
}

static void test_slice_of_a_slice(void **state)
{
    (void)state;
    char model[65], slice[65];
    write_model(0, "m", 0);
    fingerprint_of(model_path, model);
    cut(3);
    assert_int_equal(rename(slice_path, model_path), 0);
    cut(2);
    fingerprint_of(slice_path, slice);
    assert_string_equal(slice, model);
    struct gguf *s = open_model(slice_path);
    assert_int_equal(gguf_layers_held(s), 2);
    assert_null(gguf_tensor(s, "blk.2.attn_q.weight")->data);
    gguf_close(s);
    struct gguf *g = open_model(model_path);
    struct td_error err = {0};
    assert_int_equal(gguf_slice(g, 4, slice_path, NULL, NULL, &err), -TD_ERR_NOTFOUND);
    assert_non_null(strstr(err.text, "slice of 3 layers"));
    gguf_close(g);
}

static void test_slice_refuses(void **state)
{
    (void)state;
    struct td_error err = {0};
    write_model(0, "m", 0);
    struct gguf *g = open_model(model_path);
    assert_int_equal(gguf_slice(g, 0, slice_path, NULL, NULL, &err), -TD_ERR_ARG);
    assert_int_equal(gguf_slice(g, 12, slice_path, NULL, NULL, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "give 1 to 11"));
    assert_int_equal(gguf_slice(g, 2, model_path, NULL, NULL, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "onto itself"));
    assert_int_equal(gguf_slice(g, 2, "/nonexistent/s.gguf", NULL, NULL, &err), -TD_ERR_IO);
    assert_non_null(strstr(err.text, "/nonexistent/s.gguf"));
    assert_int_equal(access(slice_path, F_OK), -1);
    if (access("/dev/full", W_OK) == 0) { /* the temporary name leads to a device that is always full */
        char temporary[160];
        snprintf(temporary, sizeof temporary, "%s.tmp.%ld", slice_path, (long)getpid());
        assert_int_equal(symlink("/dev/full", temporary), 0);
        assert_int_equal(gguf_slice(g, 2, slice_path, NULL, NULL, &err), -TD_ERR_DISKFULL);
        assert_non_null(strstr(err.text, "disk is full"));
        assert_int_equal(access(temporary, F_OK), -1);
    }
    gguf_close(g);
    struct gguf_build b = {0};
    key_string(&b, "general.architecture", "llama");
    tensor(&b, "token_embd.weight", GGUF_F32, 1, 1, "1234", 4);
    struct bytes file = gguf_build_end(&b);
    assert_int_equal(gguf_parse(file.data, file.size, &g, &err), 0);
    assert_int_equal(gguf_layers_held(g), 0);
    assert_int_equal(gguf_slice(g, 1, slice_path, NULL, NULL, &err), -TD_ERR_FORMAT);
    gguf_close(g);
    free(file.data);
}

/* Overwrite `size` bytes at the first place where the file holds `old`. */
static void patch(const char *path, const void *old, const void *new, size_t size)
{
    size_t file_size;
    uint8_t *data = read_file(path, &file_size), *at = memmem(data, file_size, old, size);
    assert_non_null(at);
    memcpy(at, new, size);
    write_file(path, data, file_size);
    free(data);
}

static void expect_refused(const char *words)
{
    struct gguf *g;
    struct td_error err = {0};
    assert_int_equal(gguf_open(slice_path, &g, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, words));
}

/* A slice's table and its tensors must tell the same story. */
static void test_slice_table_is_checked(void **state)
{
    (void)state;
    write_model(0, "m", 0);
    cut(2);
    patch(slice_path, "tandem.slice.types", "tandem.slice.typos", 18);
    expect_refused("incomplete");
    cut(2);
    patch(slice_path, "tandem.slice.layer_end\4\0\0\0\2", "tandem.slice.layer_end\4\0\0\0\3", 27);
    expect_refused("blk.2.attn_q.weight is missing");
    cut(2);
    patch(slice_path, "tandem.slice.layer_end\4\0\0\0\2", "tandem.slice.layer_end\4\0\0\0\1", 27);
    expect_refused("blk.1.attn_q.weight does not belong");
    cut(2);
    patch(slice_path, "tandem.slice.layer_end\4\0\0\0\2", "tandem.slice.layer_end\4\0\0\0\x0c", 27);
    expect_refused("incomplete");
    cut(2);
    patch(slice_path, "rope_freqs.weight", "rope_frogs.weight",
          17); /* in the table; the tensor keeps its name */
    expect_refused("rope_frogs.weight is missing");
    cut(2);
    patch(slice_path, "rope_freqs.weight", "token_embd.weight", 17);
    expect_refused("token_embd.weight occurs twice");
    cut(2);
    patch(slice_path, "rope_freqs.weight", "blk.7.no_tensor.w", 17);
    expect_refused("does not list every tensor");
    cut(2);
    uint8_t dims[32] = {4, [8] = 2, [16] = 1, [24] = 1}, other[32] = {2, [8] = 4, [16] = 1, [24] = 1};
    patch(slice_path, dims, other, 32);
    expect_refused("differs from the slice's table");
    cut(2);
    other[0] = 0;
    patch(slice_path, dims, other, 32);
    expect_refused("impossible dimensions");
    cut(2);
    patch(slice_path, "blk.10.attn_q.weight", "blk.12.attn_q.weight", 20); /* harmless to open … */
    char model[65], slice[65];
    fingerprint_of(model_path, model);
    fingerprint_of(slice_path, slice);
    assert_string_not_equal(model, slice); /* … but another model */
}

/* Rot leaves the times of a file alone; who writes into it for a test does not, and lets the sidecar know. */
static void hide_change(const struct timespec times[2])
{
    struct stat st;
    size_t size;
    assert_int_equal(utimensat(AT_FDCWD, model_path, times, 0), 0);
    assert_int_equal(stat(model_path, &st), 0);
    uint8_t *data = read_file(sidecar_path, &size);
    store_le64(data + 32, (uint64_t)st.st_ctim.tv_sec * 1000000000u + (uint64_t)st.st_ctim.tv_nsec);
    sha256_once(data, size - 32, data + size - 32);
    write_file(sidecar_path, data, size);
    free(data);
}

static void test_verify_finds_damage(void **state)
{
    (void)state;
    static const float good[] = {2, 2, 3}, bad[] = {2, 2, 3.5f}; /* in blk.0 */
    struct td_error err = {0};
    write_model(0, "m", 0);
    cut(2);
    patch(slice_path, good, bad, sizeof good);
    struct gguf *s = open_model(slice_path);
    struct watch w = {0};
    assert_int_equal(gguf_verify(s, watch_progress, &w, &err), -TD_ERR_CHECKSUM);
    assert_true(w.calls > 0);
    assert_non_null(strstr(err.text, "tensor blk.0.attn_q.weight"));
    gguf_close(s);

    struct gguf *g = open_model(model_path);
    assert_int_equal(gguf_verify(g, NULL, NULL, &err), 0); /* against the sidecar that cut() left */
    gguf_close(g);
    struct stat st;
    assert_int_equal(stat(model_path, &st), 0);
    int fd = open(model_path, O_WRONLY);
    size_t size;
    uint8_t *data = read_file(model_path, &size);
    uint8_t *at = memmem(data, size, good, sizeof good);
    assert_non_null(at);
    assert_int_equal(pwrite(fd, bad, sizeof bad, at - data), sizeof bad);
    close(fd);
    free(data);
    hide_change((struct timespec[2]){st.st_atim, st.st_mtim});
    g = open_model(model_path);
    assert_int_equal(gguf_verify(g, NULL, NULL, &err), -TD_ERR_CHECKSUM);
    gguf_close(g);
    unlink(sidecar_path);
    g = open_model(model_path);
    assert_int_equal(gguf_verify(g, NULL, NULL, &err), 0); /* nothing known to compare with: taken now */
    assert_int_equal(access(sidecar_path, R_OK), 0);
    gguf_close(g);
}

static void test_needs_known_types_and_a_name(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    struct gguf *g;
    struct td_error err = {0};
    uint8_t hash[TD_HASH_SIZE];
    key_string(&b, "general.architecture", "llama");
    tensor(&b, "odd", 10, 4, 1, "1234", 4);
    struct bytes file = gguf_build_end(&b);
    assert_int_equal(gguf_parse(file.data, file.size, &g, &err), 0);
    assert_int_equal(gguf_fingerprint(g, hash, NULL, NULL, &err), -TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "odd has type 10"));
    assert_int_equal(gguf_verify(g, NULL, NULL, &err), -TD_ERR_UNSUPPORTED);
    gguf_close(g);
    free(file.data);
    key_string(&b, "general.name", "m");
    file = gguf_build_end(&b);
    assert_int_equal(gguf_parse(file.data, file.size, &g, &err), 0);
    assert_int_equal(gguf_fingerprint(g, hash, NULL, NULL, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, "general.architecture"));
    gguf_close(g);
    free(file.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_golden, empty_folder),
        cmocka_unit_test_teardown(test_what_counts, empty_folder),
        cmocka_unit_test_teardown(test_sidecar_belongs_to_one_file, empty_folder),
        cmocka_unit_test_teardown(test_sidecar_of_what_was_written_over, empty_folder),
        cmocka_unit_test_teardown(test_a_file_in_use_is_written_into, empty_folder),
        cmocka_unit_test_teardown(test_works_without_sidecar, empty_folder),
        cmocka_unit_test_teardown(test_slice_shows_the_model, empty_folder),
        cmocka_unit_test_teardown(test_slice_of_a_slice, empty_folder),
        cmocka_unit_test_teardown(test_slice_refuses, empty_folder),
        cmocka_unit_test_teardown(test_slice_table_is_checked, empty_folder),
        cmocka_unit_test_teardown(test_verify_finds_damage, empty_folder),
        cmocka_unit_test_teardown(test_needs_known_types_and_a_name, empty_folder),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
