/* model_in_use: a CPU backend and the file of its model while somebody else writes into it. Apart from test_forward, which other processors run without the
 * libraries that a fingerprint takes. Linked so that the backend's question whether the file is intact comes here first (tests/CMakeLists.txt). */
#include "tests/unit/kernels/models.h"
#include "shared/gguf.h"
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

static int asked, write_at; /* how often; with which question somebody writes, 0: none */
static int fd;

static void flip_last_byte(off_t size)
{
    uint8_t byte;
    assert_int_equal(pread(fd, &byte, 1, size - 1), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, size - 1), 1);
}

bool __real_gguf_intact(struct gguf *g);
bool __wrap_gguf_intact(struct gguf *g);

bool __wrap_gguf_intact(struct gguf *g)
{
    if (++asked == write_at) {
        flip_last_byte((off_t)gguf_file_size(g));
        touch(fd, 6);
    }
    return __real_gguf_intact(g);
}

/* The file is written into with the n-th question: before a step, or while it computes. */
static void written_into(int question, bool changed_before)
{
    char path[] = "/tmp/td-forward-XXXXXX", sidecar[64];
    int32_t id = 3;
    uint32_t page = 0;
    uint8_t hash[TD_HASH_SIZE];
    struct batch_seq s = {.layer_end = 1, .row_count = 1, .ids = &id, .pages = &page};
    struct run r;
    fd = mkstemp(path);
    assert_true(fd >= 0);
    copy_file(TEST_DATA "/tiny/llama-gqa-untied.gguf", path);
    run_open_path(&r, path, 1, NULL, 16);
    asked = write_at = 0;
    assert_int_equal(run_batch(&r, &s, 1), 0);
    assert_int_equal(asked, 2); /* before it and behind it */
    assert_int_equal(gguf_fingerprint(r.file, hash, NULL, NULL, NULL), 0);
    unlink(strcat(strcpy(sidecar, path), ".digests"));
    if (changed_before) { /* the same bytes at another time */
        touch(fd, 5);
        assert_int_equal(run_batch(&r, &s, 1), 0);
        assert_int_equal(r.backend->ops->state(r.backend), 0);
    }
    asked = 0, write_at = question;
    assert_int_equal(run_batch(&r, &s, 1), -TD_ERR_IO);
    assert_int_equal(asked, question);
    assert_int_equal(r.backend->ops->state(r.backend), -TD_ERR_IO);
    flip_last_byte((off_t)gguf_file_size(r.file));
    touch(fd, 7);
    assert_int_equal(run_batch(&r, &s, 1), -TD_ERR_IO); /* for good */
    run_close(&r), close(fd), unlink(path);
}

/* What somebody writes into a model file is not computed with, and the backend says that it has failed. */
static void a_model_that_is_written_into(void **state)
{
    (void)state;
    written_into(1, true);
}

/* … nor is what was computed meanwhile believed. */
static void a_model_that_is_written_into_during_a_step(void **state)
{
    (void)state;
    written_into(2, false);
    written_into(2, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_model_that_is_written_into),
        cmocka_unit_test(a_model_that_is_written_into_during_a_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
