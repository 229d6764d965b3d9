/* gguf: what was written is what is read, and every way in which a file can be wrong is an error of its own and one line. */
#include "gguf_build.h"
#include "shared/gguf_internal.h"
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>
#include <cmocka.h>

static struct gguf *parse(const struct bytes *file)
{
    struct gguf *g;
    struct td_error err = {0};
    int rc = gguf_parse(file->data, file->size, &g, &err);
    assert_string_equal(err.text, "");
    assert_int_equal(rc, 0);
    return g;
}

/* Parse in a block of exactly its size, so that a read behind it is seen by the sanitizer. */
static int try_parse(const void *data, size_t size, struct td_error *err)
{
    struct gguf *g;
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, data, size);
    memset(err, 0, sizeof *err);
    int rc = gguf_parse(copy, size, &g, err);
    if (rc == 0)
        gguf_close(g);
    free(copy);
    return rc;
}

static void expect_error(struct gguf_build *b, int code, const char *words)
{
    struct bytes file = gguf_build_end(b);
    struct td_error err;
    assert_int_equal(try_parse(file.data, file.size, &err), code);
    assert_non_null(strstr(err.text, words));
    assert_non_null(strstr(err.text, "cannot load"));
    free(file.data);
}

static void all_types(struct gguf_build *b)
{
    static const uint8_t raw[8] = {0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    static const size_t sizes[] = {1, 1, 2, 2, 4, 4};
    static const char *const names[] = {"u8", "i8", "u16", "i16", "u32", "i32"};
    for (uint32_t i = 0; i < 6; i++) {
        key_head(b, names[i], i);
        add_bytes(&b->keys, raw, sizes[i]);
    }
    key_head(b, "u64", GGUF_VALUE_U64);
    add_bytes(&b->keys, raw, 8);
    key_head(b, "i64", GGUF_VALUE_I64);
    add_bytes(&b->keys, raw, 8);
    key_head(b, "f64", GGUF_VALUE_F64);
    add_bytes(&b->keys, &(double){0.1}, 8);
    key_head(b, "f64 exact", GGUF_VALUE_F64);
    add_bytes(&b->keys, &(double){0.25}, 8);
    key_head(b, "f64 big", GGUF_VALUE_F64);
    add_bytes(&b->keys, &(double){1e300}, 8);
    key_f32(b, "f32", 1.5f);
    key_bool(b, "yes", true);
    key_bool(b, "no", false);
    key_string(b, "text", "hello");
    key_u32(b, "seven", 7);
    key_u32(b, "odd", (1u << 24) + 1);
    key_strings(b, "strings", (const char *const[]){"", "a", "longer one"}, 3);
    key_array32(b, "ints", GGUF_VALUE_I32, (const int32_t[]){-1, 0, 5}, 3);
    key_array32(b, "floats", GGUF_VALUE_F32, (const float[]){0.5f, -2}, 2);
    key_array32(b, "none", GGUF_VALUE_F32, NULL, 0);
}

static void test_values(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    all_types(&b);
    struct bytes file = gguf_build_end(&b);
    struct gguf *g = parse(&file);
    struct span s;
    assert_int_equal(g->value_count, 21);
    assert_int_equal(gguf_tensor_count(g), 0);
    assert_int_equal(gguf_file_size(g), file.size);
    assert_string_equal(gguf_path(g), "");
    assert_memory_equal(g->values[0].key.data, "u8", 2); /* file order */
    assert_null(gguf_find(g, "absent"));
    assert_null(gguf_find(g, "u"));
    assert_null(gguf_find(g, "u88"));
    assert_true(gguf_get_string(g, "text", &s));
    assert_int_equal(s.size, 5);
    assert_memory_equal(s.data, "hello", 5);
    assert_false(gguf_get_string(g, "seven", &s));
    bool flag = false;
    assert_true(gguf_get_bool(g, "yes", &flag) && flag);
    assert_true(gguf_get_bool(g, "no", &flag) && !flag);
    assert_false(gguf_get_bool(g, "seven", &flag));
    gguf_close(g);
    free(file.data);
}

static void test_conversions_lose_nothing(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    all_types(&b);
    struct bytes file = gguf_build_end(&b);
    struct gguf *g = parse(&file);
    uint32_t u = 99;
    float f = 99;
    assert_true(gguf_get_u32(g, "u8", &u) && u == 0xfe);
    assert_true(gguf_get_u32(g, "u16", &u) && u == 0xfffe);
    assert_true(gguf_get_u32(g, "u32", &u) && u == 0xfffffffe);
    assert_true(gguf_get_u32(g, "seven", &u) && u == 7);
    u = 99;
    static const char *const too_wide[] = {"i8",  "i16",  "i32", "i64",  "u64",
                                           "f32", "text", "yes", "ints", "absent"};
    for (size_t i = 0; i < TD_COUNT(too_wide); i++)
        assert_false(gguf_get_u32(g, too_wide[i], &u));
    assert_int_equal(u, 99);
    assert_true(gguf_get_f32(g, "f32", &f) && f == 1.5f);
    assert_true(gguf_get_f32(g, "f64 exact", &f) && f == 0.25f);
    assert_true(gguf_get_f32(g, "i16", &f) && f == -2);
    assert_true(gguf_get_f32(g, "i64", &f) && f == -2);
    assert_true(gguf_get_f32(g, "seven", &f) && f == 7);
    f = 99;
    static const char *const inexact[] = {"f64", "f64 big", "odd", "u64", "text", "absent"};
    for (size_t i = 0; i < TD_COUNT(inexact); i++)
        assert_false(gguf_get_f32(g, inexact[i], &f));
    assert_true(f == 99);
    gguf_close(g);
    free(file.data);
}

static void test_arrays(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    all_types(&b);
    struct bytes file = gguf_build_end(&b);
    struct gguf *g = parse(&file);
    const struct gguf_value *strings = gguf_find(g, "strings"), *ints = gguf_find(g, "ints");
    const struct gguf_value *floats = gguf_find(g, "floats"), *none = gguf_find(g, "none");
    struct span s;
    int64_t n = 0;
    float f;
    assert_int_equal(strings->count, 3);
    assert_true(gguf_array_string(strings, 0, &s) && s.size == 0);
    assert_true(gguf_array_string(strings, 2, &s) && s.size == 10 && memcmp(s.data, "longer one", 10) == 0);
    assert_false(gguf_array_string(strings, 3, &s));
    assert_false(gguf_array_string(ints, 0, &s));
    assert_false(gguf_array_i64(strings, 0, &n));
    assert_true(gguf_array_i64(ints, 0, &n) && n == -1);
    assert_true(gguf_array_i64(ints, 2, &n) && n == 5);
    assert_false(gguf_array_i64(ints, 3, &n));
    assert_false(gguf_array_i64(floats, 0, &n));
    assert_true(gguf_array_f32(floats, 1, &f) && f == -2);
    assert_false(gguf_array_f32(floats, 2, &f));
    assert_false(gguf_array_f32(none, 0, &f));
    assert_false(gguf_array_i64(gguf_find(g, "seven"), 0, &n)); /* a scalar is no array */
    assert_false(gguf_array_i64(NULL, 0, &n));
    gguf_close(g);
    free(file.data);
}

static void test_tensors(void **state)
{
    (void)state;
    static const uint32_t alignments[] = {0, 8, 64, 4096};
    uint8_t blocks[3 * 18], floats[8];
    for (size_t i = 0; i < sizeof blocks; i++)
        blocks[i] = (uint8_t)i;
    memset(floats, 0xaa, sizeof floats);
    for (size_t i = 0; i < TD_COUNT(alignments); i++) {
        struct gguf_build b = {.alignment = alignments[i]};
        key_string(&b, "general.architecture", "llama");
        key_u32(&b, "llama.block_count", 4);
        tensor(&b, "z.weight", GGUF_Q4_0, 32, 3, blocks, sizeof blocks);
        tensor(&b, "a.weight", GGUF_F32, 2, 1, floats, sizeof floats);
        struct bytes file = gguf_build_end(&b);
        struct gguf *g = parse(&file);
        const struct gguf_tensor *z = gguf_tensor(g, "z.weight"), *a = gguf_tensor(g, "a.weight");
        assert_ptr_equal(gguf_tensor_at(g, 0), z); /* file order */
        assert_null(gguf_tensor_at(g, 2));
        assert_null(gguf_tensor(g, "z.weigh"));
        assert_int_equal(z->size, sizeof blocks);
        assert_memory_equal(z->data, blocks, sizeof blocks);
        assert_memory_equal(a->data, floats, sizeof floats);
        assert_int_equal(((const uint8_t *)a->data - file.data) % (alignments[i] ? alignments[i] : 32), 0);
        assert_int_equal(z->dims[0], 32);
        assert_int_equal(z->dims[1], 3);
        assert_int_equal(z->dims[2], 1);
        assert_int_equal(z->dim_count, 2);
        assert_int_equal(gguf_layers_held(g), 4);
        gguf_close(g);
        free(file.data);
    }
}

/* Block sizes as the ggml quantisation formats define them. */
static void test_type_table(void **state)
{
    (void)state;
    static const struct {
        uint32_t type, values, size;
        const char *name;
    } types[] = {
        {0, 1, 4, "F32"},    {1, 1, 2, "F16"},       {2, 32, 18, "Q4_0"},    {3, 32, 20, "Q4_1"},
        {6, 32, 22, "Q5_0"}, {7, 32, 24, "Q5_1"},    {8, 32, 34, "Q8_0"},    {12, 256, 144, "Q4_K"},
        {30, 1, 2, "BF16"},  {13, 256, 176, "Q5_K"}, {14, 256, 210, "Q6_K"},
    };
    for (size_t i = 0; i < TD_COUNT(types); i++) {
        const struct gguf_type_info *info = gguf_type_info(types[i].type);
        assert_string_equal(info->name, types[i].name);
        assert_int_equal(info->block_values, types[i].values);
        assert_int_equal(info->block_size, types[i].size);
    }
    static const uint32_t unknown[] = {4, 5, 9, 10, 11, 15, 29, 31, UINT32_MAX};
    for (size_t i = 0; i < TD_COUNT(unknown); i++)
        assert_null(gguf_type_info(unknown[i]));
}

static void test_unknown_type_is_kept(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    tensor(&b, "odd", 10, 7, 1, "xxxx", 4);
    struct bytes file = gguf_build_end(&b);
    struct gguf *g = parse(&file);
    assert_int_equal(gguf_tensor(g, "odd")->type, 10);
    assert_null(gguf_tensor(g, "odd")->data);
    gguf_close(g);
    free(file.data);
}

static struct bytes small_file(void)
{
    struct gguf_build b = {0};
    key_string(&b, "general.architecture", "llama");
    key_u32(&b, "llama.block_count", 1);
    key_strings(&b, "tokens", (const char *const[]){"a", "bc"}, 2);
    key_array32(&b, "types", GGUF_VALUE_I32, (const int32_t[]){1, 3}, 2);
    tensor(&b, "blk.0.x", GGUF_F32, 4, 1, "0123456789abcdef", 16);
    return gguf_build_end(&b);
}

static void test_every_prefix_is_refused(void **state)
{
    (void)state;
    struct bytes file = small_file();
    struct td_error err;
    assert_int_equal(try_parse(file.data, file.size, &err), 0);
    for (size_t size = 0; size < file.size; size++) {
        int rc = try_parse(file.data, size, &err);
        assert_int_equal(rc, size < 4 ? -TD_ERR_FORMAT : -TD_ERR_TRUNCATED);
        assert_int_equal(err.code, rc);
        assert_null(strchr(err.text, '\n'));
    }
    free(file.data);
}

/* No byte, whatever its value, makes the parser read outside of the file (under the sanitizer) or fail without a word. */
static void test_damaged_bytes(void **state)
{
    (void)state;
    static const uint8_t values[] = {0x00, 0x01, 0x7f, 0x80, 0xff, 0x09, 0x08, 0x0d};
    struct bytes file = small_file();
    struct td_error err;
    for (size_t at = 0; at < file.size; at++) {
        uint8_t good = file.data[at];
        for (size_t i = 0; i < TD_COUNT(values); i++) {
            file.data[at] = values[i];
            int rc = try_parse(file.data, file.size, &err);
            assert_true(rc <= 0 && (rc < 0) == (err.text[0] != 0));
            assert_null(strchr(err.text, '\n'));
        }
        file.data[at] = good;
    }
    free(file.data);
}

static void test_head(void **state)
{
    (void)state;
    struct bytes file = small_file();
    struct td_error err;
    file.data[0] = 'g';
    assert_int_equal(try_parse(file.data, file.size, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, "not a GGUF file"));
    file.data[0] = 'G';
    store_le32(file.data + 4, 2);
    assert_int_equal(try_parse(file.data, file.size, &err), -TD_ERR_VERSION);
    assert_non_null(strstr(err.text, "version 2"));
    store_le32(file.data + 4, 3u << 24);
    assert_int_equal(try_parse(file.data, file.size, &err), -TD_ERR_VERSION);
    assert_non_null(strstr(err.text, "big-endian"));
    store_le32(file.data + 4, 3);
    store_le64(file.data + 8, GGUF_TENSORS_MAX + 1);
    assert_int_equal(try_parse(file.data, file.size, &err), -TD_ERR_LIMIT);
    store_le64(file.data + 8, 1);
    store_le64(file.data + 16, GGUF_KEYS_MAX + 1);
    assert_int_equal(try_parse(file.data, file.size, &err), -TD_ERR_LIMIT);
    store_le64(file.data + 16,
               GGUF_KEYS_MAX); /* allowed, but not in so few bytes: nothing is reserved for them */
    assert_int_equal(try_parse(file.data, file.size, &err), -TD_ERR_TRUNCATED);
    assert_non_null(strstr(err.text, "65536 keys"));
    free(file.data);
}

static void test_bad_keys(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    key_u32(&b, "twice", 1);
    key_u32(&b, "once", 1);
    key_u32(&b, "twice", 2);
    expect_error(&b, -TD_ERR_FORMAT, "twice occurs twice");

    key_u32(&b, "", 1);
    expect_error(&b, -TD_ERR_FORMAT, "wrong length");

    key_head(&b, "bad\ntype", 13);
    add_u64(&b.keys, 0);
    expect_error(&b, -TD_ERR_FORMAT, "bad?type has an unknown type");

    key_head(&b, "nested", GGUF_VALUE_ARRAY);
    add_u32(&b.keys, GGUF_VALUE_ARRAY);
    add_u64(&b.keys, 0);
    expect_error(&b, -TD_ERR_FORMAT, "nested");

    key_head(&b, "long", GGUF_VALUE_ARRAY);
    add_u32(&b.keys, GGUF_VALUE_U8);
    add_u64(&b.keys, GGUF_ARRAY_MAX + 1ull);
    expect_error(&b, -TD_ERR_FORMAT, "too many elements");

    key_head(&b, "strings", GGUF_VALUE_ARRAY);
    add_u32(&b.keys, GGUF_VALUE_STRING);
    add_u64(&b.keys, 1u << 20);
    expect_error(&b, -TD_ERR_TRUNCATED, "strings");

    key_head(&b, "endless", GGUF_VALUE_STRING);
    add_u64(&b.keys, UINT64_MAX);
    expect_error(&b, -TD_ERR_TRUNCATED, "endless");

    static const uint32_t bad_alignments[] = {1, 4, 24, 1u << 21};
    for (size_t i = 0; i < TD_COUNT(bad_alignments); i++) {
        key_u32(&b, "general.alignment", bad_alignments[i]);
        expect_error(&b, -TD_ERR_FORMAT, "power of two");
    }
    key_string(&b, "general.alignment", "32");
    expect_error(&b, -TD_ERR_FORMAT, "power of two");
}

static void test_bad_tensors(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    tensor(&b, "w", GGUF_F32, 1, 1, "1234", 4);
    tensor(&b, "w", GGUF_F32, 1, 1, "1234", 4);
    expect_error(&b, -TD_ERR_FORMAT, "w occurs twice");

    tensor_info(&b, "w", GGUF_F32, (const uint64_t[]){4, 1}, 2, 0);
    add_bytes(&b.tensors, "0123456789abcde", 15);
    expect_error(&b, -TD_ERR_TRUNCATED,
                 "tensor w ends at byte 112 but the file has 111; download the file again");

    static const struct {
        uint64_t dims[5];
        uint32_t count, type;
        uint64_t offset;
        const char *words;
    } bad[] = {
        {{4}, 1, GGUF_F32, 4, "misaligned"},
        {{0}, 1, GGUF_F32, 0, "impossible dimensions"},
        {{4, 0}, 2, GGUF_F32, 0, "impossible dimensions"},
        {{1ull << 33, 1ull << 33}, 2, GGUF_F32, 0, "impossible dimensions"},
        {{1ull << 62}, 1, GGUF_F32, 0, "impossible dimensions"}, /* its bytes overflow */
        {{33}, 1, GGUF_Q8_0, 0, "multiple of its type's block"},
        {{128}, 1, GGUF_Q6_K, 0, "multiple of its type's block"},
        {{4}, 0, GGUF_F32, 0, "number of dimensions"},
        {{1, 1, 1, 1, 1}, 5, GGUF_F32, 0, "number of dimensions"},
        {{4}, 1, GGUF_F32, UINT64_MAX - 31, "impossible offset"},
        {{4}, 1, GGUF_F32, 1ull << 40, "ends at byte"},
        {{4}, 1, 99, 1ull << 40, "ends at byte"},
    };
    for (size_t i = 0; i < TD_COUNT(bad); i++) {
        tensor_info(&b, "w", bad[i].type, bad[i].dims, bad[i].count, bad[i].offset);
        add_bytes(&b.tensors, (const uint8_t[64]){0}, 64);
        int code = strcmp(bad[i].words, "ends at byte") ? -TD_ERR_FORMAT : -TD_ERR_TRUNCATED;
        expect_error(&b, code, bad[i].words);
    }
    tensor_info(&b, "second", GGUF_F32, (const uint64_t[]){9}, 1, 32); /* 36 bytes */
    tensor_info(&b, "first", GGUF_F32, (const uint64_t[]){9}, 1, 0);
    add_bytes(&b.tensors, (const uint8_t[128]){0}, 128);
    expect_error(&b, -TD_ERR_FORMAT, "second overlaps another tensor");

    tensor_info(&b, "", GGUF_F32, (const uint64_t[]){1}, 1, 0);
    add_bytes(&b.tensors, "1234", 4);
    expect_error(&b, -TD_ERR_FORMAT, "wrong length");
}

static void test_limits_at_their_edge(void **state)
{
    (void)state;
    struct gguf_build b = {0};
    char name[32];
    for (uint32_t i = 0; i < GGUF_KEYS_MAX - 1; i++) {
        snprintf(name, sizeof name, "k%u", i * 2654435761u); /* not in order */
        key_u32(&b, name, i);
    }
    key_head(&b, "array", GGUF_VALUE_ARRAY);
    add_u32(&b.keys, GGUF_VALUE_U8);
    add_u64(&b.keys, GGUF_ARRAY_MAX);
    uint8_t *elements = calloc(1, GGUF_ARRAY_MAX);
    add_bytes(&b.keys, elements, GGUF_ARRAY_MAX);
    free(elements);
    for (uint32_t i = 0; i < GGUF_TENSORS_MAX; i++) {
        snprintf(name, sizeof name, "t%u", i * 2654435761u);
        tensor_info(&b, name, GGUF_F16, (const uint64_t[]){16}, 1, i * 32);
    }
    elements = calloc(GGUF_TENSORS_MAX, 32);
    add_bytes(&b.tensors, elements, GGUF_TENSORS_MAX * 32);
    free(elements);
    struct bytes file = gguf_build_end(&b);
    struct gguf *g = parse(&file);
    uint32_t value;
    assert_int_equal(g->value_count, GGUF_KEYS_MAX);
    assert_int_equal(gguf_tensor_count(g), GGUF_TENSORS_MAX);
    assert_int_equal(gguf_find(g, "array")->count, GGUF_ARRAY_MAX);
    snprintf(name, sizeof name, "k%u", 40000 * 2654435761u);
    assert_true(gguf_get_u32(g, name, &value) && value == 40000);
    snprintf(name, sizeof name, "t%u", 65535 * 2654435761u);
    assert_ptr_equal(gguf_tensor(g, name), gguf_tensor_at(g, 65535));
    gguf_close(g);
    free(file.data);
}

static void test_opens_files(void **state)
{
    (void)state;
    char folder[] = "/tmp/td-gguf-XXXXXX", path[64];
    struct td_error err = {0};
    struct gguf *g;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/m.gguf", folder);
    assert_int_equal(gguf_open(path, &g, &err), -TD_ERR_NOTFOUND);
    assert_non_null(strstr(err.text, path));
    assert_int_equal(gguf_open(folder, &g, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "not a regular file"));
    assert_int_equal(gguf_open("", &g, &err), -TD_ERR_ARG);
    FILE *f = fopen(path, "w");
    fclose(f);
    assert_int_equal(gguf_open(path, &g, &err), -TD_ERR_TRUNCATED);
    assert_non_null(strstr(err.text, "empty"));
    struct bytes file = small_file();
    f = fopen(path, "w");
    fwrite(file.data, 1, file.size, f);
    fclose(f);
    assert_int_equal(gguf_open(path, &g, &err), 0);
    assert_string_equal(gguf_path(g), path);
    assert_int_equal(gguf_file_size(g), file.size);
    assert_memory_equal(gguf_tensor(g, "blk.0.x")->data, "0123456789abcdef", 16);
    gguf_close(g);
    gguf_close(NULL);
    assert_int_equal(truncate(path, (off_t)file.size - 1), 0);
    assert_int_equal(gguf_open(path, &g, &err), -TD_ERR_TRUNCATED);
    assert_null(g);
    assert_non_null(strstr(err.text, path));
    unlink(path);
    rmdir(folder);
    free(file.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_conversions_lose_nothing),
        cmocka_unit_test(test_arrays),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_type_table),
        cmocka_unit_test(test_unknown_type_is_kept),
        cmocka_unit_test(test_every_prefix_is_refused),
        cmocka_unit_test(test_damaged_bytes),
        cmocka_unit_test(test_head),
        cmocka_unit_test(test_bad_keys),
        cmocka_unit_test(test_bad_tensors),
        cmocka_unit_test(test_limits_at_their_edge),
        cmocka_unit_test(test_opens_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
