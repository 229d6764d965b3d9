/* chat_template: messages -> text + the ranges where special tokens are meant. The known families are recognised from
 * the file's tokenizer.chat_template; they are written out here in C, no template language is run. An unknown template
 * is an error that names --chat-template. */
#ifndef TANDEM_SHARED_CHAT_TEMPLATE_H
#define TANDEM_SHARED_CHAT_TEMPLATE_H
#include "shared/tokenizer.h"

enum chat_template_kind {
    CHAT_CHATML,
    CHAT_SMOLLM,
    CHAT_QWEN, /* 2.5 */
    CHAT_LLAMA2,
    CHAT_LLAMA3,
    CHAT_MISTRAL,        /* 7B v0.1, v0.2 */
    CHAT_QWEN2,          /* 1.5, 2: another default system message */
    CHAT_QWEN3,          /* thinks; reasoning of earlier turns is left out */
    CHAT_QWEN3_INSTRUCT, /* 2507: does not think */
    CHAT_LLAMA31,        /* 3.1 to 3.3: dates in the system message */
    CHAT_MISTRAL_V1,     /* v0.2 as revised: blanks around [INST] */
    CHAT_MISTRAL_V3,     /* 7B v0.3 */
    CHAT_KIND_COUNT
};

struct chat_message {
    const char *role; /* "system", "user", "assistant", "tool" */
    const char *content;
    size_t content_size;
};

struct chat_text { /* result; free with chat_text_free */
    char *text;
    size_t size;
    struct text_range *special;
    size_t special_count;
    bool add_bos; /* BOS belongs in front (never for a continuation) */
};

const char *chat_template_name(enum chat_template_kind kind); /* "chatml", "smollm", "qwen", "llama2", … */
int chat_template_parse(const char *name, enum chat_template_kind *out, struct td_error *err);
/* From the file; override_name (may be NULL) wins. */
int chat_template_detect(const struct gguf *g, const char *override_name, enum chat_template_kind *out,
                         struct td_error *err);

/* chat_template_render: messages[first..count) as they stand in a conversation whose messages[0..first) are already tokens.
 * first > 0: the text goes on right after an assistant reply whose last token is an end token or, if reply_open, after a reply
 * that stopped without one (length, stop string): then the closing of the turn is rendered as well. The default system message of
 * SmolLM/Qwen templates appears only when first == 0 and messages[0] is no system message. add_generation: open the assistant's turn.
 * Rendering all at once or in parts gives the same text overall. */
int chat_template_render(enum chat_template_kind kind, const struct chat_message *messages, size_t count,
                         size_t first, bool reply_open, bool add_generation, struct chat_text *out,
                         struct td_error *err);
void chat_text_free(struct chat_text *t);

#endif
