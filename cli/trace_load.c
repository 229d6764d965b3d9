/* trace_load: read a trace. Its ids may be any integers; a hash table numbers them from 0, so that what replays needs arrays only. Every bound of
 * trace.h holds before memory is taken. */
#include "cli/trace.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

struct trace_ids { /* open addressing, at most half full */
    struct {
        int64_t id;
        uint32_t number; /* + 1; 0: free */
    } * slots;
    size_t slot_count;
};

static size_t slot_of(const struct trace_ids *ids, int64_t id)
{
    uint64_t x = (uint64_t)id * 0x9e3779b97f4a7c15u;
    size_t at = (size_t)(x ^ x >> 32) & (ids->slot_count - 1);
    while (ids->slots[at].number && ids->slots[at].id != id)
        at = (at + 1) & (ids->slot_count - 1);
    return at;
}

static bool ids_grow(struct trace_ids *ids)
{
    struct trace_ids larger = {.slot_count = ids->slot_count ? 2 * ids->slot_count : 1024};
    larger.slots = calloc(larger.slot_count, sizeof *larger.slots);
    if (!larger.slots)
        return false;
    for (size_t i = 0; i < ids->slot_count; i++)
        if (ids->slots[i].number)
            larger.slots[slot_of(&larger, ids->slots[i].id)] = ids->slots[i];
    free(ids->slots);
    *ids = larger;
    return true;
}

static bool number_of(struct trace *t, int64_t id, uint32_t *number)
{
    if (2 * (size_t)(t->unique + 1) > t->ids->slot_count && !ids_grow(t->ids))
        return false;
    size_t at = slot_of(t->ids, id);
    if (!t->ids->slots[at].number) {
        t->ids->slots[at].id = id;
        t->ids->slots[at].number = ++t->unique;
    }
    *number = t->ids->slots[at].number - 1;
    return true;
}

/* Room for `more` items behind `count` in an array of `capacity`; doubles. */
static bool reserve(void **items, size_t *capacity, size_t count, size_t more, size_t item_size)
{
    size_t wanted = TD_MAX(*capacity, (size_t)1024);
    while (wanted < count + more)
        wanted *= 2;
    if (wanted == *capacity)
        return true;
    void *grown = realloc(*items, wanted * item_size);
    if (!grown)
        return false;
    *items = grown;
    *capacity = wanted;
    return true;
}

static int add_request(struct trace *t, json_int_t time_ms, const json_t *hashes, struct td_error *err)
{
    size_t count = json_array_size(hashes);
    if (count > TRACE_CHAIN_MAX || t->reference_count + count > TRACE_REFERENCES_MAX ||
        t->request_count == TRACE_REQUESTS_MAX)
        return td_fail(err, -TD_ERR_LIMIT, "more than %u blocks in a request, %u in all or %u requests",
                       TRACE_CHAIN_MAX, TRACE_REFERENCES_MAX, TRACE_REQUESTS_MAX);
    t->ids = t->ids ? t->ids : calloc(1, sizeof *t->ids);
    if (!t->ids ||
        !reserve((void **)&t->requests, &t->request_capacity, t->request_count, 1, sizeof *t->requests) ||
        !reserve((void **)&t->blocks, &t->reference_capacity, t->reference_count, count, sizeof *t->blocks))
        return td_fail(err, -TD_ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < count; i++) {
        const json_t *id = json_array_get(hashes, i);
        if (!json_is_integer(id))
            return td_fail(err, -TD_ERR_FORMAT, "hash_ids must be integers");
        if (!number_of(t, json_integer_value(id), &t->blocks[t->reference_count + i]))
            return td_fail(err, -TD_ERR_NOMEM, "out of memory");
    }
    t->requests[t->request_count++] =
        (struct trace_request){(uint64_t)time_ms, (uint32_t)t->reference_count, (uint32_t)count};
    t->reference_count += count;
    return 0;
}

int trace_add_line(struct trace *t, const char *line, size_t size, struct td_error *err)
{
    json_error_t e;
    json_t *json = json_loadb(line, size, JSON_REJECT_DUPLICATES, &e);
    if (!json)
        return td_fail(err, -TD_ERR_FORMAT, "%s", e.text);
    const json_t *time = json_object_get(json, "timestamp"), *hashes = json_object_get(json, "hash_ids");
    int rc;
    if (!json_is_integer(time) || json_integer_value(time) < 0 || !json_is_array(hashes))
        rc = td_fail(err, -TD_ERR_FORMAT,
                     "not a request: needs \"timestamp\" (milliseconds, not negative) and \"hash_ids\"");
    else if (t->request_count &&
             (uint64_t)json_integer_value(time) < t->requests[t->request_count - 1].time_ms)
        rc = td_fail(err, -TD_ERR_FORMAT, "requests are not in order of time");
    else
        rc = add_request(t, json_integer_value(time), hashes, err);
    json_decref(json);
    return rc;
}

static int load_lines(struct trace *t, FILE *file, char *line, const char *path, uint64_t total,
                      trace_progress progress, void *label, struct td_error *err)
{
    uint64_t number = 0, done = 0;
    while (fgets(line, TRACE_LINE_MAX, file)) {
        struct td_error why = {0};
        size_t size = strlen(line);
        bool whole = size > 0 && (line[size - 1] == '\n' || size + 1 < TRACE_LINE_MAX);
        number++;
        done += size;
        if (!whole)
            return td_fail(err, -TD_ERR_FORMAT,
                           "cannot read trace %s: line %llu: empty or longer than %u bytes", path,
                           (unsigned long long)number, TRACE_LINE_MAX - 2);
        if (strspn(line, " \t\r\n") == size)
            continue;
        int rc = trace_add_line(t, line, size, &why);
        if (rc < 0)
            return td_fail(err, rc, "cannot read trace %s: line %llu: %s", path, (unsigned long long)number,
                           why.text);
        progress(label, TD_MIN(done, total), total);
    }
    if (ferror(file))
        return td_fail(err, -TD_ERR_IO, "cannot read trace %s: %s", path, strerror(errno));
    if (t->reference_count == 0)
        return td_fail(err, -TD_ERR_FORMAT, "cannot read trace %s: no requests in it", path);
    return 0;
}

int trace_load(struct trace *t, const char *path, trace_progress progress, void *label, struct td_error *err)
{
    struct stat st;
    memset(t, 0, sizeof *t);
    FILE *file = fopen(path, "rb");
    if (!file)
        return td_fail(err, -TD_ERR_IO, "cannot read trace %s: %s", path, strerror(errno));
    char *line = malloc(TRACE_LINE_MAX);
    int rc = line ? 0 : td_fail(err, -TD_ERR_NOMEM, "cannot read trace %s: out of memory", path);
    uint64_t total = fstat(fileno(file), &st) == 0 ? (uint64_t)st.st_size : 0;
    if (rc == 0)
        rc = load_lines(t, file, line, path, total, progress, label, err);
    free(line);
    fclose(file);
    return rc;
}

void trace_free(struct trace *t)
{
    if (t->ids)
        free(t->ids->slots);
    free(t->ids);
    free(t->requests);
    free(t->blocks);
    memset(t, 0, sizeof *t);
}
