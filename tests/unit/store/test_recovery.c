/* recovery: what is found again when files were cut, flipped, deleted, or when the index is old, broken, locked or absent. */
#include "store_fixture.h"
#include "shared/log.h"
#include <errno.h>
#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>

enum { BLOCKS = 12 };

static void path_in(const char *dir, const char *name, char out[512])
{
    snprintf(out, 512, "%s/%s", dir, name);
}

static void copy_file(const char *dir, const char *from, const char *to)
{
    char a[512], b[512];
    uint8_t *data;
    size_t size;
    path_in(dir, from, a);
    path_in(dir, to, b);
    unlink(b);
    if (io_read_file(&io_posix, a, 1 << 28, &data, &size) < 0)
        return;
    int fd = open(b, O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    close(fd);
    free(data);
}

static void flip(const char *dir, const char *name, off_t at)
{
    char path[512];
    uint8_t byte = 0;
    path_in(dir, name, path);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 0x40;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static off_t file_size(const char *dir, const char *name)
{
    char path[512];
    struct stat st;
    path_in(dir, name, path);
    return stat(path, &st) == 0 ? st.st_size : -1;
}

static void remove_index(const char *dir)
{
    index_set_aside(dir, false);
    assert_int_equal(file_size(dir, INDEX_FILE), -1);
}

static void fill_store(struct store *s, uint64_t first, uint64_t count)
{
    for (uint64_t i = first; i < first + count; i++) {
        struct fixture_block f;
        fixture_block_make(&f, i);
        assert_int_equal(fixture_put(s, "acme", &f), 0);
    }
}

static int count_blocks(struct store *s, uint64_t first, uint64_t count)
{
    int found = 0;
    for (uint64_t i = first; i < first + count; i++) {
        struct fixture_block f;
        fixture_block_make(&f, i);
        found += fixture_block_reads(s, "acme", &f);
    }
    return found;
}

static char *make_store(struct store_config *c)
{
    char *dir = fixture_directory();
    *c = fixture_config(dir);
    struct store *s = fixture_open(c);
    fill_store(s, 0, BLOCKS);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 0, "first"), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 1, "second"), 0);
    struct fixture_block f;
    fixture_block_make(&f, 3);
    assert_int_equal(store_delete(s, "acme", &f.id, NULL, NULL), 0);
    store_close(s);
    return dir;
}

static void assert_all_there(struct store *s)
{
    uint64_t version;
    struct store_stats stats;
    assert_int_equal(count_blocks(s, 0, BLOCKS), BLOCKS - 1);
    assert_int_equal(count_blocks(s, 3, 1), 0);
    char *text = fixture_conv_get(s, "acme", "ann", "one", &version);
    assert_non_null(text);
    assert_string_equal(text, "second");
    assert_int_equal(version, 2);
    free(text);
    store_stats(s, &stats);
    assert_int_equal(stats.blocks, BLOCKS - 1);
    assert_int_equal(stats.conversations, 1);
    assert_int_equal(stats.damaged, 0);
}

static void test_index_absent_garbage_or_of_another_kind(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), path[512];
    path_in(dir, INDEX_FILE, path);
    for (int kind = 0; kind < 4; kind++) {
        if (kind == 0) {
            remove_index(dir);
        } else if (kind == 1) { /* not SQLite at all */
            remove_index(dir);
            copy_file(dir, "seg-0000000000000001.td", INDEX_FILE);
        } else if (kind == 2) { /* SQLite, but somebody else's */
            sqlite3 *db;
            remove_index(dir);
            assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
            sqlite3_exec(db, "CREATE TABLE t(x); PRAGMA user_version=77", NULL, NULL, NULL);
            sqlite3_close(db);
        } else { /* ours, with damaged pages */
            off_t size = file_size(dir, INDEX_FILE);
            assert_true(size > 3 * 4096);
            for (off_t at = 4096; at < size; at += 97)
                flip(dir, INDEX_FILE, at);
        }
        struct store *s = fixture_open(&c);
        assert_all_there(s);
        store_close(s);
        if (kind > 0)
            assert_true(file_size(dir, INDEX_FILE ".damaged") >= 0); /* kept for whoever wants to look */
        s = fixture_open(&c);                                        /* and the new index is as good */
        assert_all_there(s);
        store_close(s);
    }
    fixture_remove(dir);
}

/* On the writer's thread. */
static int retry_now(struct store *s, struct store_task *task)
{
    (void)task;
    s->index_retry_us = TD_MIN(s->index_retry_us, UINT64_C(1));
    return 0;
}
static int has_index(struct store *s, struct store_task *task)
{
    (void)task;
    return s->index && s->index_complete && !s->index_retry_us;
}

static void try_index(struct store *s, int expected)
{
    struct store_task retry = {.run = retry_now}, look = {.run = has_index};
    assert_int_equal(store_run_task(s, &retry), 0);
    store_flush(s);
    store_flush(s); /* the writer has been round since */
    assert_int_equal(store_run_task(s, &look), expected);
}

static int64_t count_rows(const char *path, const char *sql)
{
    sqlite3 *db;
    sqlite3_stmt *q;
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_prepare_v2(db, sql, -1, &q, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_step(q), SQLITE_ROW);
    int64_t count = sqlite3_column_int64(q, 0);
    sqlite3_finalize(q);
    sqlite3_close(db);
    return count;
}

/* A store that has had to do without gets one again while it runs, with all that it knows. */
static void test_index_comes_back_by_itself(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), path[512];
    sqlite3 *db;
    struct store_stats stats;
    path_in(dir, INDEX_FILE, path);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "BEGIN EXCLUSIVE", NULL, NULL, NULL), SQLITE_OK);
    struct store *s = fixture_open(&c);
    fill_store(s, 100, 2);
    try_index(s, 0); /* still locked */
    sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    sqlite3_close(db);
    try_index(s, 1);
    fill_store(s, 200, 2);
    store_stats(s, &stats);
    store_close(s);
    assert_int_equal(count_rows(path, "SELECT count(*) FROM records WHERE type=1"), stats.blocks);
    assert_int_equal(count_rows(path, "SELECT count(*) FROM records WHERE type=2"), stats.conversations);
    assert_int_equal(count_rows(path, "SELECT count(*) FROM segments"), stats.segments);
    s = fixture_open(&c);
    assert_int_equal(count_blocks(s, 0, BLOCKS), BLOCKS - 1);
    assert_int_equal(count_blocks(s, 100, 2), 2);
    assert_int_equal(count_blocks(s, 200, 2), 2);
    store_close(s);
    fixture_remove(dir);
}

static atomic_bool apply_fails; /* by no lock, and not for want of room */
int __real_index_apply(struct index *x, const struct index_row *rows, size_t row_count,
                       const struct index_segment *segments, size_t segment_count, uint64_t next_lsn);
int __wrap_index_apply(struct index *x, const struct index_row *rows, size_t row_count,
                       const struct index_segment *segments, size_t segment_count, uint64_t next_lsn);

int __wrap_index_apply(struct index *x, const struct index_row *rows, size_t row_count,
                       const struct index_segment *segments, size_t segment_count, uint64_t next_lsn)
{
    return apply_fails ? -TD_ERR_IO
                       : __real_index_apply(x, rows, row_count, segments, segment_count, next_lsn);
}

static int flush_index(struct store *s, struct store_task *task)
{
    (void)task;
    store_index_flush(s, true);
    return 0;
}

/* As if as many changes as may wait for the index did. */
static int overflow_rows(struct store *s, struct store_task *task)
{
    size_t capacity = s->row_capacity;
    struct entry e = {.tenant = keys_find(s->keys, "acme"), .segment_id = 1};
    (void)task;
    s->row_count = s->row_capacity = STORE_INDEX_ROWS_MAX;
    store_note_change(s, RECORD_BLOCK, &e, false);
    s->row_capacity = capacity;
    return 0;
}

/* Nothing else waits for it, or is lost with it, and there is another one. */
static void test_index_given_up_under_way(void **state)
{
    (void)state;
    for (int overflows = 0; overflows < 2; overflows++) {
        struct store_config c;
        char *dir = make_store(&c), path[512];
        struct store *s = fixture_open(&c);
        struct store_task overflow = {.run = overflow_rows}, flush = {.run = flush_index},
                          look = {.run = has_index};
        path_in(dir, INDEX_FILE, path);
        fill_store(s, 100, 2);
        apply_fails = !overflows;
        assert_int_equal(store_run_task(s, overflows ? &overflow : &flush), 0);
        apply_fails = false;
        assert_int_equal(store_run_task(s, &look), 0);
        try_index(s, 1);
        store_close(s);
        assert_int_equal(count_rows(path, "SELECT count(*) FROM records WHERE type=1"), BLOCKS - 1 + 2);
        s = fixture_open(&c);
        assert_int_equal(count_blocks(s, 0, BLOCKS), BLOCKS - 1);
        assert_int_equal(count_blocks(s, 100, 2), 2);
        store_close(s);
        fixture_remove(dir);
    }
}

static void test_index_locked_by_another_program(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), path[512];
    sqlite3 *db;
    path_in(dir, INDEX_FILE, path);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "BEGIN EXCLUSIVE", NULL, NULL, NULL), SQLITE_OK);
    struct store *s = fixture_open(&c);
    assert_all_there(s);
    fill_store(s, 100, 2);
    store_close(s);
    sqlite3_exec(db, "ROLLBACK", NULL, NULL, NULL);
    sqlite3_close(db);
    s = fixture_open(&c); /* the index is old now; the log fills in */
    assert_int_equal(count_blocks(s, 100, 2), 2);
    store_close(s);
    fixture_remove(dir);
}

static void test_index_from_an_old_backup(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c);
    copy_file(dir, INDEX_FILE, "backup");
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    fill_store(s, 100, 3);
    fixture_block_make(&f, 5);
    assert_int_equal(store_delete(s, "acme", &f.id, NULL, NULL), 0); /* the backup knows it as living */
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 2, "third"), 0);
    store_close(s);
    copy_file(dir, "backup", INDEX_FILE);
    unlink("backup");
    s = fixture_open(&c);
    assert_int_equal(count_blocks(s, 5, 1), 0);
    assert_int_equal(count_blocks(s, 100, 3), 3);
    assert_int_equal(count_blocks(s, 0, BLOCKS), BLOCKS - 2);
    uint64_t version;
    char *text = fixture_conv_get(s, "acme", "ann", "one", &version);
    assert_string_equal(text, "third");
    free(text);
    store_close(s);
    fixture_remove(dir);
}

/* The later record of a block counts, and alone, also if the power went before the earlier one was voided. */
static void test_a_void_that_was_lost(void **state)
{
    (void)state;
    static const char name[] = "seg-0000000000000001.td";
    char *dir = fixture_directory();
    struct store_config c = fixture_config(dir);
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    fixture_block_of(&f, 200, quality_lossy, 0, FIXTURE_LAYERS);
    assert_int_equal(fixture_put(s, "acme", &f), 0);
    store_close(s);
    copy_file(dir, name, "before");
    s = fixture_open(&c);
    fill_store(s, 200, 1);
    store_close(s);
    copy_file(dir, "before", name);
    remove_index(dir);
    s = fixture_open(&c);
    assert_int_equal(count_blocks(s, 200, 1), 1);
    store_close(s);
    fixture_remove(dir);
}

/* Rows of an index that no longer says how far they reach: the scan decides, and what it does not find leaves the index. */
static void test_rows_without_their_segments(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), path[512];
    struct fixture_block f;
    struct store_block_info info;
    sqlite3 *db;
    copy_file(dir, INDEX_FILE, "backup");
    struct store *s = fixture_open(&c);
    fixture_block_make(&f, 5);
    assert_int_equal(store_delete(s, "acme", &f.id, NULL, NULL), 0);
    store_close(s);
    copy_file(dir, "backup", INDEX_FILE); /* has a row for block 5, which is a void in the segment now */
    path_in(dir, INDEX_FILE, path);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, "DELETE FROM segments", NULL, NULL, NULL), SQLITE_OK);
    sqlite3_close(db);
    for (int i = 0; i < 2; i++) {
        s = fixture_open(&c);
        assert_int_equal(store_find(s, "acme", &f.id, &info), -TD_ERR_NOTFOUND);
        assert_int_equal(count_blocks(s, 0, BLOCKS), BLOCKS - 2);
        store_close(s);
    }
    fixture_remove(dir);
}

/* An index row that points to another block's record: that record must survive what is done to the row's block. */
static void test_a_row_that_points_elsewhere(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), path[512], sql[512], a[65], b[65];
    struct kv_block_id id_a, id_b;
    sqlite3 *db;
    fixture_id(5, &id_a);
    fixture_id(6, &id_b);
    hex_encode(id_a.bytes, 32, a);
    hex_encode(id_b.bytes, 32, b);
    path_in(dir, INDEX_FILE, path);
    snprintf(sql, sizeof sql,
             "UPDATE records SET offset=(SELECT offset FROM records WHERE id=x'%s') WHERE id=x'%s'", b, a);
    assert_int_equal(sqlite3_open(path, &db), SQLITE_OK);
    assert_int_equal(sqlite3_exec(db, sql, NULL, NULL, NULL), SQLITE_OK);
    assert_int_equal(sqlite3_changes(db), 1);
    sqlite3_close(db);
    struct store *s = fixture_open(&c);
    assert_int_equal(store_delete(s, "acme", &id_a, NULL, NULL), 0);
    store_flush(s);
    store_flush(s);
    assert_int_equal(count_blocks(s, 5, 1), 0);
    assert_int_equal(count_blocks(s, 6, 1), 1);
    store_close(s);
    fixture_remove(dir);
}

/* Every page of the segment damaged in turn: what it hit is a miss, everything else is as before, and never wrong bytes. */
static void test_any_damaged_page_costs_one_record(void **state)
{
    (void)state;
    static const char name[] = "seg-0000000000000001.td";
    for (int with_index = 0; with_index < 2; with_index++) {
        struct store_config c;
        char *dir = make_store(&c);
        off_t size = file_size(dir, name);
        copy_file(dir, name, "good");
        copy_file(dir, INDEX_FILE, "index");
        for (off_t at = 0; at < size; at += 4096 * 3) {
            copy_file(dir, "good", name);
            remove_index(dir);
            if (with_index)
                copy_file(dir, "index", INDEX_FILE);
            flip(dir, name, at + 20);
            struct store *s = fixture_open(&c);
            int found = count_blocks(s, 0, BLOCKS);
            assert_in_range(found, BLOCKS - 2,
                            BLOCKS); /* a lost tombstone may bring block 3 back to an index-less scan */
            struct store_stats before, after;
            store_stats(s, &before);
            count_blocks(s, 0, BLOCKS);
            store_stats(s, &after);
            assert_int_equal(after.damaged, before.damaged); /* dropped once, then an ordinary miss */
            fill_store(s, 200, 1);                           /* and it goes on */
            fixture_counts_are_true(s);
            store_close(s);
            char second[512];
            path_in(dir, "seg-0000000000000002.td", second);
            unlink(second);
        }
        fixture_remove(dir);
    }
}

static void test_a_cut_segment(void **state)
{
    (void)state;
    static const char name[] = "seg-0000000000000001.td";
    struct store_config c;
    char *dir = make_store(&c), path[512];
    path_in(dir, name, path);
    off_t size = file_size(dir, name);
    copy_file(dir, name, "good");
    copy_file(dir, INDEX_FILE, "index");
    int before = BLOCKS + 1;
    for (off_t cut = size; cut >= 0; cut -= 9000) {
        for (int with_index = 0; with_index < 2; with_index++) {
            copy_file(dir, "good", name);
            remove_index(dir);
            if (with_index)
                copy_file(dir, "index", INDEX_FILE);
            assert_int_equal(truncate(path, cut), 0);
            struct store *s = fixture_open(&c);
            int found = count_blocks(s, 0, BLOCKS);
            assert_true(found <= before);
            if (with_index)
                before = found + 1; /* block 3 may be back without its tombstone */
            fill_store(s, 200, 1);
            store_close(s);
            for (int i = 1; i < 4; i++) {
                char other[SEGMENT_NAME_SIZE], other_path[512];
                segment_name((uint64_t)i, other);
                path_in(dir, other, other_path);
                unlink(other_path);
            }
        }
    }
    fixture_remove(dir);
}

static void test_a_deleted_segment_while_running(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), path[512];
    struct store *s = fixture_open(&c);
    fill_store(s, 100, 2);
    path_in(dir, "seg-0000000000000001.td", path);
    assert_int_equal(unlink(path), 0);
    count_blocks(s, 0, BLOCKS); /* hits through the open file, or misses: no crash, no wrong bytes */
    assert_int_equal(count_blocks(s, 100, 2), 2);
    store_close(s);
    s = fixture_open(&c);
    assert_int_equal(count_blocks(s, 0, BLOCKS), 0);
    assert_int_equal(count_blocks(s, 100, 2), 2);
    fill_store(s, 0, 2); /* the same ids can be put again */
    assert_int_equal(count_blocks(s, 0, 2), 2);
    store_close(s);
    fixture_remove(dir);
}

static int64_t pread_breaks(struct io *io, int fd, void *data, size_t size, uint64_t offset)
{
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return strstr(path, "/seg-") ? -EIO : io_posix.pread(io, fd, data, size, offset);
}

/* A disk that does not answer for a while says nothing of what is on it. */
static void test_a_segment_that_cannot_be_read_stays(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c);
    for (int with_index = 0; with_index < 2; with_index++) {
        struct io io = io_posix;
        struct store *s = fixture_open(&c);
        int kept = count_blocks(s, 0, BLOCKS);
        assert_true(kept > 1);
        store_close(s);
        io.pread = pread_breaks;
        if (!with_index)
            remove_index(dir);
        assert_int_equal(store_open_with(&c, &(struct store_env){.io = &io}, &s, NULL), 0);
        assert_int_equal(count_blocks(s, 0, BLOCKS), 0);
        store_close(s);
        s = fixture_open(&c);
        assert_int_equal(count_blocks(s, 0, BLOCKS), kept);
        store_close(s);
    }
    fixture_remove(dir);
}

/* Swapping whole records or files between places must never give another block's bytes. */
static void test_records_out_of_place(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), a[512], b[512];
    struct store *s = fixture_open(&c);
    fill_store(s, 100, BLOCKS);
    store_close(s);
    path_in(dir, "seg-0000000000000001.td", a);
    path_in(dir, "seg-0000000000000002.td", b);

    int fd = open(a, O_RDWR);
    uint64_t record = record_size(FIXTURE_LAYERS * (2 * FIXTURE_PIECE + CRYPTO_TAG_SIZE));
    uint8_t *first = malloc(record), *second = malloc(record);
    assert_int_equal(pread(fd, first, record, 4096), record);
    assert_int_equal(pread(fd, second, record, (off_t)(4096 + record)), record);
    assert_int_equal(pwrite(fd, second, record, 4096), record);
    assert_int_equal(pwrite(fd, first, record, (off_t)(4096 + record)), record);
    close(fd);
    free(first);
    free(second);
    s = fixture_open(&c);
    assert_int_equal(count_blocks(s, 0, 2), 0);
    assert_int_equal(count_blocks(s, 2, BLOCKS - 2), BLOCKS - 3);
    store_close(s);

    char third[512];
    path_in(dir, "third", third);
    assert_int_equal(rename(a, third), 0);
    assert_int_equal(rename(b, a), 0);
    assert_int_equal(rename(third, b), 0);
    for (int i = 0; i < 2; i++) {
        s = fixture_open(&c);
        assert_int_equal(count_blocks(s, 0, BLOCKS), 0);
        assert_int_equal(count_blocks(s, 100, BLOCKS), 0);
        store_close(s);
        remove_index(dir);
    }
    fixture_remove(dir);
}

static void test_a_torn_record_at_the_end(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), path[512];
    static const char name[] = "seg-0000000000000002.td";
    uint64_t version;
    /* A conversation's next version that was not acknowledged and is torn must not take the acknowledged one with it. */
    struct store *s = fixture_open(&c);
    fill_store(s, 100, 1);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "two", 0, "acknowledged"), 0);
    store_flush(s);
    copy_file(dir, name, "before");
    off_t end = file_size(dir, name);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "two", 1, "torn"), 0);
    copy_file(dir, name, "after");
    store_close(s);
    path_in(dir, name, path);
    for (int part = 0; part < 3; part++) {
        remove_index(dir);
        copy_file(dir, "before", name);
        uint8_t *data;
        size_t size;
        char after[512];
        path_in(dir, "after", after);
        assert_int_equal(io_read_file(&io_posix, after, 1 << 28, &data, &size), 0);
        int fd = open(path, O_RDWR);
        /* 0: head whole, body zero. 1: half a head. 2: head and half of the body's first 512 bytes */
        size_t length = part == 0 ? 4096 : part == 1 ? 512 : 4096 + 20;
        assert_int_equal(pwrite(fd, data + end, length, end), length);
        assert_int_equal(ftruncate(fd, end + 8192), 0);
        close(fd);
        free(data);
        s = fixture_open(&c);
        char *text = fixture_conv_get(s, "acme", "ann", "two", &version);
        assert_non_null(text);
        assert_string_equal(text, "acknowledged");
        assert_int_equal(version, 1);
        free(text);
        assert_int_equal(file_size(dir, name), end); /* cut off, so that it cannot come back */
        store_close(s);
        char third[512];
        path_in(dir, "seg-0000000000000003.td", third);
        unlink(third);
    }
    fixture_remove(dir);
}

static void test_an_erased_tenant_stays_erased_under_an_old_key_file(void **state)
{
    (void)state;
    for (int with_index = 0; with_index < 2; with_index++) {
        struct store_config c;
        struct store_stats stats;
        struct fixture_block f;
        char *dir = make_store(&c);
        struct store *s = fixture_open(&c);
        fixture_block_make(&f, 1);
        fill_store(s, BLOCKS, 1);
        assert_int_equal(fixture_conv_put(s, "acme", "ann", "two", 0, "text"), 0);
        assert_int_equal(fixture_put(s, "other", &f), 0); /* keeps their segment */
        store_close(s);
        copy_file(dir, KEYS_FILE, "old-keys");
        s = fixture_open(&c);
        assert_int_equal(store_erase_tenant(s, "acme", NULL), 0);
        store_close(s);
        copy_file(dir, "old-keys", KEYS_FILE);
        if (!with_index)
            remove_index(dir);
        s = fixture_open(&c);
        store_stats(s, &stats); /* before reading finds out */
        assert_int_equal(stats.blocks, 1);
        assert_int_equal(stats.conversations, 0);
        assert_int_equal(count_blocks(s, 0, BLOCKS + 1), 0);
        fill_store(s, 0, 1);
        store_close(s);
        s = fixture_open(&c);
        assert_int_equal(count_blocks(s, 0, 1), 1);
        store_close(s);
        fixture_remove(dir);
    }
}

static void test_an_empty_segment_file_is_removed(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), path[512];
    for (int i = 0; i < 3; i++) {
        static const off_t sizes[] = {0, 4096, 3 * 4096 + 5};
        path_in(dir, "seg-0000000000000009.td", path);
        int fd = open(path, O_RDWR | O_CREAT, 0600);
        assert_int_equal(ftruncate(fd, sizes[i]), 0);
        close(fd);
        struct store *s = fixture_open(&c);
        assert_all_there(s);
        assert_int_equal(file_size(dir, "seg-0000000000000009.td"), -1);
        store_close(s);
    }
    fixture_remove(dir);
}

/* As many blocks as TANDEM_RECOVERY_BLOCKS says, found again with the index and without; then it also says how long that took. */
static void test_many_blocks(void **state)
{
    (void)state;
    const char *text = getenv("TANDEM_RECOVERY_BLOCKS");
    uint64_t count = text ? strtoull(text, NULL, 10) : 300;
    char *dir = fixture_directory(), index[512];
    struct store_config c = fixture_config(dir);
    struct store_stats stats;
    c.limit_size = 1ull << 40;
    c.commit_interval_ms = 20;
    struct store *s = fixture_open(&c);
    struct fixture_block f;
    for (uint64_t i = 0; i < count; i++) {
        fixture_block_of(&f, i, quality_exact, 0, 1);
        while (store_put(s, "acme", &f.block, NULL, NULL) == -TD_ERR_FULL)
            store_flush(s);
    }
    store_close(s);
    snprintf(index, sizeof index, "%s/" INDEX_FILE, dir);
    for (int without = 0; without < 2; without++) {
        if (without)
            assert_int_equal(unlink(index), 0);
        uint64_t start = clock_mono_us();
        s = fixture_open(&c);
        uint64_t took_us = clock_mono_us() - start;
        store_stats(s, &stats);
        assert_int_equal(stats.blocks, count);
        assert_true(fixture_block_reads(s, "acme", &f));
        store_close(s);
        if (text)
            print_message("%llu blocks, %s index: opened in %llu ms\n", (unsigned long long)count,
                          without ? "no" : "with the", (unsigned long long)took_us / 1000);
    }
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_index_absent_garbage_or_of_another_kind),
        cmocka_unit_test(test_index_comes_back_by_itself),
        cmocka_unit_test(test_index_given_up_under_way),
        cmocka_unit_test(test_index_locked_by_another_program),
        cmocka_unit_test(test_index_from_an_old_backup),
        cmocka_unit_test(test_a_void_that_was_lost),
        cmocka_unit_test(test_rows_without_their_segments),
        cmocka_unit_test(test_a_row_that_points_elsewhere),
        cmocka_unit_test(test_any_damaged_page_costs_one_record),
        cmocka_unit_test(test_a_cut_segment),
        cmocka_unit_test(test_a_deleted_segment_while_running),
        cmocka_unit_test(test_a_segment_that_cannot_be_read_stays),
        cmocka_unit_test(test_records_out_of_place),
        cmocka_unit_test(test_a_torn_record_at_the_end),
        cmocka_unit_test(test_an_erased_tenant_stays_erased_under_an_old_key_file),
        cmocka_unit_test(test_an_empty_segment_file_is_removed),
        cmocka_unit_test(test_many_blocks),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
