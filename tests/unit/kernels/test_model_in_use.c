/* model_in_use: a CPU backend and the file of its model while somebody else writes into it. Apart from test_forward, which other processors run without the
 * libraries that a fingerprint takes. */
#include "tests/unit/kernels/models.h"
#include <sys/stat.h>
#include <unistd.h>

static void copy_file(const char *from, const char *to)
{
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    assert_true(in && out);
    for (int c; (c = fgetc(in)) != EOF;)
        fputc(c, out);
    fclose(in), fclose(out);
}

/* Clocks of files are coarse: a time that it has not had. */
static void touch(int fd, long time_ns)
{
    struct timespec times[2] = {{1, 0}, {1, time_ns}};
    assert_int_equal(futimens(fd, times), 0);
}

/* What somebody writes into a model file is not computed with, and the backend says that it has failed. */
static void a_model_that_is_written_into(void **state)
{
    (void)state;
    char path[] = "/tmp/td-forward-XXXXXX";
    int32_t id = 3;
    uint32_t page = 0;
    uint8_t hash[TD_HASH_SIZE], byte;
    char sidecar[64];
    struct batch_seq s = {.layer_end = 1, .row_count = 1, .ids = &id, .pages = &page};
    struct run r;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    copy_file(TEST_DATA "/tiny/llama-gqa-untied.gguf", path);
    run_open_path(&r, path, 1, NULL, 16);
    assert_int_equal(run_batch(&r, &s, 1), 0);
    assert_int_equal(gguf_fingerprint(r.file, hash, NULL, NULL, NULL), 0);
    unlink(strcat(strcpy(sidecar, path), ".digests"));
    touch(fd, 5);
    assert_int_equal(run_batch(&r, &s, 1), 0);
    assert_int_equal(r.backend->ops->state(r.backend), 0);
    off_t last = (off_t)gguf_file_size(r.file) - 1;
    assert_int_equal(pread(fd, &byte, 1, last), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, last), 1);
    touch(fd, 6);
    assert_int_equal(run_batch(&r, &s, 1), -TD_ERR_IO);
    assert_int_equal(r.backend->ops->state(r.backend), -TD_ERR_IO);
    run_close(&r), close(fd), unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_model_that_is_written_into)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
