/* chat_template_detect: which family a model file's own template is.
 *
 * A template is a program, so it cannot be recognised by what it does; it is recognised by the expressions that the published
 * templates of a family have in common, after blanks are dropped and quotes made alike. What matches no family in every
 * mark is unknown, and an error: a wrong template is worse than none, because the model answers anyway. */
#include "shared/chat_template.h"

#include <stdlib.h>

#define TEMPLATE_SIZE_MAX (1u << 20)

struct marks { /* all of `has` and none of `lacks`, in the normalised template */
    enum chat_template_kind kind;
    const char *has[4], *lacks[6];
};

#define CHATML_TURN "'<|im_start|>'+message.role+'\\n'+message.content+'<|im_end|>'"
#define LLAMA3_TURN                                                                                          \
    "'<|start_header_id|>'+message.role+'<|end_header_id|>\\n\\n'+message.content|trim+'<|eot_id|>'"

static const struct marks known[] = {
    {CHAT_SMOLLM,
     {"named SmolLM, trained by Hugging Face<|im_end|>", CHATML_TURN},
     {"enable_thinking", "<tool_response>", "reasoning"}},
    {CHAT_QWEN,
     {"<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>",
      CHATML_TURN, "<tool_response>"},
     {"think", "reasoning_content", "image"}},
    {CHAT_QWEN2,
     {"<|im_start|>system\\nYou are a helpful assistant.<|im_end|>", CHATML_TURN},
     {"enable_thinking", "<tool_response>", "reasoning", "image"}},
    {CHAT_QWEN3,
     {"enable_thinking", "last_query_index", "<tool_response>", "<|im_start|>"},
     {"image", "vision", "'<think>\\n'}}"}},
    {CHAT_QWEN3_INSTRUCT,
     {"'<|im_start|>'+message.role+'\\n'+content+'<|im_end|>'", "<tool_response>"},
     {"think", "reasoning_content", "image", "vision", "You are"}},
    {CHAT_CHATML,
     {CHATML_TURN},
     {"<|im_start|>system", "<tool_response>", "think", "reasoning", "You are", "image"}},
    {CHAT_LLAMA31,
     {"Cutting Knowledge Date: December 2023\\n", "Today Date: ", LLAMA3_TURN, "26 Jul 2024"},
     {"image", "enable_thinking", "thinking"}},
    {CHAT_LLAMA3,
     {LLAMA3_TURN},
     {"Knowledge Date", "<|start_header_id|>system", "thinking", "You are", "image"}},
    {CHAT_LLAMA2,
     {"'<<SYS>>\\n'+system_message+'\\n<</SYS>>\\n\\n'", "bos_token+'[INST] '+content.strip()+' [/INST]'",
      "' '+content.strip()+' '+eos_token"},
     {"set system_message='"}},
    {CHAT_MISTRAL_V1,
     {"' [INST] '+message.content+' [/INST]'", "' '+message.content+eos_token"},
     {"<<SYS>>", "[SYSTEM_PROMPT]", "[TOOL_CALLS]"}},
    {CHAT_MISTRAL,
     {"'[INST] '+message.content+' [/INST]'", "message.content+eos_token"},
     {"<<SYS>>", "[SYSTEM_PROMPT]", "eos_token+' '", "[TOOL_CALLS]", "' '+message.content+eos_token"}},
    {CHAT_MISTRAL_V3,
     {"'[INST] '+message.content+'[/INST]'", "' '+message.content|trim+eos_token"},
     {"<<SYS>>", "[SYSTEM_PROMPT]"}},
};

static bool blank(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Copy the template so that spellings of one thing are alike: double quotes single, a line break inside quotes \n, no blanks around
 * operators and delimiters outside of quotes (others become one), no comments. */
static size_t normalise(const char *text, size_t size, char *out)
{
    static const char tight[] = "+|(){}[],=%-'";
    size_t used = 0;
    char quote = 0;
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        if (!quote && c == '{' && i + 1 < size && text[i + 1] == '#') {
            const char *end = memmem(text + i, size - i, "#}", 2);
            i = end ? (size_t)(end - text) + 1 : size;
        } else if (quote && c == '\\' && i + 1 < size) {
            out[used++] = c;
            out[used++] = text[++i];
        } else if (quote && c == '\n') {
            out[used++] = '\\';
            out[used++] = 'n';
        } else if (quote && c == quote) {
            quote = 0;
            out[used++] = '\'';
        } else if (quote) {
            out[used++] = c;
        } else if (c == '\'' || c == '"') {
            quote = c;
            out[used++] = '\'';
        } else if (!blank(c)) {
            out[used++] = c;
        } else if (used && !strchr(tight, out[used - 1]) && i + 1 < size && !blank(text[i + 1]) &&
                   !strchr(tight, text[i + 1]) && text[i + 1] != '"') {
            out[used++] = ' ';
        }
    }
    return used;
}

/* ['role'] -> .role and ['content'] -> .content, in place. */
static size_t unify_fields(char *text, size_t size)
{
    static const char *const fields[] = {"role", "content"};
    size_t used = 0;
    for (size_t i = 0; i < size;) {
        size_t skipped = 0;
        for (size_t f = 0; f < TD_COUNT(fields) && !skipped; f++) {
            size_t n = strlen(fields[f]);
            if (i + n + 4 <= size && memcmp(text + i, "['", 2) == 0 &&
                memcmp(text + i + 2, fields[f], n) == 0 && memcmp(text + i + 2 + n, "']", 2) == 0) {
                text[used++] = '.';
                memcpy(text + used, fields[f], n);
                used += n;
                skipped = n + 4;
            }
        }
        if (!skipped)
            text[used++] = text[i];
        i += skipped ? skipped : 1;
    }
    return used;
}

static bool matches(const struct marks *m, const char *text, size_t size)
{
    for (size_t i = 0; i < TD_COUNT(m->has) && m->has[i]; i++)
        if (!memmem(text, size, m->has[i], strlen(m->has[i])))
            return false;
    for (size_t i = 0; i < TD_COUNT(m->lacks) && m->lacks[i]; i++)
        if (memmem(text, size, m->lacks[i], strlen(m->lacks[i])))
            return false;
    return true;
}

int chat_template_detect(const struct gguf *g, const char *override_name, enum chat_template_kind *out,
                         struct td_error *err)
{
    struct span template;
    const char *path = gguf_path(g)[0] ? gguf_path(g) : "the model";
    if (override_name && override_name[0])
        return chat_template_parse(override_name, out, err);
    if (!gguf_get_string(g, "tokenizer.chat_template", &template) || template.size == 0)
        return td_fail(err, -TD_ERR_NOTFOUND,
                       "%s has no chat template; give --chat-template with the name of one, such as chatml",
                       path);
    if (template.size > TEMPLATE_SIZE_MAX)
        return td_fail(err, -TD_ERR_LIMIT,
                       "the chat template of %s is longer than %u bytes; give --chat-template", path,
                       TEMPLATE_SIZE_MAX);
    char *text = malloc(template.size * 2 + 1);
    if (!text)
        return td_fail(err, -TD_ERR_NOMEM, "cannot read the chat template of %s: out of memory", path);
    size_t size = unify_fields(text, normalise((const char *)template.data, template.size, text));
    const struct marks *found = NULL;
    for (size_t i = 0; i < TD_COUNT(known) && !found; i++)
        if (matches(&known[i], text, size))
            found = &known[i];
    free(text);
    if (!found)
        return td_fail(
            err, -TD_ERR_UNSUPPORTED,
            "the chat template of %s is of no family that Tandem knows; give --chat-template with the name "
            "of the one to use, such as chatml, llama3 or mistral",
            path);
    *out = found->kind;
    return 0;
}
