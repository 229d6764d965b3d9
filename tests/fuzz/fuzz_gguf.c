/* fuzz_gguf: any bytes as a model file. What opens must be readable to its last byte through every accessor, and whatever goes on to use
 * the file (fingerprint, verification, chat template, tokenizer) must fail with a line or work. */
#include "shared/chat_template.h"
#include "shared/gguf_internal.h"
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint64_t sink; /* so that reads are not optimised away */

static void require(bool condition)
{
    if (!condition)
        abort();
}

static void read_span(struct span s)
{
    for (size_t i = 0; i < s.size; i++)
        sink += s.data[i];
}

static void read_value(const struct gguf *g, const struct gguf_value *v)
{
    char key[256];
    uint32_t u;
    float f;
    bool b;
    int64_t n;
    struct span s;
    read_span(v->key);
    read_span(v->raw);
    if (v->key.size < sizeof key && !memchr(v->key.data, 0, v->key.size)) {
        memcpy(key, v->key.data, v->key.size);
        key[v->key.size] = 0;
        require(gguf_find(g, key) == v);
        gguf_get_u32(g, key, &u);
        gguf_get_f32(g, key, &f);
        gguf_get_bool(g, key, &b);
        gguf_get_string(g, key, &s);
    }
    for (uint64_t i = 0; v->type == GGUF_VALUE_ARRAY && i < v->count; i++) {
        if (gguf_array_string(v, i, &s))
            read_span(s);
        gguf_array_i64(v, i, &n);
        gguf_array_f32(v, i, &f);
    }
}

static void read_tensor(const struct gguf *g, const struct gguf_tensor *t)
{
    const struct gguf_type_info *info = gguf_type_info(t->type);
    (void)g;
    read_span(t->name);
    if (!t->data)
        return;
    require(info && t->size > 0);
    uint64_t values = t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
    require(t->size == values / info->block_values * info->block_size);
    read_span((struct span){t->data, (size_t)t->size});
}

static void use(struct gguf *g)
{
    struct td_error err = {0};
    uint8_t hash[TD_HASH_SIZE];
    enum chat_template_kind kind;
    struct tokenizer *t;
    int32_t ids[64];
    require((gguf_fingerprint(g, hash, NULL, NULL, &err) == 0) == (err.text[0] == 0));
    gguf_verify(g, NULL, NULL, &err);
    chat_template_detect(g, NULL, &kind, &err);
    if (tokenizer_create(g, NULL, &t, &err) == 0) {
        static const char text[] = "Hello 123 \xe4\xb8\xad\xff <s>";
        struct text_range all = {0, sizeof text - 1};
        require(tokenizer_encode(t, text, sizeof text - 1, &all, 1, true, ids, 64) >= 0);
        for (uint32_t id = 0; id < tokenizer_vocab_count(t); id++)
            read_span(tokenizer_piece(t, (int32_t)id, true));
        tokenizer_destroy(t);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct gguf *g;
    struct td_error err = {0};
    int rc = gguf_parse(data, size, &g, &err);
    if (rc != 0) {
        require(rc < 0 && err.code == rc && err.text[0] && !strchr(err.text, '\n') && !g);
        return 0;
    }
    for (size_t i = 0; i < g->value_count; i++)
        read_value(g, &g->values[i]);
    for (size_t i = 0; i < gguf_tensor_count(g); i++)
        read_tensor(g, gguf_tensor_at(g, i));
    use(g);
    gguf_close(g);
    return 0;
}
