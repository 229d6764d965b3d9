/* gguf: opening and closing of files, look-ups and typed getters. The parser, which establishes all that the
 * accessors rely on, is gguf_parse.c.
 *
 * The file is mapped, not read: weights are used in place and pages that are never touched cost nothing. The
 * price is that a file which somebody truncates in place while it is mapped raises SIGBUS, and that one which is
 * written into changes under who computes with it (gguf_intact tells); installers therefore replace model files by
 * rename, as gguf_slice does. */
#include "shared/gguf_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

const struct gguf_type_info *gguf_type_info(uint32_t type)
{
    static const struct gguf_type_info infos[] = {
        [GGUF_F32] = {"F32", 1, 4},       [GGUF_F16] = {"F16", 1, 2},       [GGUF_Q4_0] = {"Q4_0", 32, 18},
        [GGUF_Q4_1] = {"Q4_1", 32, 20},   [GGUF_Q5_0] = {"Q5_0", 32, 22},   [GGUF_Q5_1] = {"Q5_1", 32, 24},
        [GGUF_Q8_0] = {"Q8_0", 32, 34},   [GGUF_Q4_K] = {"Q4_K", 256, 144}, [GGUF_Q5_K] = {"Q5_K", 256, 176},
        [GGUF_Q6_K] = {"Q6_K", 256, 210}, [GGUF_BF16] = {"BF16", 1, 2},
    };
    if (type >= TD_COUNT(infos) || !infos[type].name)
        return NULL;
    return &infos[type];
}

const char *gguf_label(const struct gguf *g)
{
    return g->path && g->path[0] ? g->path : "GGUF data";
}

const char *gguf_show(struct span name, char out[GGUF_SHOW_SIZE])
{
    size_t shown = TD_MIN(name.size, (size_t)GGUF_SHOW_SIZE - 1);
    for (size_t i = 0; i < shown; i++)
        out[i] = name.data[i] > 0x20 && name.data[i] < 0x7f ? (char)name.data[i] : '?';
    out[shown] = 0;
    return out;
}

int gguf_span_compare(struct span a, struct span b)
{
    int order = memcmp(a.data, b.data, TD_MIN(a.size, b.size));
    if (order)
        return order;
    return (a.size > b.size) - (a.size < b.size);
}

bool gguf_span_is(struct span s, const char *text)
{
    size_t size = strlen(text);
    return s.size == size && memcmp(s.data, text, size) == 0;
}

bool gguf_has_prefix(struct span s, const char *prefix)
{
    size_t size = strlen(prefix);
    return s.size >= size && memcmp(s.data, prefix, size) == 0;
}

/* --- opening -------------------------------------------------------------------------------------------- */

static uint64_t time_ns(struct timespec t)
{
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int map_file(struct gguf *g, const char *path, struct td_error *err)
{
    struct stat st;
    int fd =
        open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hold us up before it is refused */
    if (fd < 0) {
        int code = errno == ENOENT ? -TD_ERR_NOTFOUND : -TD_ERR_IO;
        return td_fail(err, code, "cannot load %s: %s; check the path of the model file", path,
                       strerror(errno));
    }
    int rc = 0;
    if (fstat(fd, &st) != 0)
        rc = td_fail(err, -TD_ERR_IO, "cannot load %s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = td_fail(err, -TD_ERR_ARG,
                     "cannot load %s: it is not a regular file; give the path of a .gguf file", path);
    else if (st.st_size == 0)
        rc = td_fail(err, -TD_ERR_TRUNCATED, "cannot load %s: the file is empty; download the file again",
                     path);
    if (rc == 0) {
        void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            rc = td_fail(err, -TD_ERR_IO, "cannot load %s: mapping %llu bytes failed: %s", path,
                         (unsigned long long)st.st_size, strerror(errno));
        } else {
            g->map = map;
            g->map_size = (size_t)st.st_size;
            g->mapped = true;
            g->identity.size = (uint64_t)st.st_size;
            g->identity.mtime_ns = time_ns(st.st_mtim);
            g->identity.ctime_ns = time_ns(st.st_ctim);
            g->identity.inode = (uint64_t)st.st_ino;
        }
    }
    if (rc == 0)
        g->fd = fd;
    else
        close(fd);
    return rc;
}

static int gguf_load(const char *path, const void *data, size_t size, struct gguf **out, struct td_error *err)
{
    *out = NULL;
    struct gguf *g = calloc(1, sizeof *g);
    if (g) {
        g->fd = -1;
        pthread_mutex_init(&g->intact_lock, NULL);
        g->path = strdup(path);
    }
    if (!g || !g->path) {
        gguf_close(g);
        return td_fail(err, -TD_ERR_NOMEM, "cannot load %s: out of memory", path[0] ? path : "GGUF data");
    }
    int rc = 0;
    if (path[0])
        rc = map_file(g, path, err);
    else
        g->map = data, g->map_size = size, g->identity.size = size;
    if (rc == 0)
        rc = gguf_parse_map(g, err);
    if (rc != 0) {
        gguf_close(g);
        return rc;
    }
    *out = g;
    return 0;
}

int gguf_open(const char *path, struct gguf **out, struct td_error *err)
{
    if (!path || !path[0]) {
        *out = NULL;
        return td_fail(err, -TD_ERR_ARG, "cannot load the model: no path was given");
    }
    return gguf_load(path, NULL, 0, out, err);
}

int gguf_parse(const void *data, size_t size, struct gguf **out, struct td_error *err)
{
    return gguf_load("", data, size, out, err);
}

void gguf_close(struct gguf *g)
{
    if (!g)
        return;
    for (size_t i = 0; g->values && i < g->value_count; i++)
        free((void *)g->values[i].string_offsets);
    free(g->values);
    free(g->value_order);
    free(g->tensors);
    free(g->tensor_order);
    free(g->digests);
    if (g->mapped)
        munmap((void *)g->map, g->map_size);
    if (g->fd >= 0)
        close(g->fd);
    pthread_mutex_destroy(&g->intact_lock);
    free(g->path);
    free(g);
}

bool gguf_is_touched(struct gguf *g)
{
    struct stat st;
    if (g->fd < 0)
        return false;
    if (fstat(g->fd, &st) != 0)
        return true;
    uint64_t size = (uint64_t)st.st_size, mtime_ns = time_ns(st.st_mtim);
    bool touched = size != g->identity.size || mtime_ns != g->identity.mtime_ns;
    g->identity.size = size;
    g->identity.mtime_ns = mtime_ns;
    return touched;
}

/* --- look-ups ------------------------------------------------------------------------------------------- */

const char *gguf_path(const struct gguf *g)
{
    return g->path;
}

uint64_t gguf_file_size(const struct gguf *g)
{
    return g->map_size;
}

size_t gguf_tensor_count(const struct gguf *g)
{
    return g->tensor_count;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t index)
{
    return index < g->tensor_count ? &g->tensors[index] : NULL;
}

const struct gguf_value *gguf_find(const struct gguf *g, const char *key)
{
    struct span wanted = {(const uint8_t *)key, strlen(key)};
    for (size_t low = 0, high = g->value_count; low < high;) {
        size_t middle = low + (high - low) / 2;
        const struct gguf_value *v = &g->values[g->value_order[middle]];
        int order = gguf_span_compare(wanted, v->key);
        if (order == 0)
            return v;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *g, struct span name)
{
    for (size_t low = 0, high = g->tensor_count; low < high;) {
        size_t middle = low + (high - low) / 2;
        const struct gguf_tensor *t = &g->tensors[g->tensor_order[middle]];
        int order = gguf_span_compare(name, t->name);
        if (order == 0)
            return t;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name)
{
    return gguf_find_tensor(g, (struct span){(const uint8_t *)name, strlen(name)});
}

uint32_t gguf_layers_held(const struct gguf *g)
{
    return g->layer_end;
}

/* --- typed getters -------------------------------------------------------------------------------------- */

static float load_f32(const uint8_t *p)
{
    uint32_t bits = load_le32(p);
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static double load_f64(const uint8_t *p)
{
    uint64_t bits = load_le64(p);
    double d;
    memcpy(&d, &bits, sizeof d);
    return d;
}

/* One element of an integer type; false for other types and for u64 values that an i64 cannot hold. */
static bool load_i64(enum gguf_value_type type, const uint8_t *p, int64_t *out)
{
    switch (type) {
    case GGUF_VALUE_U8:
        *out = p[0];
        return true;
    case GGUF_VALUE_I8:
        *out = (int8_t)p[0];
        return true;
    case GGUF_VALUE_U16:
        *out = load_le16(p);
        return true;
    case GGUF_VALUE_I16:
        *out = (int16_t)load_le16(p);
        return true;
    case GGUF_VALUE_U32:
        *out = load_le32(p);
        return true;
    case GGUF_VALUE_I32:
        *out = (int32_t)load_le32(p);
        return true;
    case GGUF_VALUE_I64:
        *out = (int64_t)load_le64(p);
        return true;
    case GGUF_VALUE_U64:
        if (load_le64(p) > INT64_MAX)
            return false;
        *out = (int64_t)load_le64(p);
        return true;
    default:
        return false;
    }
}

/* One element as f32, if f32 holds its value exactly (a NaN stays a NaN). */
static bool load_exact_f32(enum gguf_value_type type, const uint8_t *p, float *out)
{
    int64_t integer;
    if (type == GGUF_VALUE_F32) {
        *out = load_f32(p);
        return true;
    }
    if (type == GGUF_VALUE_F64) {
        double d = load_f64(p);
        if (fabs(d) > 3.4028234663852886e38 && !isinf(d)) /* the cast would be undefined */
            return false;
        float f = (float)d;
        if ((double)f != d && !isnan(d))
            return false;
        *out = f;
        return true;
    }
    if (!load_i64(type, p, &integer) || integer > (1 << 24) || integer < -(1 << 24))
        return false;
    *out = (float)integer;
    return true;
}

bool gguf_get_u32(const struct gguf *g, const char *key, uint32_t *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    int64_t integer;
    if (!v || !load_i64(v->type, v->raw.data, &integer) || integer < 0 || integer > UINT32_MAX)
        return false;
    *out = (uint32_t)integer;
    return true;
}

bool gguf_get_f32(const struct gguf *g, const char *key, float *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    return v && load_exact_f32(v->type, v->raw.data, out);
}

bool gguf_get_bool(const struct gguf *g, const char *key, bool *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    if (!v || v->type != GGUF_VALUE_BOOL)
        return false;
    *out = v->raw.data[0] != 0;
    return true;
}

bool gguf_get_string(const struct gguf *g, const char *key, struct span *out)
{
    const struct gguf_value *v = gguf_find(g, key);
    if (!v || v->type != GGUF_VALUE_STRING)
        return false;
    *out = v->raw;
    return true;
}

/* Bytes of a fixed-size element of the array, or NULL. */
static const uint8_t *element(const struct gguf_value *array, uint64_t index)
{
    if (!array || array->type != GGUF_VALUE_ARRAY || index >= array->count || array->string_offsets)
        return NULL;
    return array->raw.data + index * (array->raw.size / array->count);
}

bool gguf_array_i64(const struct gguf_value *array, uint64_t index, int64_t *out)
{
    const uint8_t *p = element(array, index);
    return p && load_i64(array->element_type, p, out);
}

bool gguf_array_f32(const struct gguf_value *array, uint64_t index, float *out)
{
    const uint8_t *p = element(array, index);
    return p && load_exact_f32(array->element_type, p, out);
}

bool gguf_array_string(const struct gguf_value *array, uint64_t index, struct span *out)
{
    if (!array || array->type != GGUF_VALUE_ARRAY || index >= array->count || !array->string_offsets)
        return false;
    const uint8_t *field = array->raw.data + array->string_offsets[index];
    *out = (struct span){field + 8, (size_t)load_le64(field)};
    return true;
}
