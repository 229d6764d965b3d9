/* gguf_build: writes small GGUF files in memory for tests, valid unless a test asks for something else. */
#ifndef TANDEM_TESTS_GGUF_BUILD_H
#define TANDEM_TESTS_GGUF_BUILD_H
#include "shared/gguf.h"
#include <stdio.h>
#include <stdlib.h>

struct bytes {
    uint8_t *data;
    size_t size, capacity;
};

struct gguf_build {
    struct bytes keys, infos, tensors;
    uint64_t key_count, tensor_count;
    uint32_t alignment; /* 0: 32, without the key */
};

static inline void add_bytes(struct bytes *b, const void *data, size_t size)
{
    if (b->size + size > b->capacity) {
        b->capacity = (b->size + size) * 2 + 64;
        b->data = realloc(b->data, b->capacity);
        if (!b->data)
            abort();
    }
    if (size)
        memcpy(b->data + b->size, data, size);
    b->size += size;
}

static inline void add_u32(struct bytes *b, uint32_t v)
{
    uint8_t raw[4];
    store_le32(raw, v);
    add_bytes(b, raw, 4);
}

static inline void add_u64(struct bytes *b, uint64_t v)
{
    uint8_t raw[8];
    store_le64(raw, v);
    add_bytes(b, raw, 8);
}

static inline void add_text(struct bytes *b, const char *text, size_t size)
{
    add_u64(b, size);
    add_bytes(b, text, size);
}

static inline void key_head(struct gguf_build *g, const char *key, uint32_t type)
{
    add_text(&g->keys, key, strlen(key));
    add_u32(&g->keys, type);
    g->key_count++;
}

static inline void key_u32(struct gguf_build *g, const char *key, uint32_t v)
{
    key_head(g, key, GGUF_VALUE_U32);
    add_u32(&g->keys, v);
}

static inline void key_bool(struct gguf_build *g, const char *key, bool v)
{
    key_head(g, key, GGUF_VALUE_BOOL);
    add_bytes(&g->keys, &(uint8_t){v}, 1);
}

static inline void key_f32(struct gguf_build *g, const char *key, float v)
{
    uint32_t bits;
    memcpy(&bits, &v, 4);
    key_head(g, key, GGUF_VALUE_F32);
    add_u32(&g->keys, bits);
}

static inline void key_string(struct gguf_build *g, const char *key, const char *text)
{
    key_head(g, key, GGUF_VALUE_STRING);
    add_text(&g->keys, text, strlen(text));
}

static inline void key_strings(struct gguf_build *g, const char *key, const char *const *texts, size_t count)
{
    key_head(g, key, GGUF_VALUE_ARRAY);
    add_u32(&g->keys, GGUF_VALUE_STRING);
    add_u64(&g->keys, count);
    for (size_t i = 0; i < count; i++)
        add_text(&g->keys, texts[i], strlen(texts[i]));
}

/* An array of 4-byte elements: I32, U32 or F32. */
static inline void key_array32(struct gguf_build *g, const char *key, uint32_t type, const void *values,
                               size_t count)
{
    key_head(g, key, GGUF_VALUE_ARRAY);
    add_u32(&g->keys, type);
    add_u64(&g->keys, count);
    add_bytes(&g->keys, values, count * 4);
}

static inline void tensor_info(struct gguf_build *g, const char *name, uint32_t type, const uint64_t *dims,
                               uint32_t dim_count, uint64_t offset)
{
    add_text(&g->infos, name, strlen(name));
    add_u32(&g->infos, dim_count);
    for (uint32_t i = 0; i < dim_count; i++)
        add_u64(&g->infos, dims[i]);
    add_u32(&g->infos, type);
    add_u64(&g->infos, offset);
    g->tensor_count++;
}

static inline void pad_to(struct bytes *b, size_t alignment)
{
    static const uint8_t zero[4096];
    add_bytes(b, zero, align_up(b->size, alignment) - b->size);
}

static inline void tensor(struct gguf_build *g, const char *name, uint32_t type, uint64_t columns,
                          uint64_t rows, const void *data, size_t size)
{
    pad_to(&g->tensors, g->alignment ? g->alignment : 32);
    tensor_info(g, name, type, (uint64_t[]){columns, rows}, 2, g->tensors.size);
    add_bytes(&g->tensors, data, size);
}

/* The file; everything in g is freed. */
static inline struct bytes gguf_build_end(struct gguf_build *g)
{
    struct bytes file = {0};
    if (g->alignment)
        key_u32(g, "general.alignment", g->alignment);
    add_bytes(&file, "GGUF", 4);
    add_u32(&file, 3);
    add_u64(&file, g->tensor_count);
    add_u64(&file, g->key_count);
    add_bytes(&file, g->keys.data, g->keys.size);
    add_bytes(&file, g->infos.data, g->infos.size);
    if (g->tensor_count)
        pad_to(&file, g->alignment ? g->alignment : 32);
    add_bytes(&file, g->tensors.data, g->tensors.size);
    free(g->keys.data);
    free(g->infos.data);
    free(g->tensors.data);
    memset(g, 0, sizeof *g);
    return file;
}

#endif
