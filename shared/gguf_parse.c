/* gguf_parse: the one place where bytes of a GGUF file are trusted or refused.
 *
 * Layout (all little-endian):
 *   u32 "GGUF" · u32 version = 3 · u64 tensor count · u64 key count
 *   keys:    string name · u32 type · value        (string = u64 length + bytes; array = u32 type · u64 count
 * · elements) tensors: string name · u32 dims · u64 dim[dims] · u32 type · u64 offset from the data section
 *   padding to general.alignment, then the data section.
 *
 * Two passes would be needed to size the tables; the counts in the head are instead checked against the bytes
 * that so many entries take at least, so that a hostile count can reserve no more memory than a small
 * multiple of the file's size. */
#include "shared/gguf_internal.h"

#include <stdlib.h>

#define KEY_SIZE_MIN    (8 + 1 + 4 + 1) /* name length, one character, type, one byte of value */
#define TENSOR_SIZE_MIN (8 + 1 + 4 + 8 + 4 + 8)
#define DIMS_MAX        4

struct parser {
    struct gguf *g;
    struct reader r;
    struct td_error *err;
};

/* Bytes of a fixed-size value, 0 for strings, arrays and unknown types. */
static size_t value_size(uint32_t type)
{
    static const uint8_t sizes[] = {
        [GGUF_VALUE_U8] = 1,  [GGUF_VALUE_I8] = 1,  [GGUF_VALUE_U16] = 2, [GGUF_VALUE_I16] = 2,
        [GGUF_VALUE_U32] = 4, [GGUF_VALUE_I32] = 4, [GGUF_VALUE_F32] = 4, [GGUF_VALUE_BOOL] = 1,
        [GGUF_VALUE_U64] = 8, [GGUF_VALUE_I64] = 8, [GGUF_VALUE_F64] = 8,
    };
    return type < TD_COUNT(sizes) ? sizes[type] : 0;
}

static int fail_truncated(struct parser *p, const char *where, struct span name)
{
    char shown[GGUF_SHOW_SIZE];
    return td_fail(p->err, -TD_ERR_TRUNCATED,
                   "cannot load %s: the file ends inside %s %s; download the file again", gguf_label(p->g),
                   where, gguf_show(name, shown));
}

static int fail_format(struct parser *p, const char *where, struct span name, const char *why)
{
    char shown[GGUF_SHOW_SIZE];
    return td_fail(p->err, -TD_ERR_FORMAT, "cannot load %s: %s %s %s; the file is damaged, download it again",
                   gguf_label(p->g), where, gguf_show(name, shown), why);
}

static int fail_memory(struct parser *p)
{
    return td_fail(p->err, -TD_ERR_NOMEM, "cannot load %s: out of memory for its tables", gguf_label(p->g));
}

static struct span read_string(struct reader *r)
{
    uint64_t size = reader_u64(r);
    const uint8_t *data = size <= SIZE_MAX ? reader_take(r, (size_t)size) : NULL;
    if (!data)
        r->bad = true;
    return (struct span){data, data ? (size_t)size : 0};
}

/* --- keys ----------------------------------------------------------------------------------------------- */

static int read_string_array(struct parser *p, struct gguf_value *v)
{
    uint64_t left = (uint64_t)(p->r.end - p->r.next);
    if (v->count > left / 8)
        return fail_truncated(p, "key", v->key);
    uint64_t *offsets = malloc((size_t)TD_MAX(v->count, 1) * sizeof *offsets);
    if (!offsets)
        return fail_memory(p);
    v->string_offsets = offsets;
    for (uint64_t i = 0; i < v->count && !p->r.bad; i++) {
        offsets[i] = (uint64_t)(p->r.next - v->raw.data);
        read_string(&p->r);
    }
    return p->r.bad ? fail_truncated(p, "key", v->key) : 0;
}

static int read_array(struct parser *p, struct gguf_value *v)
{
    uint32_t type = reader_u32(&p->r);
    v->count = reader_u64(&p->r);
    if (p->r.bad)
        return fail_truncated(p, "key", v->key);
    if (v->count > GGUF_ARRAY_MAX)
        return fail_format(p, "key", v->key, "is an array of too many elements");
    v->element_type = (enum gguf_value_type)type;
    v->raw.data = p->r.next;
    int rc = 0;
    if (type == GGUF_VALUE_STRING)
        rc = read_string_array(p, v);
    else if (value_size(type) == 0)
        return fail_format(p, "key", v->key, "is an array of an unknown or nested type");
    else if (!reader_take(&p->r, (size_t)v->count * value_size(type)))
        return fail_truncated(p, "key", v->key);
    v->raw.size = (size_t)(p->r.next - v->raw.data);
    return rc;
}

static int read_key(struct parser *p, struct gguf_value *v)
{
    v->key = read_string(&p->r);
    uint32_t type = reader_u32(&p->r);
    if (p->r.bad)
        return fail_truncated(p, "key", v->key);
    if (v->key.size == 0 || v->key.size > GGUF_NAME_MAX)
        return fail_format(p, "key", v->key, "has a name of a wrong length");
    v->type = (enum gguf_value_type)type;
    v->element_type = v->type;
    v->count = 1;
    if (type == GGUF_VALUE_ARRAY)
        return read_array(p, v);
    if (type == GGUF_VALUE_STRING) {
        v->raw = read_string(&p->r);
    } else {
        size_t size = value_size(type);
        if (size == 0)
            return fail_format(p, "key", v->key, "has an unknown type");
        v->raw = (struct span){reader_take(&p->r, size), size};
    }
    return p->r.bad ? fail_truncated(p, "key", v->key) : 0;
}

static int compare_values(const void *a, const void *b, void *ctx)
{
    const struct gguf_value *values = ctx;
    return gguf_span_compare(values[*(const uint32_t *)a].key, values[*(const uint32_t *)b].key);
}

static int read_keys(struct parser *p, uint64_t count)
{
    struct gguf *g = p->g;
    g->values = calloc((size_t)TD_MAX(count, 1), sizeof *g->values);
    g->value_order = calloc((size_t)TD_MAX(count, 1), sizeof *g->value_order);
    if (!g->values || !g->value_order)
        return fail_memory(p);
    for (uint64_t i = 0; i < count; i++) {
        g->value_count = (size_t)i + 1; /* so that gguf_close frees what a failure leaves */
        g->value_order[i] = (uint32_t)i;
        int rc = read_key(p, &g->values[i]);
        if (rc != 0)
            return rc;
    }
    qsort_r(g->value_order, g->value_count, sizeof *g->value_order, compare_values, g->values);
    for (size_t i = 1; i < g->value_count; i++) {
        struct span key = g->values[g->value_order[i]].key;
        if (gguf_span_compare(g->values[g->value_order[i - 1]].key, key) == 0)
            return fail_format(p, "key", key, "occurs twice");
    }
    return 0;
}

/* --- tensors -------------------------------------------------------------------------------------------- */

/* Fill t->size from type and dims. A type that Tandem does not read leaves size 0. */
static int measure_tensor(struct parser *p, struct gguf_tensor *t)
{
    const struct gguf_type_info *info = gguf_type_info(t->type);
    uint64_t values = 1;
    for (uint32_t i = 0; i < DIMS_MAX; i++) {
        if (t->dims[i] == 0 || __builtin_mul_overflow(values, t->dims[i], &values) || values > INT64_MAX)
            return fail_format(p, "tensor", t->name, "has impossible dimensions");
    }
    if (!info)
        return 0;
    if (t->dims[0] % info->block_values)
        return fail_format(p, "tensor", t->name, "has rows that are no multiple of its type's block");
    if (__builtin_mul_overflow(values / info->block_values, (uint64_t)info->block_size, &t->size))
        return fail_format(p, "tensor", t->name, "has impossible dimensions");
    return 0;
}

static int read_tensor(struct parser *p, struct gguf_tensor *t, uint64_t *offset)
{
    t->name = read_string(&p->r);
    t->dim_count = reader_u32(&p->r);
    if (p->r.bad)
        return fail_truncated(p, "tensor", t->name);
    if (t->name.size == 0 || t->name.size > GGUF_NAME_MAX)
        return fail_format(p, "tensor", t->name, "has a name of a wrong length");
    if (t->dim_count == 0 || t->dim_count > DIMS_MAX)
        return fail_format(p, "tensor", t->name, "has a wrong number of dimensions");
    for (uint32_t i = 0; i < DIMS_MAX; i++)
        t->dims[i] = i < t->dim_count ? reader_u64(&p->r) : 1;
    t->type = reader_u32(&p->r);
    *offset = reader_u64(&p->r);
    if (p->r.bad)
        return fail_truncated(p, "tensor", t->name);
    if (*offset % p->g->alignment)
        return fail_format(p, "tensor", t->name, "has a misaligned offset");
    return measure_tensor(p, t);
}

/* Point t->data into the map, or say where the file would have to end. */
static int place_tensor(struct parser *p, struct gguf_tensor *t, uint64_t data_begin, uint64_t offset)
{
    struct gguf *g = p->g;
    char shown[GGUF_SHOW_SIZE];
    uint64_t begin, end;
    if (__builtin_add_overflow(data_begin, offset, &begin) || __builtin_add_overflow(begin, t->size, &end))
        return fail_format(p, "tensor", t->name, "has an impossible offset");
    if (end > g->map_size)
        return td_fail(
            p->err, -TD_ERR_TRUNCATED,
            "cannot load %s: tensor %s ends at byte %llu but the file has %llu; download the file again",
            gguf_label(g), gguf_show(t->name, shown), (unsigned long long)end,
            (unsigned long long)g->map_size);
    t->data = gguf_type_info(t->type) ? g->map + begin : NULL;
    return 0;
}

static int compare_tensors(const void *a, const void *b, void *ctx)
{
    const struct gguf_tensor *tensors = ctx;
    return gguf_span_compare(tensors[*(const uint32_t *)a].name, tensors[*(const uint32_t *)b].name);
}

static int allocate_order(struct parser *p)
{
    struct gguf *g = p->g;
    free(g->tensor_order);
    g->tensor_order = calloc(TD_MAX(g->tensor_count, (size_t)1), sizeof *g->tensor_order);
    if (!g->tensor_order)
        return fail_memory(p);
    for (size_t i = 0; i < g->tensor_count; i++)
        g->tensor_order[i] = (uint32_t)i;
    return 0;
}

/* Sort g->tensor_order by name and refuse names that occur twice. */
static int index_tensors(struct parser *p)
{
    struct gguf *g = p->g;
    qsort_r(g->tensor_order, g->tensor_count, sizeof *g->tensor_order, compare_tensors, g->tensors);
    for (size_t i = 1; i < g->tensor_count; i++) {
        struct span name = g->tensors[g->tensor_order[i]].name;
        if (gguf_span_compare(g->tensors[g->tensor_order[i - 1]].name, name) == 0)
            return fail_format(p, "tensor", name, "occurs twice");
    }
    return 0;
}

static int compare_places(const void *a, const void *b, void *ctx)
{
    const struct gguf_tensor *tensors = ctx;
    uintptr_t x = (uintptr_t)tensors[*(const uint32_t *)a].data,
              y = (uintptr_t)tensors[*(const uint32_t *)b].data;
    return (x > y) - (x < y);
}

/* Tensors share no byte, so that all of them together are no more than the file. */
static int check_overlap(struct parser *p)
{
    struct gguf *g = p->g;
    qsort_r(g->tensor_order, g->tensor_count, sizeof *g->tensor_order, compare_places, g->tensors);
    for (size_t i = 1; i < g->tensor_count; i++) {
        const struct gguf_tensor *before = &g->tensors[g->tensor_order[i - 1]];
        const struct gguf_tensor *t = &g->tensors[g->tensor_order[i]];
        if (before->data && (const uint8_t *)before->data + before->size > (const uint8_t *)t->data)
            return fail_format(p, "tensor", t->name, "overlaps another tensor");
    }
    return 0;
}

static int read_tensors(struct parser *p, uint64_t count)
{
    struct gguf *g = p->g;
    g->tensors = calloc((size_t)TD_MAX(count, 1), sizeof *g->tensors);
    uint64_t *offsets = calloc((size_t)TD_MAX(count, 1), sizeof *offsets);
    int rc = g->tensors && offsets ? 0 : fail_memory(p);
    for (uint64_t i = 0; i < count && rc == 0; i++)
        rc = read_tensor(p, &g->tensors[i], &offsets[i]);
    if (rc == 0) {
        g->tensor_count = (size_t)count;
        uint64_t data_begin = align_up((size_t)(p->r.next - g->map), g->alignment);
        for (uint64_t i = 0; i < count && rc == 0; i++)
            rc = place_tensor(p, &g->tensors[i], data_begin, offsets[i]);
    }
    free(offsets);
    if (rc == 0)
        rc = allocate_order(p);
    if (rc == 0)
        rc = check_overlap(p);
    return rc == 0 ? index_tensors(p) : rc;
}

/* --- slices --------------------------------------------------------------------------------------------- */

bool gguf_tensor_kept(struct span name, uint32_t layer_end, uint32_t layer_count)
{
    if (gguf_has_prefix(name, "blk.")) {
        uint64_t layer = 0;
        for (size_t i = 4; i < name.size && name.data[i] >= '0' && name.data[i] <= '9' && layer < UINT32_MAX;
             i++)
            layer = layer * 10 + (uint64_t)(name.data[i] - '0');
        return layer < layer_end;
    }
    if (gguf_has_prefix(name, "output.") || gguf_has_prefix(name, "output_norm."))
        return layer_end == layer_count;
    return true; /* the embedding and what all layers share, such as RoPE factors */
}

static const struct gguf_value *slice_array(const struct gguf *g, const char *key,
                                            enum gguf_value_type element_type, uint64_t count)
{
    const struct gguf_value *v = gguf_find(g, key);
    bool fits = v && v->type == GGUF_VALUE_ARRAY && v->element_type == element_type && v->count == count;
    return fits ? v : NULL;
}

/* One row of the slice's table, with the data of the tensor of the same name if the file holds it. */
static int slice_row(struct parser *p, struct gguf_tensor *row, size_t *present_count)
{
    struct gguf *g = p->g;
    int rc = measure_tensor(p, row);
    if (rc != 0)
        return rc;
    const struct gguf_tensor *held = gguf_find_tensor(g, row->name);
    if (!held != !gguf_tensor_kept(row->name, g->layer_end, g->layer_count))
        return fail_format(p, "tensor", row->name,
                           held ? "does not belong to this slice" : "is missing in this slice");
    if (!held)
        return 0;
    if (held->type != row->type || memcmp(held->dims, row->dims, sizeof row->dims) != 0)
        return fail_format(p, "tensor", row->name, "differs from the slice's table");
    row->data = held->data;
    row->dim_count = held->dim_count;
    (*present_count)++;
    return 0;
}

/* Replace the tensors of the file by the table of the whole model that a slice carries. */
static int apply_slice(struct parser *p)
{
    struct gguf *g = p->g;
    const struct gguf_value *names = gguf_find(g, GGUF_SLICE_NAMES);
    struct span table = {(const uint8_t *)GGUF_SLICE_PREFIX, sizeof GGUF_SLICE_PREFIX - 1};
    uint64_t count = names ? names->count : 0;
    const struct gguf_value *types = slice_array(g, GGUF_SLICE_TYPES, GGUF_VALUE_U32, count);
    const struct gguf_value *dims = slice_array(g, GGUF_SLICE_DIMS, GGUF_VALUE_U64, count * DIMS_MAX);
    const struct gguf_value *digests =
        slice_array(g, GGUF_SLICE_DIGESTS, GGUF_VALUE_U8, count * TD_HASH_SIZE);
    bool whole = names && names->string_offsets && types && dims && digests && count <= GGUF_TENSORS_MAX &&
                 gguf_get_u32(g, GGUF_SLICE_LAYER_END, &g->layer_end) && g->layer_end > 0 &&
                 g->layer_end <= g->layer_count;
    if (!whole)
        return fail_format(p, "slice table", table, "is incomplete");
    struct gguf_tensor *rows = calloc((size_t)TD_MAX(count, 1), sizeof *rows);
    if (!rows)
        return fail_memory(p);
    int rc = 0;
    size_t present_count = 0;
    for (uint64_t i = 0; i < count && rc == 0; i++) {
        struct gguf_tensor *row = &rows[i];
        gguf_array_string(names, i, &row->name);
        row->type = load_le32(types->raw.data + i * 4);
        for (uint32_t d = 0; d < DIMS_MAX; d++) {
            row->dims[d] = load_le64(dims->raw.data + (i * DIMS_MAX + d) * 8);
            if (row->dims[d] > 1)
                row->dim_count = d + 1;
        }
        row->dim_count = TD_MAX(row->dim_count, 1u);
        rc = slice_row(p, row, &present_count);
    }
    if (rc == 0 && present_count != g->tensor_count)
        rc = fail_format(p, "slice table", table, "does not list every tensor of the file once");
    if (rc != 0) {
        free(rows);
        return rc;
    }
    free(g->tensors);
    g->tensors = rows;
    g->tensor_count = (size_t)count;
    g->slice_digests = digests->raw.data;
    rc = allocate_order(p);
    return rc == 0 ? index_tensors(p) : rc;
}

/* --- the whole file ------------------------------------------------------------------------------------- */

static int read_head(struct parser *p, uint64_t *tensor_count, uint64_t *key_count)
{
    const char *label = gguf_label(p->g);
    uint32_t magic = reader_u32(&p->r);
    if (p->r.bad || magic != GGUF_MAGIC)
        return td_fail(p->err, -TD_ERR_FORMAT, "cannot load %s: it is not a GGUF file; give a .gguf model",
                       label);
    uint32_t version = reader_u32(&p->r);
    *tensor_count = reader_u64(&p->r);
    *key_count = reader_u64(&p->r);
    if (p->r.bad)
        return td_fail(p->err, -TD_ERR_TRUNCATED,
                       "cannot load %s: the file ends inside its head; download the file again", label);
    if (version != GGUF_VERSION)
        return td_fail(p->err, -TD_ERR_VERSION,
                       "cannot load %s: GGUF version %u%s, but version %u is needed; convert the model again",
                       label, version, version == GGUF_VERSION << 24 ? " (big-endian)" : "", GGUF_VERSION);
    if (*tensor_count > GGUF_TENSORS_MAX || *key_count > GGUF_KEYS_MAX)
        return td_fail(
            p->err, -TD_ERR_LIMIT,
            "cannot load %s: it declares %llu tensors and %llu keys, more than the %u that are allowed; "
            "the file is damaged, download it again",
            label, (unsigned long long)*tensor_count, (unsigned long long)*key_count, GGUF_TENSORS_MAX);
    uint64_t left = (uint64_t)(p->r.end - p->r.next);
    if (*key_count * KEY_SIZE_MIN + *tensor_count * TENSOR_SIZE_MIN > left)
        return td_fail(
            p->err, -TD_ERR_TRUNCATED,
            "cannot load %s: %llu bytes cannot hold its %llu keys and %llu tensors; download the file again",
            label, (unsigned long long)left, (unsigned long long)*key_count,
            (unsigned long long)*tensor_count);
    return 0;
}

static int read_alignment(struct parser *p)
{
    struct gguf *g = p->g;
    struct span key = {(const uint8_t *)"general.alignment", 17};
    g->alignment = GGUF_ALIGNMENT_DEFAULT;
    if (!gguf_find(g, "general.alignment"))
        return 0;
    bool valid = gguf_get_u32(g, "general.alignment", &g->alignment) && g->alignment >= GGUF_ALIGNMENT_MIN &&
                 g->alignment <= GGUF_ALIGNMENT_MAX && (g->alignment & (g->alignment - 1)) == 0;
    return valid ? 0 : fail_format(p, "key", key, "is no power of two from 8 to 1048576");
}

static void read_layer_count(struct gguf *g)
{
    struct span arch;
    char key[128];
    if (!gguf_get_string(g, "general.architecture", &arch) || arch.size > 64)
        return;
    memcpy(key, arch.data, arch.size);
    memcpy(key + arch.size, ".block_count", sizeof ".block_count");
    gguf_get_u32(g, key, &g->layer_count);
}

int gguf_parse_map(struct gguf *g, struct td_error *err)
{
    struct parser p = {.g = g, .r = reader_over(g->map, g->map_size), .err = err};
    uint64_t tensor_count = 0, key_count = 0;
    int rc = read_head(&p, &tensor_count, &key_count);
    if (rc == 0)
        rc = read_keys(&p, key_count);
    if (rc == 0)
        rc = read_alignment(&p);
    if (rc == 0)
        rc = read_tensors(&p, tensor_count);
    if (rc != 0)
        return rc;
    read_layer_count(g);
    g->layer_end = g->layer_count;
    return gguf_find(g, GGUF_SLICE_LAYER_END) ? apply_slice(&p) : 0;
}
