/* An index that is a sound database and says what is not so, as somebody's hand or a fault of SQLite makes it. It may cost hits until it is found out, and
 * no record: what was acknowledged is there after compaction, housekeeping and a restart, and what was deleted stays deleted. */
#include "store_fixture.h"
#include "shared/log.h"
#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>

enum { BLOCKS = 8, DELETED = 3 };

static const char *path_in(const char *dir, const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static bool is_there(const char *dir, const char *name)
{
    return access(path_in(dir, name), F_OK) == 0;
}

/* Also what the store itself thinks of the index once it is open. */
static bool is_found_out(const char *dir)
{
    return is_there(dir, INDEX_FILE ".damaged");
}

static void lie(const char *dir, const char *sql)
{
    sqlite3 *db;
    assert_int_equal(sqlite3_open(path_in(dir, INDEX_FILE), &db), SQLITE_OK);
    if (sqlite3_exec(db, sql, NULL, NULL, NULL) != SQLITE_OK)
        fail_msg("%s: %s", sql, sqlite3_errmsg(db));
    assert_true(sqlite3_total_changes(db) > 0);
    sqlite3_close(db);
}

static void put_block(struct store *s, const char *tenant, uint64_t i)
{
    struct fixture_block f;
    fixture_block_make(&f, i);
    assert_int_equal(fixture_put(s, tenant, &f), 0);
}

static void delete_block(struct store *s, const char *tenant, uint64_t i)
{
    struct fixture_block f;
    fixture_block_make(&f, i);
    assert_int_equal(store_delete(s, tenant, &f.id, NULL, NULL), 0);
    store_flush(s);
}

static bool has_block(struct store *s, const char *tenant, uint64_t i)
{
    struct fixture_block f;
    fixture_block_make(&f, i);
    return fixture_block_reads(s, tenant, &f);
}

static bool has_text(struct store *s, const char *id, const char *expected)
{
    uint64_t version;
    char *text = fixture_conv_get(s, "acme", "ann", id, &version);
    bool same = text && strcmp(text, expected) == 0;
    free(text);
    return same;
}

static bool is_pinned(struct store *s, uint64_t i)
{
    struct kv_block_id id;
    fixture_id(i, &id);
    return store_is_pinned(s, "acme", &id);
}

/* Several segments with three blocks each; a conversation that was replaced, one that was not, a pin, and a block that was deleted. */
static char *make_store(struct store_config *c)
{
    char *dir = fixture_directory();
    struct kv_block_id id;
    *c = fixture_config(dir);
    c->segment_size = STORE_SEGMENT_SIZE_MIN;
    struct store *s = fixture_open(c);
    for (uint64_t i = 0; i < BLOCKS; i++) {
        put_block(s, "acme", i);
        if (i == 1)
            assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 0, "first"), 0);
        if (i == 4)
            assert_int_equal(fixture_conv_put(s, "acme", "ann", "two", 0, "other"), 0);
    }
    fixture_id(5, &id);
    assert_int_equal(store_pin(s, "acme", &id, true, NULL), 0);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 1, "second"), 0);
    delete_block(s, "acme", DELETED);
    assert_true(s->segments.count > 2);
    store_close(s);
    return dir;
}

static int count_right(struct store *s)
{
    int count = has_text(s, "one", "second") + has_text(s, "two", "other") + is_pinned(s, 5);
    for (uint64_t i = 0; i < BLOCKS; i++)
        count += has_block(s, "acme", i);
    return count;
}

enum { ALL = BLOCKS - 1 + 3 };

static void assert_all_there(struct store *s)
{
    assert_false(has_block(s, "acme", DELETED));
    assert_int_equal(count_right(s), ALL);
}

static void compact_all(struct store *s)
{
    uint64_t freed;
    assert_int_equal(store_compact(s, 0, NULL, NULL, &freed, NULL), 0);
}

/* Twice: the second round sees what the first has left. */
static void let_housekeeping_run(struct store *s)
{
    for (int i = 0; i < 8; i++)
        store_flush(s);
}

static void assert_rebuilt(const struct store_config *c)
{
    uint64_t records;
    assert_int_equal(store_rebuild(c, NULL, NULL, &records, NULL), 0);
    struct store *s = fixture_open(c);
    assert_all_there(s);
    store_close(s);
}

/* ---- rows --------------------------------------------------------------------------------------------------- */

#define FIRST_BLOCK "lsn=(SELECT min(lsn) FROM records WHERE type=1)"
static const char *const false_rows[] = {
    "DELETE FROM records",
    "DELETE FROM records WHERE type=1",
    "DELETE FROM records WHERE type=2",
    "DELETE FROM records WHERE type=4",
    "DELETE FROM records WHERE " FIRST_BLOCK,
    /* to another record's place, all of it right */
    "UPDATE records SET (segment, offset, lsn, size) = (SELECT segment, offset, lsn, size FROM records WHERE "
    "type=1 "
    "ORDER BY lsn LIMIT 1 OFFSET 1) WHERE " FIRST_BLOCK,
    "UPDATE records SET (segment, offset, lsn, size) = (SELECT segment, offset, lsn, size FROM records WHERE "
    "type=1 "
    "ORDER BY lsn DESC LIMIT 1) WHERE type=2",
    /* to where none is */
    "UPDATE records SET offset=offset+4096 WHERE type=1",
    "UPDATE records SET offset=offset+1 WHERE " FIRST_BLOCK,
    "UPDATE records SET segment=segment+1 WHERE type=1",
    "UPDATE records SET segment=1000 WHERE type=1",
    "UPDATE records SET offset=-4096 WHERE type=1",
    /* two for one another */
    "CREATE TEMP TABLE a AS SELECT * FROM records WHERE type=1 ORDER BY lsn LIMIT 2;"
    "UPDATE records SET (segment, offset, lsn, size) = (SELECT segment, offset, lsn, size FROM a WHERE "
    "a.id<>records.id)"
    "WHERE type=1 AND id IN (SELECT id FROM a)",
    "CREATE TEMP TABLE a AS SELECT * FROM records WHERE type=2;"
    "UPDATE records SET (segment, offset, lsn, size) = (SELECT segment, offset, lsn, size FROM a WHERE "
    "a.id<>records.id)"
    "WHERE type=2",
    /* of another kind, size, age, name or tenant */
    "UPDATE OR REPLACE records SET type=4 WHERE type=1",
    "UPDATE records SET type=2 WHERE type=1",
    "UPDATE records SET type=1 WHERE type=2",
    "UPDATE records SET size=size-4096 WHERE type=1",
    "UPDATE records SET lsn=lsn-1",
    "UPDATE records SET lsn=lsn+1000000",
    "UPDATE records SET id=randomblob(32)",
    "UPDATE records SET key_id=randomblob(16)",
};

/* Which order does not matter; that the lie is found out does. */
static void test_false_rows_cost_nothing(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(false_rows); i++) {
        for (int read_first = 0; read_first < 2; read_first++) {
            struct store_config c;
            char *dir = make_store(&c);
            lie(dir, false_rows[i]);
            struct store *s = fixture_open(&c);
            if (read_first) /* and forgets what is not where the index says */
                count_right(s);
            compact_all(s);
            put_block(s, "acme", 100); /* it goes on */
            store_close(s);
            if (!is_found_out(dir))
                fail_msg("not found out: %s", false_rows[i]);
            s = fixture_open(&c);
            if (count_right(s) != ALL)
                fail_msg("%d of %d left: %s", count_right(s), ALL, false_rows[i]);
            assert_true(has_block(s, "acme", 100));
            compact_all(s);
            assert_all_there(s);
            store_close(s);
            assert_rebuilt(&c);
            fixture_remove(dir);
        }
    }
}

/* Nobody compacts, but somebody asks: where the index says that one record is, there is another. */
static void test_reading_finds_out(void **state)
{
    (void)state;
    static const char *const moved[] = {
        "CREATE TEMP TABLE a AS SELECT * FROM records WHERE type=1 ORDER BY lsn LIMIT 2;"
        "UPDATE records SET (segment, offset, lsn, size) = (SELECT segment, offset, lsn, size FROM a WHERE "
        "a.id<>records.id) WHERE type=1 AND id IN (SELECT id FROM a)",
        "UPDATE records SET (segment, offset, lsn, size) = (SELECT segment, offset, lsn, size FROM records "
        "WHERE "
        "type=1 ORDER BY lsn LIMIT 1) WHERE type=2",
        "UPDATE records SET lsn=lsn-1 WHERE type=1",
    };
    for (size_t i = 0; i < TD_COUNT(moved); i++) {
        struct store_config c;
        char *dir = make_store(&c);
        lie(dir, moved[i]);
        struct store *s = fixture_open(&c);
        assert_true(count_right(s) < ALL);
        store_close(s);
        assert_true(is_found_out(dir));
        s = fixture_open(&c);
        assert_all_there(s);
        store_close(s);
        fixture_remove(dir);
    }
}

/* Nobody compacts: what looks empty is removed by itself, and may not be. */
static void test_a_segment_that_looks_empty_stays(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c);
    lie(dir, "DELETE FROM records");
    struct store *s = fixture_open(&c);
    let_housekeeping_run(s);
    store_close(s);
    assert_true(is_found_out(dir));
    s = fixture_open(&c);
    assert_all_there(s);
    let_housekeeping_run(s);
    store_close(s);
    s = fixture_open(&c); /* with an index again */
    assert_all_there(s);
    store_close(s);
    fixture_remove(dir);
}

/* Whatever is replaced or deleted by the name of a false row, the record that it points to is another's. */
static void test_a_false_row_voids_nothing(void **state)
{
    (void)state;
    static const char place[] =
        "UPDATE records SET (segment, offset, lsn, size) = (SELECT segment, offset, lsn, size FROM records "
        "WHERE type=1 AND lsn=(SELECT min(lsn) FROM records WHERE type=1)) WHERE ";
    char sql[512], hex[65];
    for (int what = 0; what < 4; what++) {
        struct store_config c;
        struct kv_block_id id;
        char *dir = make_store(&c);
        struct store *s = fixture_open(&c);
        put_block(s, "labs", 0); /* the same id, of another tenant */
        fixture_id(0, &id);
        assert_int_equal(store_pin(s, "acme", &id, true, NULL), 0); /* the same id, of another type */
        store_close(s);
        fixture_id(what == 0 ? 1 : 0, &id);
        hex_encode(id.bytes, 32, hex);
        snprintf(sql, sizeof sql,
                 "%s type=%d AND id=x'%s' AND lsn>(SELECT min(lsn) FROM records WHERE type=1)", place,
                 what == 2 ? 4 : 1, hex);
        if (what == 3)
            snprintf(sql, sizeof sql, "%s type=2 AND version=2", place);
        lie(dir, sql);
        s = fixture_open(&c);
        if (what == 0)
            delete_block(s, "acme", 1);
        else if (what == 1)
            delete_block(s, "labs", 0);
        else if (what == 2)
            assert_int_equal(store_pin(s, "acme", &id, false, NULL), 0);
        else
            assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 2, "third"), 0);
        let_housekeeping_run(s);
        store_close(s);
        uint64_t records;
        assert_int_equal(store_rebuild(&c, NULL, NULL, &records, NULL), 0);
        s = fixture_open(&c);
        assert_true(has_block(s, "acme", 0));
        assert_int_equal(has_block(s, "acme", 1), what != 0);
        assert_int_equal(has_block(s, "labs", 0), what != 1);
        assert_int_equal(is_pinned(s, 0), what != 2);
        assert_true(has_text(s, "one", what == 3 ? "third" : "second"));
        store_close(s);
        fixture_remove(dir);
    }
}

/* ---- lengths and numbers ------------------------------------------------------------------------------------ */

static off_t size_of(const char *dir, const char *name)
{
    struct stat st;
    return stat(path_in(dir, name), &st) == 0 ? st.st_size : -1;
}

static void last_segment(const char *dir, char name[SEGMENT_NAME_SIZE])
{
    uint64_t id = 1;
    for (char next[SEGMENT_NAME_SIZE]; segment_name(id + 1, next), is_there(dir, next);)
        id++;
    segment_name(id, name);
}

/* A replay that began inside a record would find nothing there and cut it off. */
static void test_a_length_inside_a_record(void **state)
{
    (void)state;
    static const int back[] = {4096, 8192, 4095, 1};
    for (size_t i = 0; i < TD_COUNT(back); i++) {
        struct store_config c;
        char *dir = make_store(&c), name[SEGMENT_NAME_SIZE], sql[128];
        struct store *s = fixture_open(&c);
        put_block(s, "acme", 100);
        store_close(s);
        last_segment(dir, name);
        off_t end = size_of(dir, name) - RECORD_PAGE; /* as a crash leaves it: no seal */
        assert_int_equal(truncate(path_in(dir, name), end), 0);
        snprintf(sql, sizeof sql, "UPDATE segments SET applied=%lld WHERE id=(SELECT max(id) FROM segments)",
                 (long long)end - back[i]);
        lie(dir, sql);
        s = fixture_open(&c);
        assert_true(has_block(s, "acme", 100));
        assert_all_there(s);
        store_close(s);
        assert_true(size_of(dir, name) >= end);
        assert_true(is_found_out(dir));
        fixture_remove(dir);
    }
}

/* What is written next must count as newer than all that is there. */
static void test_a_next_lsn_of_the_past(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c);
    lie(dir, "UPDATE meta SET value=1 WHERE name='next_lsn'; UPDATE records SET lsn=0");
    struct store *s = fixture_open(&c);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 2, "third"), 0);
    delete_block(s, "acme", 7);
    store_close(s);
    uint64_t records;
    assert_int_equal(store_rebuild(&c, NULL, NULL, &records, NULL), 0);
    s = fixture_open(&c);
    assert_true(has_text(s, "one", "third"));
    assert_false(has_block(s, "acme", 7));
    store_close(s);
    fixture_remove(dir);
}

/* A row that calls itself newer than what the log has behind the lengths. */
static void test_a_row_of_the_future(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c), command[1100];
    snprintf(command, sizeof command, "cp %s/" INDEX_FILE " %s/old", dir, dir);
    assert_int_equal(system(command), 0);
    struct store *s = fixture_open(&c);
    assert_int_equal(fixture_conv_put(s, "acme", "ann", "one", 2, "third"), 0);
    store_close(s);
    snprintf(command, sizeof command, "mv %s/old %s/" INDEX_FILE, dir, dir);
    assert_int_equal(system(command), 0);
    lie(dir, "UPDATE records SET lsn=1000000; UPDATE meta SET value=2000000");
    s = fixture_open(&c);
    assert_true(has_text(s, "one", "third"));
    for (uint64_t i = 0; i < BLOCKS; i++)
        assert_int_equal(has_block(s, "acme", i), i != DELETED);
    store_close(s);
    assert_true(is_found_out(dir));
    unlink(path_in(dir, INDEX_FILE ".damaged"));
    /* At once: the tombstone of its eviction would count for what is newer than it. */
    lie(dir, "UPDATE records SET lsn=9000000");
    s = fixture_open(&c);
    assert_true(is_found_out(dir));
    store_close(s);
    fixture_remove(dir);
}

/* Ids of segments that would begin again at 0, where nobody looks for them. */
static void test_a_segment_of_the_future(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c);
    lie(dir, "INSERT INTO segments VALUES(-2, 1, 4096, 0)");
    for (uint64_t i = 0; i < 3; i++) {
        struct store *s = fixture_open(&c);
        put_block(s, "acme", 100 + i);
        store_close(s);
        index_set_aside(dir, false); /* the ids go on from those of the files */
    }
    assert_rebuilt(&c);
    struct store *s = fixture_open(&c);
    for (uint64_t i = 0; i < 3; i++)
        assert_true(has_block(s, "acme", 100 + i));
    store_close(s);
    fixture_remove(dir);
}

/* ---- what is true ------------------------------------------------------------------------------------------- */

static void copy_file(const char *dir, const char *from, const char *to)
{
    char command[1100];
    snprintf(command, sizeof command, "cp %s/%s %s/%s", dir, from, dir, to);
    assert_int_equal(system(command), 0);
}

/* A power loss takes voids back that the index has heard of: the tombstones and the newer records say what they said. And where the index leaves
 * tombstones out, they are copied all the same. */
static void test_lost_voids_are_no_lie(void **state)
{
    (void)state;
    static const char first[] = "seg-0000000000000001.td", second[] = "seg-0000000000000002.td";
    for (int without = 0; without < 2; without++) {
        struct store_config c;
        char *dir = make_store(&c);
        copy_file(dir, first, "a");
        copy_file(dir, second, "b");
        struct store *s = fixture_open(&c);
        delete_block(s, "acme", 0);
        delete_block(s, "acme", 2);
        assert_int_equal(fixture_conv_put(s, "acme", "ann", "two", 1, "newer"), 0);
        for (uint64_t i = 100; i < 110; i++)
            put_block(s, "acme", i);
        store_close(s);
        copy_file(dir, "a", first);
        copy_file(dir, "b", second);
        if (without)
            lie(dir, "UPDATE segments SET tombstones=0 WHERE id>2");
        for (int life = 0; life < 3; life++) {
            s = fixture_open(&c);
            if (life == 0) { /* the later segments first, with the tombstones */
                segment_suspect(&s->segments, 1);
                segment_suspect(&s->segments, 2);
            }
            compact_all(s);
            for (uint64_t i = 100; i < 110; i++)
                assert_true(has_block(s, "acme", i));
            assert_false(has_block(s, "acme", 0));
            assert_true(has_text(s, "two", "newer"));
            store_close(s);
            assert_false(is_found_out(dir));
            if (life == 0)
                assert_true(is_there(dir, first));
        }
        assert_false(is_there(dir, first));
        uint64_t records;
        assert_int_equal(store_rebuild(&c, NULL, NULL, &records, NULL), 0);
        s = fixture_open(&c);
        assert_false(has_block(s, "acme", 0));
        assert_false(has_block(s, "acme", 2));
        assert_true(has_text(s, "two", "newer"));
        store_close(s);
        fixture_remove(dir);
    }
}

/* A record whose body is damaged is forgotten once somebody has read it. That its head still stands is nobody's fault. */
static void test_damage_is_no_lie(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c);
    int fd = open(path_in(dir, "seg-0000000000000001.td"), O_RDWR);
    assert_int_equal(pwrite(fd, "damage", 6, 2 * RECORD_PAGE + 100), 6);
    close(fd);
    struct store *s = fixture_open(&c);
    assert_int_equal(count_right(s), ALL - 1);
    compact_all(s);
    assert_int_equal(count_right(s), ALL - 1);
    store_close(s);
    assert_false(is_found_out(dir));
    assert_false(is_there(dir, "seg-0000000000000001.td"));
    fixture_remove(dir);
}

static void test_a_true_index_stays(void **state)
{
    (void)state;
    struct store_config c;
    char *dir = make_store(&c);
    for (int life = 0; life < 3; life++) {
        struct store *s = fixture_open(&c);
        assert_all_there(s);
        compact_all(s);
        assert_all_there(s);
        let_housekeeping_run(s);
        store_close(s);
        assert_false(is_found_out(dir));
    }
    struct store *s = fixture_open(&c);
    assert_int_equal(store_erase_tenant(s, "acme", NULL), 0);
    put_block(s, "labs", 1);
    compact_all(s);
    store_close(s);
    s = fixture_open(&c);
    compact_all(s);
    assert_true(has_block(s, "labs", 1));
    store_close(s);
    assert_false(is_found_out(dir));
    fixture_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_false_rows_cost_nothing),
        cmocka_unit_test(test_reading_finds_out),
        cmocka_unit_test(test_a_segment_that_looks_empty_stays),
        cmocka_unit_test(test_a_false_row_voids_nothing),
        cmocka_unit_test(test_a_length_inside_a_record),
        cmocka_unit_test(test_a_next_lsn_of_the_past),
        cmocka_unit_test(test_a_row_of_the_future),
        cmocka_unit_test(test_a_segment_of_the_future),
        cmocka_unit_test(test_lost_voids_are_no_lie),
        cmocka_unit_test(test_damage_is_no_lie),
        cmocka_unit_test(test_a_true_index_stays),
    };
    log_set_level(LOG_ERROR + 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
