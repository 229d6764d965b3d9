/* chat_template: writes conversations in the words of the known template families. Recognising a family is
 * chat_template_detect.c.
 *
 * Invariant: what messages[first..count) render to depends on earlier messages only through their roles, so that a conversation which
 * is rendered turn by turn is the text that it would be at once, and its token ids stay a prefix of themselves. Two templates break this
 * and are followed only as far as it holds: Mistral v0.3 moves the system message into the last user message (here it stays in
 * the first), and Llama 3.2 writes today's date (here the fixed date that it falls back to).
 *
 * Only the words of the template are marked as special; what people wrote never is. */
#include "shared/chat_template.h"
#include "shared/utf8.h"

#include <stdio.h>
#include <stdlib.h>

enum style {
    STYLE_CHATML, /* <|im_start|>role\n … <|im_end|>\n */
    STYLE_LLAMA3, /* <|start_header_id|>role<|end_header_id|>\n\n … <|eot_id|> */
    STYLE_INST,   /* [INST] … [/INST] … </s> */
};

struct family {
    const char *name;
    enum style style;
    const char *default_system; /* when the conversation begins without one; NULL: none */
    bool tool_responses;        /* tool messages are grouped into user turns */
    bool thinks;                /* <think> of earlier turns is left out */
    bool dates;                 /* the system message begins with dates and is always there */
    bool bos_each_turn;         /* every user turn begins with <s>; else only the conversation does */
    bool strips;                /* contents of user messages are stripped */
    bool strips_reply;
    const char *system_begin, *system_end; /* around the system message, inside the first user message */
    const char *inst_begin, *inst_end;     /* around what follows [INST] and precedes [/INST] */
    const char *inst_lead, *reply_begin, *reply_end; /* in front of [INST]; around a reply */
};

static const struct family families[CHAT_KIND_COUNT] = {
    [CHAT_CHATML] = {.name = "chatml", .style = STYLE_CHATML},
    [CHAT_SMOLLM] = {.name = "smollm",
                     .style = STYLE_CHATML,
                     .default_system =
                         "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
    [CHAT_QWEN] = {.name = "qwen",
                   .style = STYLE_CHATML,
                   .default_system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
                   .tool_responses = true},
    [CHAT_QWEN2] = {.name = "qwen2", .style = STYLE_CHATML, .default_system = "You are a helpful assistant."},
    [CHAT_QWEN3] = {.name = "qwen3", .style = STYLE_CHATML, .tool_responses = true, .thinks = true},
    [CHAT_QWEN3_INSTRUCT] = {.name = "qwen3-instruct", .style = STYLE_CHATML, .tool_responses = true},
    [CHAT_LLAMA3] = {.name = "llama3", .style = STYLE_LLAMA3},
    [CHAT_LLAMA31] = {.name = "llama3.1", .style = STYLE_LLAMA3, .dates = true},
    [CHAT_LLAMA2] = {.name = "llama2",
                     .style = STYLE_INST,
                     .bos_each_turn = true,
                     .strips = true,
                     .strips_reply = true,
                     .system_begin = "<<SYS>>\n",
                     .system_end = "\n<</SYS>>\n\n",
                     .inst_lead = "",
                     .inst_begin = " ",
                     .inst_end = " ",
                     .reply_begin = " ",
                     .reply_end = " "},
    [CHAT_MISTRAL] = {.name = "mistral",
                      .style = STYLE_INST,
                      .system_begin = "",
                      .system_end = "\n\n",
                      .inst_lead = "",
                      .inst_begin = " ",
                      .inst_end = " ",
                      .reply_begin = "",
                      .reply_end = ""},
    [CHAT_MISTRAL_V1] = {.name = "mistral-v1",
                         .style = STYLE_INST,
                         .system_begin = "",
                         .system_end = "\n\n",
                         .inst_lead = " ",
                         .inst_begin = " ",
                         .inst_end = " ",
                         .reply_begin = " ",
                         .reply_end = ""},
    [CHAT_MISTRAL_V3] = {.name = "mistral-v3",
                         .style = STYLE_INST,
                         .strips_reply = true,
                         .system_begin = "",
                         .system_end = "\n\n",
                         .inst_lead = "",
                         .inst_begin = " ",
                         .inst_end = "",
                         .reply_begin = " ",
                         .reply_end = ""},
};

const char *chat_template_name(enum chat_template_kind kind)
{
    return (unsigned)kind < CHAT_KIND_COUNT ? families[kind].name : "unknown";
}

int chat_template_parse(const char *name, enum chat_template_kind *out, struct td_error *err)
{
    char known[256] = "";
    size_t used = 0;
    for (int kind = 0; kind < CHAT_KIND_COUNT; kind++) {
        if (strcmp(name, families[kind].name) == 0) {
            *out = (enum chat_template_kind)kind;
            return 0;
        }
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", kind ? ", " : "",
                                 families[kind].name);
    }
    return td_fail(err, -TD_ERR_ARG, "unknown chat template \"%.40s\"; --chat-template takes one of %s", name,
                   known);
}

/* --- output --------------------------------------------------------------------------------------------- */

struct output {
    struct chat_text *to;
    size_t text_capacity, special_capacity;
    bool failed; /* out of memory; later writes do nothing */
};

static bool grow(struct output *o, size_t more)
{
    size_t wanted = o->to->size + more + 1;
    if (o->failed || wanted <= o->text_capacity)
        return !o->failed;
    size_t capacity = TD_MAX(wanted, o->text_capacity * 2 + 256);
    char *text = realloc(o->to->text, capacity);
    o->failed = !text;
    if (text) {
        o->to->text = text;
        o->text_capacity = capacity;
    }
    return text != NULL;
}

static void put(struct output *o, const void *data, size_t size)
{
    if (!grow(o, size))
        return;
    if (size)
        memcpy(o->to->text + o->to->size, data, size);
    o->to->size += size;
}

static void put_text(struct output *o, const char *text)
{
    put(o, text, strlen(text));
}

static void put_span(struct output *o, struct span s)
{
    put(o, s.data, s.size);
}

/* A word of the template that may be a special token. */
static void put_special(struct output *o, const char *text)
{
    struct chat_text *to = o->to;
    if (to->special_count == o->special_capacity) {
        size_t capacity = o->special_capacity * 2 + 16;
        struct text_range *grown = realloc(to->special, capacity * sizeof *grown);
        if (!grown) {
            o->failed = true;
            return;
        }
        to->special = grown;
        o->special_capacity = capacity;
    }
    to->special[to->special_count++] = (struct text_range){to->size, to->size + strlen(text)};
    put_text(o, text);
}

/* --- strings as the template language has them ---------------------------------------------------------- */

static struct span content_of(const struct chat_message *m)
{
    return (struct span){(const uint8_t *)m->content, m->content_size};
}

static bool role_is(const struct chat_message *m, const char *role)
{
    return strcmp(m->role, role) == 0;
}

/* What str.strip() takes away: white space and the separators U+001C to U+001F. */
static bool strippable(uint32_t cp)
{
    return unicode_class(cp) == CHAR_SPACE || (cp >= 0x1c && cp <= 0x1f);
}

static struct span strip(struct span s)
{
    const char *text = (const char *)s.data;
    size_t begin = 0, end = 0; /* end: behind the last character that stays */
    bool leading = true;
    for (size_t i = 0, step; i < s.size; i += step) {
        uint32_t cp;
        step = utf8_decode(text + i, s.size - i, &cp);
        bool blank = strippable(cp);
        if (leading && blank)
            begin = i + step;
        leading = leading && blank;
        if (!blank)
            end = i + step;
    }
    return (struct span){s.data + begin, end > begin ? end - begin : 0};
}

static struct span strip_newlines(struct span s, bool left, bool right)
{
    while (left && s.size && s.data[0] == '\n')
        s.data++, s.size--;
    while (right && s.size && s.data[s.size - 1] == '\n')
        s.size--;
    return s;
}

static bool starts_with(struct span s, const char *text)
{
    return s.size >= strlen(text) && memcmp(s.data, text, strlen(text)) == 0;
}

static bool ends_with(struct span s, const char *text)
{
    size_t size = strlen(text);
    return s.size >= size && memcmp(s.data + s.size - size, text, size) == 0;
}

/* Before the first `mark` and behind the last one; both s when there is none. */
static void split_at(struct span s, const char *mark, struct span *before, struct span *behind)
{
    size_t size = strlen(mark);
    *before = *behind = s;
    for (size_t i = 0; i + size <= s.size; i++) {
        if (memcmp(s.data + i, mark, size) != 0)
            continue;
        if (before->size == s.size)
            before->size = i;
        *behind = (struct span){s.data + i + size, s.size - i - size};
        i += size - 1;
    }
}

/* A JSON string, non-ASCII as it is. */
static void put_json(struct output *o, struct span s)
{
    static const char shorts[] = "\"\\\n\r\t\b\f", letters[] = "\"\\nrtbf";
    put_text(o, "\"");
    for (size_t i = 0; i < s.size; i++) {
        const char *at = s.data[i] ? strchr(shorts, s.data[i]) : NULL;
        char escape[8];
        if (at)
            put(o, (char[]){'\\', letters[at - shorts]}, 2);
        else if (s.data[i] < 0x20)
            put(o, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", s.data[i]));
        else
            put(o, s.data + i, 1);
    }
    put_text(o, "\"");
}

/* --- the families --------------------------------------------------------------------------------------- */

struct render {
    const struct family *family;
    const struct chat_message *messages;
    size_t count;
    struct output out;
};

static void chatml_open(struct output *o, const char *role)
{
    put_special(o, "<|im_start|>");
    put_text(o, role);
}

static void chatml_close(struct output *o)
{
    put_special(o, "<|im_end|>");
    put_text(o, "\n");
}

/* Index of the last message that a person asked, or of the last message. Replies before it lose their reasoning. */
static size_t last_query(const struct render *r)
{
    for (size_t i = r->count; i-- > 0;) {
        struct span content = content_of(&r->messages[i]);
        if (role_is(&r->messages[i], "user") &&
            !(starts_with(content, "<tool_response>") && ends_with(content, "</tool_response>")))
            return i;
    }
    return r->count - 1;
}

static void chatml_reasoned_reply(struct render *r, size_t index, size_t query)
{
    struct output *o = &r->out;
    struct span whole = content_of(&r->messages[index]), head, content, reasoning = {NULL, 0}, unused;
    split_at(whole, "</think>", &head, &content);
    if (content.data != whole.data) {
        content = strip_newlines(content, true, false);
        split_at(strip_newlines(head, false, true), "<think>", &unused, &reasoning);
        reasoning = strip_newlines(reasoning, true, false);
    }
    put_text(o, "\n");
    if (index > query && (index + 1 == r->count || reasoning.size)) {
        put_text(o, "<think>\n");
        put_span(o, strip_newlines(reasoning, true, true));
        put_text(o, "\n</think>\n\n");
        content = strip_newlines(content, true, false);
    }
    put_span(o, content);
}

static void chatml_message(struct render *r, size_t index)
{
    const struct chat_message *m = &r->messages[index];
    struct output *o = &r->out;
    bool tool = r->family->tool_responses && role_is(m, "tool");
    if (tool) {
        if (index == 0 || !role_is(m - 1, "tool"))
            chatml_open(o, "user");
        put_text(o, "\n<tool_response>\n");
        put_span(o, content_of(m));
        put_text(o, "\n</tool_response>");
        if (index + 1 == r->count || !role_is(m + 1, "tool"))
            chatml_close(o);
        return;
    }
    chatml_open(o, m->role);
    if (r->family->thinks && role_is(m, "assistant")) {
        chatml_reasoned_reply(r, index, last_query(r));
    } else {
        put_text(o, "\n");
        put_span(o, content_of(m));
    }
    chatml_close(o);
}

static void render_chatml(struct render *r, size_t first, bool reply_open, bool add_generation)
{
    struct output *o = &r->out;
    if (first > 0 && reply_open)
        chatml_close(o);
    else if (first > 0)
        put_text(o, "\n");
    else if (r->family->default_system && r->count > 0 && !role_is(&r->messages[0], "system")) {
        chatml_open(o, "system");
        put_text(o, "\n");
        put_text(o, r->family->default_system);
        chatml_close(o);
    }
    for (size_t i = first; i < r->count; i++)
        chatml_message(r, i);
    if (add_generation) {
        chatml_open(o, "assistant");
        put_text(o, "\n");
    }
}

static void llama3_open(struct output *o, const char *role)
{
    put_special(o, "<|start_header_id|>");
    put_text(o, role);
    put_special(o, "<|end_header_id|>");
    put_text(o, "\n\n");
}

static void llama3_message(struct render *r, size_t index)
{
    const struct chat_message *m = &r->messages[index];
    bool tool = r->family->dates && role_is(m, "tool");
    llama3_open(&r->out, tool ? "ipython" : m->role);
    if (tool)
        put_json(&r->out, content_of(m));
    else
        put_span(&r->out, strip(content_of(m)));
    put_special(&r->out, "<|eot_id|>");
}

static void render_llama3(struct render *r, size_t first, bool reply_open, bool add_generation)
{
    struct output *o = &r->out;
    size_t next = first;
    if (first > 0 && reply_open)
        put_special(o, "<|eot_id|>");
    if (first == 0 && r->family->dates) {
        llama3_open(o, "system");
        put_text(o, "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n");
        if (r->count > 0 && role_is(&r->messages[0], "system"))
            put_span(o, strip(content_of(&r->messages[next++])));
        put_special(o, "<|eot_id|>");
    }
    for (size_t i = next; i < r->count; i++)
        llama3_message(r, i);
    if (add_generation)
        llama3_open(o, "assistant");
}

/* Everything between [INST] and [/INST], the system message included if this is the first user message. */
static void inst_user(struct render *r, size_t index, size_t begin)
{
    const struct family *f = r->family;
    struct output *o = &r->out;
    struct output joined = {.to = &(struct chat_text){0}};
    if (index == 1 && begin == 1) {
        put_text(&joined, f->system_begin);
        put_span(&joined, content_of(&r->messages[0]));
        put_text(&joined, f->system_end);
    }
    put_span(&joined, content_of(&r->messages[index]));
    struct span content = {(const uint8_t *)joined.to->text, joined.to->size};
    if (f->bos_each_turn && index > begin)
        put_special(o, "<s>");
    put_text(o, f->inst_lead);
    put_special(o, "[INST]");
    put_text(o, f->inst_begin);
    put_span(o, f->strips ? strip(content) : content);
    put_text(o, f->inst_end);
    put_special(o, "[/INST]");
    o->failed |= joined.failed;
    chat_text_free(joined.to);
}

static void inst_reply_end(struct render *r)
{
    put_text(&r->out, r->family->reply_end);
    put_special(&r->out, "</s>");
}

static int render_inst(struct render *r, size_t first, bool reply_open, struct td_error *err)
{
    const struct family *f = r->family;
    size_t begin = r->count > 0 && role_is(&r->messages[0], "system"); /* of the turns */
    for (size_t i = begin; i < r->count; i++) {
        if (!role_is(&r->messages[i], (i - begin) % 2 ? "assistant" : "user"))
            return td_fail(
                err, -TD_ERR_ARG,
                "message %zu has the role \"%.20s\", but this model's chat template takes user and "
                "assistant in turn (after an optional system message)",
                i, r->messages[i].role);
    }
    if (first > 0 && reply_open)
        inst_reply_end(r);
    for (size_t i = TD_MAX(first, begin); i < r->count; i++) {
        if ((i - begin) % 2 == 0) {
            inst_user(r, i, begin);
            continue;
        }
        struct span content = content_of(&r->messages[i]);
        put_text(&r->out, f->reply_begin);
        put_span(&r->out, f->strips_reply ? strip(content) : content);
        inst_reply_end(r);
    }
    return 0;
}

static int check_roles(const struct chat_message *messages, size_t count, struct td_error *err)
{
    for (size_t i = 0; i < count; i++) {
        const struct chat_message *m = &messages[i];
        if (!role_is(m, "system") && !role_is(m, "user") && !role_is(m, "assistant") && !role_is(m, "tool"))
            return td_fail(err, -TD_ERR_ARG,
                           "message %zu has the unknown role \"%.20s\"; use system, user, assistant or tool",
                           i, m->role);
    }
    return 0;
}

int chat_template_render(enum chat_template_kind kind, const struct chat_message *messages, size_t count,
                         size_t first, bool reply_open, bool add_generation, struct chat_text *out,
                         struct td_error *err)
{
    memset(out, 0, sizeof *out);
    if ((unsigned)kind >= CHAT_KIND_COUNT || first > count)
        return td_fail(err, -TD_ERR_ARG, "cannot render a conversation: wrong template or first message");
    int rc = check_roles(messages, count, err);
    if (rc != 0)
        return rc;
    struct render r = {.family = &families[kind], .messages = messages, .count = count, .out = {.to = out}};
    out->add_bos = first == 0 && r.family->style != STYLE_CHATML;
    put(&r.out, NULL, 0); /* text is never NULL */
    if (r.family->style == STYLE_CHATML)
        render_chatml(&r, first, reply_open, add_generation);
    else if (r.family->style == STYLE_LLAMA3)
        render_llama3(&r, first, reply_open, add_generation);
    else
        rc = render_inst(&r, first, reply_open, err);
    if (rc == 0 && r.out.failed)
        rc = td_fail(err, -TD_ERR_NOMEM, "cannot render a conversation: out of memory");
    if (rc == 0)
        out->text[out->size] = 0;
    else
        chat_text_free(out);
    return rc;
}

void chat_text_free(struct chat_text *t)
{
    free(t->text);
    free(t->special);
    memset(t, 0, sizeof *t);
}
