/* fuzz_tokenizer: any text, with any ranges marked as special, through every kind of tokenizer and as a chat message.
 *
 * Input: byte 0 picks the tokenizer, byte 1 where the marked range begins and ends (in sixteenths of the text), the rest is the text.
 * Properties: the bytes come back; no control token outside of the marked range; counting and writing agree; pieces of text that the chat
 * template marks are its own. */
#include "shared/chat_template.h"
#include "tests/unit/shared/gguf_build.h"

#define KIND_COUNT 4
#define TEXT_MAX   65536

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct tokenizer *tokenizers[KIND_COUNT];
static int32_t ids[TEXT_MAX * 2], again[TEXT_MAX * 2];
static char decoded[TEXT_MAX * 8];

static void require(bool condition)
{
    if (!condition)
        abort();
}

static struct tokenizer *make(struct gguf_build *b)
{
    struct bytes file = gguf_build_end(b);
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    require(gguf_parse(file.data, file.size, &g, NULL) == 0 && tokenizer_create(g, NULL, &t, NULL) == 0);
    gguf_close(g);
    free(file.data);
    return t;
}

/* All bytes, some merges that overlap, control and user-defined tokens. */
static struct tokenizer *make_bpe(const char *pre)
{
    static char bytes[256][4];
    static const char *const more[] = {"th",   "the", "he",         "\xc4\xa0t", "\xc4\xa0the", "aa",
                                       "aaaa", "<s>", "<|im_end|>", "<tool>",    "  "};
    static const char *const merges[] = {"t h", "h e", "th e", "\xc4\xa0 t", "\xc4\xa0t he", "a a", "aa aa"};
    const char *tokens[256 + TD_COUNT(more)];
    int32_t types[TD_COUNT(tokens)];
    int other = 256;
    for (int i = 0; i < 256; i++) {
        bool visible = (i >= '!' && i <= '~') || (i >= 0xa1 && i <= 0xac) || i >= 0xae;
        int cp = visible ? i : other++;
        snprintf(bytes[i], 4, cp < 0x80 ? "%c" : "%c%c", cp < 0x80 ? cp : 0xc0 | cp >> 6, 0x80 | (cp & 0x3f));
        tokens[i] = bytes[i];
    }
    for (size_t i = 0; i < TD_COUNT(tokens); i++) {
        if (i >= 256)
            tokens[i] = more[i - 256];
        types[i] = i < 263 ? 1 : i < 265 ? 3 : 4;
    }
    struct gguf_build b = {0};
    key_string(&b, "tokenizer.ggml.model", "gpt2");
    key_string(&b, "tokenizer.ggml.pre", pre);
    key_strings(&b, "tokenizer.ggml.tokens", tokens, TD_COUNT(tokens));
    key_array32(&b, "tokenizer.ggml.token_type", GGUF_VALUE_I32, types, TD_COUNT(types));
    key_strings(&b, "tokenizer.ggml.merges", merges, TD_COUNT(merges));
    return make(&b);
}

static struct tokenizer *make_spm(void)
{
    static char bytes[256][8];
    static const char *const more[] = {"<unk>",
                                       "<s>",
                                       "</s>",
                                       "<tool>",
                                       "\xe2\x96\x81",
                                       "t",
                                       "h",
                                       "e",
                                       "th",
                                       "the",
                                       "\xe2\x96\x81the",
                                       "\xe2\x96\x81\xe2\x96\x81",
                                       "e\xe2\x96\x81",
                                       "a",
                                       "aa",
                                       "aaaa",
                                       "\xc3\xa9"};
    const char *tokens[256 + TD_COUNT(more)];
    int32_t types[TD_COUNT(tokens)];
    float scores[TD_COUNT(tokens)];
    for (size_t i = 0; i < TD_COUNT(tokens); i++) {
        if (i < 256)
            snprintf(bytes[i], 8, "<0x%02zX>", i);
        tokens[i] = i < 256 ? bytes[i] : more[i - 256];
        types[i] = i < 256 ? 6 : i == 256 ? 2 : i < 259 ? 3 : i == 259 ? 4 : 1;
        scores[i] = -(float)(i * 7 % 13);
    }
    struct gguf_build b = {0};
    key_string(&b, "tokenizer.ggml.model", "llama");
    key_strings(&b, "tokenizer.ggml.tokens", tokens, TD_COUNT(tokens));
    key_array32(&b, "tokenizer.ggml.token_type", GGUF_VALUE_I32, types, TD_COUNT(types));
    key_array32(&b, "tokenizer.ggml.scores", GGUF_VALUE_F32, scores, TD_COUNT(scores));
    return make(&b);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    tokenizers[0] = make_bpe("smollm");
    tokenizers[1] = make_bpe("llama-bpe");
    tokenizers[2] = make_bpe("qwen2");
    tokenizers[3] = make_spm();
    return 0;
}

static void check_text(const struct tokenizer *t, const char *text, size_t size, struct text_range range)
{
    int64_t count = tokenizer_encode(t, text, size, &range, 1, false, ids, TD_COUNT(ids));
    require(count >= 0 && count <= (int64_t)TD_COUNT(ids));
    require(tokenizer_encode(t, text, size, &range, 1, false, again, (size_t)count / 2) == count);
    require(count < 2 || memcmp(ids, again, (size_t)count / 2 * sizeof *ids) == 0);
    bool spm = tokenizer_strips_leading_space(t);
    size_t marked = 0;
    for (int64_t i = 0; i < count; i++)
        marked += tokenizer_piece(t, ids[i], true).size - tokenizer_piece(t, ids[i], false).size;
    require(marked <= range.end - range.begin);
    if (spm) /* blanks in front behind special tokens, and U+2581 itself, do not come back as they were */
        return;
    require(tokenizer_decode(t, ids, (size_t)count, true, decoded, sizeof decoded) == (int64_t)size);
    require(memcmp(decoded, text, size) == 0);
}

static void check_plain_spm(const struct tokenizer *t, const char *text, size_t size)
{
    if (memmem(text, size, "\xe2\x96\x81", 3) || memmem(text, size, "<tool>", 6))
        return;
    int64_t count = tokenizer_encode(t, text, size, NULL, 0, false, ids, TD_COUNT(ids));
    int64_t length = tokenizer_decode(t, ids, (size_t)count, false, decoded, sizeof decoded);
    require(length == (int64_t)size + (size > 0));
    require(memcmp(decoded + (size > 0), text, size) == 0);
}

static void check_chat(const char *text, size_t size, unsigned kind)
{
    struct chat_message messages[] = {{"user", text, size}, {"assistant", text, size}, {"user", text, size}};
    struct chat_text out;
    require(chat_template_render((enum chat_template_kind)(kind % CHAT_KIND_COUNT), messages, 3, 0, false,
                                 true, &out, NULL) == 0);
    size_t end = 0;
    for (size_t i = 0; i < out.special_count; i++) {
        require(out.special[i].begin >= end && out.special[i].end > out.special[i].begin &&
                out.special[i].end <= out.size);
        end = out.special[i].end;
    }
    chat_text_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2 || size > TEXT_MAX)
        return 0;
    const char *text = (const char *)data + 2;
    size_t text_size = size - 2, a = data[1] >> 4, b = data[1] & 15;
    struct text_range range = {text_size * TD_MIN(a, b) / 15, text_size * TD_MAX(a, b) / 15};
    const struct tokenizer *t = tokenizers[data[0] % KIND_COUNT];
    check_text(t, text, text_size, range);
    if (data[0] % KIND_COUNT == 3)
        check_plain_spm(t, text, text_size);
    check_chat(text, text_size, data[0] / KIND_COUNT);
    require(utf8_complete(text, text_size) <= text_size);
    require(!utf8_valid(text, text_size) || utf8_complete(text, text_size) == text_size);
    return 0;
}
