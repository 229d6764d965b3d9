/* conversation_messages: see conversation_json.h. The words of a template are special tokens, which nobody's text can be made to contain, so splitting
 * at them cannot be led astray. Llama 2's and Mistral's marks are plain text: there a turn is split at the first mark of its kind, and a
 * user who types one is shown cut there; what the model saw is not touched. */
#include "store/conversation_json.h"
#include "shared/crypto.h"
#include <stdlib.h>

struct splitter {
    const struct tokenizer *tokenizer;
    const struct conversation *c;
    conversation_text_fn text;
    json_t *messages;
    uint32_t *counts;  /* NULL, or of messages that begin before each of the conversation's boundaries */
    uint32_t boundary; /* the first that is not counted yet */
    bool failed;
};

/* The messages so far are all that begin before `at`. */
static void count_before(struct splitter *s, uint32_t at)
{
    for (; s->boundary < s->c->boundary_count && s->c->boundaries[s->boundary].ids_count <= at; s->boundary++)
        if (s->counts)
            s->counts[s->boundary] = (uint32_t)json_array_size(s->messages);
}

static void add(struct splitter *s, const char *role, size_t role_size, const char *content, size_t size)
{
    json_t *message = json_object();
    s->failed |= json_object_set_new(message, "role", json_stringn(role, role_size)) < 0;
    s->failed |= json_object_set_new(message, "content", s->text(s->c, content, size)) < 0;
    s->failed |= json_array_append_new(s->messages, message) < 0;
}

/* Text of ids[begin..end); malloc'ed, the caller's to wipe. */
static char *decode(const struct splitter *s, uint32_t begin, uint32_t end, bool special, size_t *size)
{
    const int32_t *ids = s->c->ids + begin;
    int64_t needed = tokenizer_decode(s->tokenizer, ids, end - begin, special, NULL, 0);
    char *text = needed < 0 ? NULL : malloc((size_t)needed + 1);
    if (!text)
        return NULL;
    tokenizer_decode(s->tokenizer, ids, end - begin, special, text, (size_t)needed);
    text[needed] = '\0';
    *size = (size_t)needed;
    return text;
}

static void forget(char *text, size_t size)
{
    if (text)
        crypto_wipe(text, size);
    free(text);
}

/* ---- templates with special tokens -------------------------------------------------------------------------- */

struct marks {
    int32_t begin;    /* of a message; its role follows */
    int32_t role_end; /* -1: the role's line ends it */
    int32_t end;      /* of a message */
    const char *lead; /* between role and content */
};

static uint32_t find_id(const struct conversation *c, uint32_t from, int32_t a, int32_t b)
{
    while (from < c->ids_count && c->ids[from] != a && c->ids[from] != b)
        from++;
    return from;
}

/* A vocabulary may have the marks of several templates: those that the conversation uses count. */
static bool find_marks(const struct tokenizer *t, const struct conversation *c, struct marks *m)
{
    const struct marks known[] = {
        {tokenizer_find(t, "<|im_start|>"), -1, tokenizer_find(t, "<|im_end|>"), "\n"},
        {tokenizer_find(t, "<|start_header_id|>"), tokenizer_find(t, "<|end_header_id|>"),
         tokenizer_find(t, "<|eot_id|>"), "\n\n"},
    };
    for (size_t i = 0; i < TD_COUNT(known); i++) {
        *m = known[i];
        if (m->begin >= 0 && m->end >= 0 && find_id(c, 0, m->begin, m->begin) < c->ids_count)
            return true;
    }
    return false;
}

/* The message behind the mark at `at`; where the next may begin. A reply ends where its boundary is, even if the model has ended it with another word. */
static uint32_t split_one(struct splitter *s, const struct marks *m, uint32_t at)
{
    uint32_t end = find_id(s->c, at + 1, m->end, m->begin), content = at + 1;
    if (s->boundary < s->c->boundary_count)
        end = TD_MIN(end, s->c->boundaries[s->boundary].ids_count);
    size_t role_size = 0, size = 0, lead = strlen(m->lead);
    char *role = NULL;
    if (m->role_end >= 0) {
        content = TD_MIN(find_id(s->c, at + 1, m->role_end, m->end), end);
        role = decode(s, at + 1, content, false, &role_size);
        content = TD_MIN(content + 1, end);
    }
    char *text = decode(s, content, end, false, &size), *from = text;
    if (text && m->role_end < 0) {
        char *line = memchr(text, '\n', size);
        role_size = line ? (size_t)(line - text) : size;
        from = text + role_size;
    }
    if (text && (role || m->role_end < 0)) {
        size_t left = size - (size_t)(from - text);
        size_t skip = left >= lead && memcmp(from, m->lead, lead) == 0 ? lead : 0;
        add(s, role ? role : text, role_size, from + skip, left - skip);
    } else
        s->failed = true;
    forget(role, role_size);
    forget(text, size);
    return end;
}

static void split_marked(struct splitter *s, const struct marks *m)
{
    for (uint32_t at = find_id(s->c, 0, m->begin, m->begin); at < s->c->ids_count && !s->failed;
         at = find_id(s->c, at, m->begin, m->begin)) {
        count_before(s, at);
        at = split_one(s, m, at);
    }
    count_before(s, s->c->ids_count);
}

/* ---- templates with marks of plain text: by turns ------------------------------------------------------------ */

static void split_turn(struct splitter *s, char *text, size_t size)
{
    static const char begin[] = "[INST]", end[] = "[/INST]";
    char *asked = strstr(text, begin), *replied = asked ? strstr(asked, end) : NULL;
    if (!replied) {
        add(s, "text", 4, text, size);
        return;
    }
    asked += sizeof begin - 1;
    asked += *asked == ' ';
    size_t asked_size = (size_t)(replied - asked);
    add(s, "user", 4, asked, asked_size - (asked_size > 0 && asked[asked_size - 1] == ' '));
    replied += sizeof end - 1;
    replied += *replied == ' ';
    add(s, "assistant", 9, replied, size - (size_t)(replied - text));
}

static void split_turns(struct splitter *s)
{
    uint32_t begin = 0;
    for (uint32_t i = 0; i < s->c->boundary_count && !s->failed; i++) {
        uint32_t end = s->c->boundaries[i].ids_count;
        size_t size = 0;
        char *text = decode(s, begin, end, false, &size);
        s->failed = !text;
        if (text)
            split_turn(s, text, size);
        forget(text, size);
        if (s->counts)
            s->counts[i] = (uint32_t)json_array_size(s->messages);
        begin = end;
    }
}

json_t *conversation_messages_json(const struct conversation *c, const struct tokenizer *t,
                                   conversation_text_fn text, uint32_t *counts)
{
    struct splitter s = {t, c, text, json_array(), counts, 0, false};
    struct marks m;
    if (!s.messages)
        return NULL;
    if (find_marks(t, c, &m))
        split_marked(&s, &m);
    else
        split_turns(&s);
    if (!s.failed)
        return s.messages;
    json_decref(s.messages);
    return NULL;
}
