/* index: see index.h. One table for the newest record of each id, one for how far each segment is reflected. */
#include "store/index.h"
#include "store/io.h"
#include <fcntl.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define INDEX_VERSION      1
#define INDEX_BUSY_WAIT_MS 50

struct index {
    sqlite3 *db;
    sqlite3_stmt *put, *remove, *remove_all, *put_segment, *put_lsn;
};

static const char schema[] =
    "CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS segments(id INTEGER PRIMARY KEY, nonce INTEGER, applied INTEGER, tombstones "
    "INTEGER);"
    "CREATE TABLE IF NOT EXISTS records("
    "type INTEGER, key_id BLOB, id BLOB, segment INTEGER, offset INTEGER, lsn INTEGER, size INTEGER,"
    "quality INTEGER, block INTEGER, layers INTEGER, principal BLOB, version INTEGER, updated INTEGER,"
    "PRIMARY KEY(type, key_id, id)) WITHOUT ROWID;";

static int status_of(int sqlite_rc)
{
    switch (sqlite_rc & 0xff) {
    case SQLITE_OK:
    case SQLITE_DONE:
    case SQLITE_ROW:
        return 0;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
        return -TD_ERR_BUSY;
    case SQLITE_FULL:
        return -TD_ERR_DISKFULL;
    case SQLITE_IOERR:
    case SQLITE_CANTOPEN:
        return -TD_ERR_IO;
    default:
        return -TD_ERR_FORMAT;
    }
}

static int run(struct index *x, const char *sql)
{
    return status_of(sqlite3_exec(x->db, sql, NULL, NULL, NULL));
}

/* ---- open ------------------------------------------------------------------------------------------------- */

/* One integer from a query; -1 when there is none. */
static int64_t query_integer(struct index *x, const char *sql)
{
    sqlite3_stmt *q = NULL;
    int64_t value = -1;
    if (sqlite3_prepare_v2(x->db, sql, -1, &q, NULL) == SQLITE_OK && sqlite3_step(q) == SQLITE_ROW)
        value = sqlite3_column_int64(q, 0);
    sqlite3_finalize(q);
    return value;
}

static int check_sound(struct index *x)
{
    sqlite3_stmt *q = NULL;
    int rc = sqlite3_prepare_v2(x->db, "PRAGMA quick_check(1)", -1, &q, NULL);
    bool sound = false;
    if (rc == SQLITE_OK && (rc = sqlite3_step(q)) == SQLITE_ROW) {
        const char *answer = (const char *)sqlite3_column_text(q, 0);
        sound = answer && strcmp(answer, "ok") == 0;
    }
    sqlite3_finalize(q);
    rc = status_of(rc);
    return rc < 0 ? rc : sound ? 0 : -TD_ERR_FORMAT;
}

static int prepare_all(struct index *x)
{
    const struct {
        const char *sql;
        sqlite3_stmt **statement;
    } all[] = {
        {"INSERT OR REPLACE INTO records VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?)", &x->put},
        {"DELETE FROM records WHERE type=? AND key_id=? AND id=?", &x->remove},
        {"DELETE FROM records WHERE key_id=?", &x->remove_all},
        {"INSERT INTO segments VALUES(?,?,?,?)", &x->put_segment},
        {"INSERT OR REPLACE INTO meta VALUES('next_lsn',?)", &x->put_lsn},
    };
    for (size_t i = 0; i < TD_COUNT(all); i++) {
        int rc = sqlite3_prepare_v2(x->db, all[i].sql, -1, all[i].statement, NULL);
        if (rc != SQLITE_OK)
            return status_of(rc);
    }
    return 0;
}

static int set_up(struct index *x)
{
    sqlite3_busy_timeout(x->db, INDEX_BUSY_WAIT_MS);
    /* First, so that the index of the log is kept in our memory: as a mapped file that somebody cuts short it would end the process. */
    int rc = run(x, "PRAGMA locking_mode=EXCLUSIVE");
    rc = rc < 0 ? rc : run(x, "PRAGMA journal_mode=WAL");
    rc = rc < 0 ? rc : run(x, "PRAGMA synchronous=NORMAL");
    rc = rc < 0 ? rc : run(x, "BEGIN IMMEDIATE"); /* asks whether somebody else is at it */
    if (rc < 0)
        return rc;
    int64_t version = query_integer(x, "PRAGMA user_version");
    if (version == 0) {
        rc = run(x, schema);
        char stamp[64];
        snprintf(stamp, sizeof stamp, "PRAGMA user_version=%d", INDEX_VERSION);
        rc = rc < 0 ? rc : run(x, stamp);
    } else if (version != INDEX_VERSION) {
        rc = -TD_ERR_FORMAT;
    }
    if (rc < 0) {
        run(x, "ROLLBACK");
        return rc;
    }
    rc = run(x, "COMMIT");
    rc = rc < 0 ? rc : check_sound(x);
    return rc < 0 ? rc : prepare_all(x);
}

int index_open(const char *directory, struct index **out)
{
    char path[IO_PATH_MAX];
    struct index *x = calloc(1, sizeof *x);
    if (!x || !io_path(path, directory, INDEX_FILE)) {
        free(x);
        return -TD_ERR_NOMEM;
    }
    /* SQLite would make it readable for all. An existing file is left to SQLite: closing a descriptor of it would drop its locks. */
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd >= 0)
        close(fd);
    int rc = status_of(sqlite3_open_v2(path, &x->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOFOLLOW, NULL));
    rc = rc < 0 ? rc : set_up(x);
    if (rc < 0) {
        index_close(x);
        return rc;
    }
    *out = x;
    return 0;
}

void index_close(struct index *x)
{
    if (!x)
        return;
    sqlite3_finalize(x->put);
    sqlite3_finalize(x->remove);
    sqlite3_finalize(x->remove_all);
    sqlite3_finalize(x->put_segment);
    sqlite3_finalize(x->put_lsn);
    sqlite3_close(x->db);
    free(x);
}

void index_set_aside(const char *directory, bool keep)
{
    static const char *const suffixes[] = {"-wal", "-shm", ""};
    for (size_t i = 0; i < TD_COUNT(suffixes); i++) {
        char from[IO_PATH_MAX], to[IO_PATH_MAX], name[64];
        snprintf(name, sizeof name, INDEX_FILE "%s", suffixes[i]);
        bool fits = io_path(from, directory, name);
        snprintf(name, sizeof name, INDEX_FILE "%s.damaged", suffixes[i]);
        fits = fits && io_path(to, directory, name);
        if (fits && (!keep || rename(from, to) < 0))
            unlink(from);
    }
}

/* ---- read ------------------------------------------------------------------------------------------------- */

static uint64_t column_u64(sqlite3_stmt *q, int column)
{
    return (uint64_t)sqlite3_column_int64(q, column);
}

static bool column_bytes(sqlite3_stmt *q, int column, void *out, size_t size)
{
    const void *data = sqlite3_column_blob(q, column);
    if (!data || (size_t)sqlite3_column_bytes(q, column) != size)
        return false;
    memcpy(out, data, size);
    return true;
}

int index_each_segment(struct index *x, index_segment_fn fn, void *ctx)
{
    sqlite3_stmt *q = NULL;
    int rc = 0, step = sqlite3_prepare_v2(
                    x->db, "SELECT id, nonce, applied, tombstones FROM segments ORDER BY id", -1, &q, NULL);
    if (step == SQLITE_OK) {
        while (rc == 0 && (step = sqlite3_step(q)) == SQLITE_ROW) {
            struct index_segment s = {column_u64(q, 0), column_u64(q, 1), column_u64(q, 2),
                                      (uint32_t)column_u64(q, 3)};
            rc = fn(ctx, &s);
        }
    }
    sqlite3_finalize(q);
    return rc ? rc : status_of(step);
}

static bool row_read(sqlite3_stmt *q, struct index_row *r)
{
    uint32_t quality = (uint32_t)column_u64(q, 7), layers = (uint32_t)column_u64(q, 9);
    *r = (struct index_row){
        .type = (uint8_t)column_u64(q, 0),
        .segment_id = column_u64(q, 3),
        .offset = column_u64(q, 4),
        .lsn = column_u64(q, 5),
        .stored_size = (uint32_t)column_u64(q, 6),
        .quality = {(uint8_t)quality, (uint8_t)(quality >> 8), (uint8_t)(quality >> 16), 0},
        .block_index = (uint32_t)column_u64(q, 8),
        .layer_begin = (uint16_t)layers,
        .layer_end = (uint16_t)(layers >> 16),
        .version = column_u64(q, 11),
        .updated_us = column_u64(q, 12),
    };
    return (r->type == RECORD_BLOCK || r->type == RECORD_CONVERSATION || r->type == RECORD_PIN) &&
           r->segment_id > 0 && column_bytes(q, 1, r->key_id, sizeof r->key_id) &&
           column_bytes(q, 2, r->id, sizeof r->id) && column_bytes(q, 10, r->principal, sizeof r->principal);
}

int index_each_row(struct index *x, index_row_fn fn, void *ctx)
{
    sqlite3_stmt *q = NULL;
    int rc = 0, step = sqlite3_prepare_v2(x->db, "SELECT * FROM records", -1, &q, NULL);
    if (step == SQLITE_OK) {
        while (rc == 0 && (step = sqlite3_step(q)) == SQLITE_ROW) {
            struct index_row row;
            rc = row_read(q, &row) ? fn(ctx, &row) : -TD_ERR_FORMAT;
        }
    }
    sqlite3_finalize(q);
    return rc ? rc : status_of(step);
}

uint64_t index_next_lsn(struct index *x)
{
    int64_t value = query_integer(x, "SELECT value FROM meta WHERE name='next_lsn'");
    return value < 0 ? 0 : (uint64_t)value;
}

/* ---- write ------------------------------------------------------------------------------------------------ */

static int step_once(sqlite3_stmt *statement)
{
    int rc = status_of(sqlite3_step(statement));
    sqlite3_reset(statement);
    return rc;
}

static int apply_row(struct index *x, const struct index_row *r)
{
    if (r->type == RECORD_TOMBSTONE) {
        sqlite3_bind_blob(x->remove_all, 1, r->key_id, sizeof r->key_id, SQLITE_STATIC);
        return step_once(x->remove_all);
    }
    sqlite3_stmt *q = r->segment_id ? x->put : x->remove;
    sqlite3_bind_int(q, 1, r->type);
    sqlite3_bind_blob(q, 2, r->key_id, sizeof r->key_id, SQLITE_STATIC);
    sqlite3_bind_blob(q, 3, r->id, sizeof r->id, SQLITE_STATIC);
    if (r->segment_id) {
        uint32_t quality =
            (uint32_t)(r->quality.fidelity | r->quality.numerics << 8 | r->quality.provenance << 16);
        sqlite3_bind_int64(q, 4, (int64_t)r->segment_id);
        sqlite3_bind_int64(q, 5, (int64_t)r->offset);
        sqlite3_bind_int64(q, 6, (int64_t)r->lsn);
        sqlite3_bind_int64(q, 7, r->stored_size);
        sqlite3_bind_int64(q, 8, quality);
        sqlite3_bind_int64(q, 9, r->block_index);
        sqlite3_bind_int64(q, 10, r->layer_begin | (int64_t)r->layer_end << 16);
        sqlite3_bind_blob(q, 11, r->principal, sizeof r->principal, SQLITE_STATIC);
        sqlite3_bind_int64(q, 12, (int64_t)r->version);
        sqlite3_bind_int64(q, 13, (int64_t)r->updated_us);
    }
    return step_once(q);
}

int index_apply(struct index *x, const struct index_row *rows, size_t row_count,
                const struct index_segment *segments, size_t segment_count, uint64_t next_lsn)
{
    int rc = run(x, "BEGIN IMMEDIATE");
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < row_count && rc == 0; i++)
        rc = apply_row(x, &rows[i]);
    rc = rc < 0 ? rc : run(x, "DELETE FROM segments");
    for (size_t i = 0; i < segment_count && rc == 0; i++) {
        sqlite3_bind_int64(x->put_segment, 1, (int64_t)segments[i].id);
        sqlite3_bind_int64(x->put_segment, 2, (int64_t)segments[i].nonce);
        sqlite3_bind_int64(x->put_segment, 3, (int64_t)segments[i].applied_end);
        sqlite3_bind_int64(x->put_segment, 4, segments[i].tombstone_count);
        rc = step_once(x->put_segment);
    }
    sqlite3_bind_int64(x->put_lsn, 1, (int64_t)next_lsn);
    rc = rc < 0 ? rc : step_once(x->put_lsn);
    rc = rc < 0 ? rc : run(x, "COMMIT");
    if (rc < 0)
        run(x, "ROLLBACK");
    return rc;
}

int index_checkpoint(struct index *x)
{
    return status_of(sqlite3_wal_checkpoint_v2(x->db, NULL, SQLITE_CHECKPOINT_TRUNCATE, NULL, NULL));
}
