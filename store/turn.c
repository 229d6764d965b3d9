/* turn: see turn.h.
 *
 * A boundary stands only after an assistant's reply, because only there are the ids that the model really saw
 * and made known. A request is matched on its history before its last message; what follows the boundary is
 * rendered and tokenised as one text and appended to the stored ids, so ids never change once they are
 * stored, whatever a tokeniser would make of the whole text.
 *
 * Four ways in:
 *     no match              a new conversation, all messages rendered
 *     match at its end      that conversation goes on
 *     match further back    the client edited its history: a fork under a new id; the stored one stays
 *     asked-for id, no match   the messages are appended to that conversation (resume with only the new message)
 * An asked-for id that is not known begins a conversation of that name, but one of the form that is made here is refused: what it meant has gone.
 *
 * A repeat is a request whose key the conversation's last turn carries: it builds on what that turn built on. New
 * conversations and forks are named after the key, so a repeat finds them although nothing in its history leads
 * there. A repeat must give the stored prompt again; another request under the same key is refused.
 */
#include "store/turn.h"
#include <stdlib.h>

static int hash_messages(const struct turn_config *config, const struct turn_input *in, struct turn *t)
{
    t->hashes = malloc(in->count * sizeof *t->hashes);
    if (!t->hashes)
        return -TD_ERR_NOMEM;
    uint8_t previous[TD_HASH_SIZE];
    conv_history_start(in->principal_key, (uint8_t)config->template_kind, previous);
    for (size_t i = 0; i < in->count; i++) {
        const struct chat_message *m = &in->messages[i];
        conv_history_next(in->principal_key, previous, m->role, m->content, m->content_size, t->hashes[i]);
        memcpy(previous, t->hashes[i], TD_HASH_SIZE);
    }
    t->message_count = in->count;
    return 0;
}

/* The id of a new conversation or a fork. by_key: the key's own id is wanted and nobody has it. */
static int choose_id(const struct turn_input *in, bool by_key, char out[STORE_CONV_ID_MAX + 1])
{
    if (!by_key)
        return conv_make_id(out);
    conv_id_from_key(in->request_key, out);
    return 0;
}

/* Forget everything after the first `count` boundaries. */
static void cut_to(struct conversation *c, uint32_t count)
{
    c->boundary_count = count;
    c->ids_count = count ? c->boundaries[count - 1].ids_count : 0;
}

/* The request's longest history in c: its boundary, or -1. *message gets the index of the request's message
 * at that boundary. */
static int64_t match_boundary(const struct conversation *c, const struct turn *t, size_t limit,
                              size_t *message)
{
    for (size_t m = limit; m-- > 0;)
        for (uint32_t b = c->boundary_count; b-- > 0;)
            if (crypto_equal(c->boundaries[b].history, t->hashes[m], TD_HASH_SIZE)) {
                *message = m;
                return b;
            }
    return -1;
}

/* Is this request the one that made the conversation's last turn? Then it stands at the boundary before it, or, if the turn
 * was appended without a match, at none. */
static bool repeats_last_turn(const struct conversation *c, const struct turn_input *in, int64_t boundary)
{
    return in->request_key[0] && strcmp(in->request_key, c->last_request_key) == 0 && c->boundary_count > 0 &&
           (boundary < 0 || boundary == (int64_t)c->boundary_count - 2);
}

static int usable(const struct turn_config *config, const struct conversation *c)
{
    uint8_t id[TD_HASH_SIZE];
    tokenizer_id(config->tokenizer, id);
    return memcmp(id, c->tokenizer_id, TD_HASH_SIZE) == 0 ? 0 : -TD_ERR_MISMATCH;
}

/* Whoever names a conversation and sends only what is new builds on its last turn: that must be there. A request that brings the history says itself
 * what it builds on; boundary: where it stands, or -1. */
static int check_lost(const struct turn_config *config, const struct turn_input *in, const struct turn *t,
                      int64_t boundary, struct td_error *err)
{
    const struct conversation *c = &t->conversation;
    bool brings_history = boundary >= 0;
    for (size_t i = 0; i < in->count && c->boundary_count == 0; i++)
        brings_history |= strcmp(in->messages[i].role, "assistant") == 0;
    if (!in->conversation || brings_history ||
        !conv_has_lost(config->conversations, in->tenant, in->principal, c->id, in->request_key))
        return 0;
    if (c->boundary_count == 0)
        return td_fail(err, -TD_ERR_CONFLICT,
                       "no turn of this conversation was kept; send it from its first message on, or delete "
                       "it to begin anew");
    return td_fail(err, -TD_ERR_CONFLICT,
                   "the last turn of this conversation was not kept: it holds %u; send the whole history "
                   "with the new message, or fork it to go on from there",
                   c->boundary_count);
}

/* Place the request on conversation c (loaded, version set): sets first_new, is_repeat, forks when the
 * history was edited. */
static int place_on(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                    bool id_by_key, struct td_error *err)
{
    struct conversation *c = &t->conversation;
    size_t message = 0;
    int64_t boundary = match_boundary(c, t, in->count - 1, &message);
    t->first_new = boundary < 0 ? 0 : message + 1;
    t->is_repeat = repeats_last_turn(c, in, boundary);
    if (t->is_repeat) {
        cut_to(c, c->boundary_count - 1);
        return 0;
    }
    if (boundary < 0 || (uint32_t)boundary + 1 == c->boundary_count)
        return check_lost(config, in, t, boundary, err);
    cut_to(c, (uint32_t)boundary + 1);
    t->version = 0;
    c->last_request_key[0] = 0;
    return choose_id(in, id_by_key, c->id);
}

static int begin_new(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                     bool id_by_key, struct td_error *err)
{
    struct conversation *c = &t->conversation;
    memset(c, 0, sizeof *c);
    tokenizer_id(config->tokenizer, c->tokenizer_id);
    memcpy(c->fingerprint, config->fingerprint, TD_HASH_SIZE);
    c->created_us = clock_wall_us();
    t->version = 0;
    t->first_new = 0;
    if (!in->conversation)
        return choose_id(in, id_by_key, c->id);
    memcpy(c->id, in->conversation, strlen(in->conversation) + 1);
    return check_lost(config, in, t, -1, err);
}

/* The conversation that is named after the request's key, if this request made its last turn. *taken: there is one at
 * all. 0, -TD_ERR_NOTFOUND, … */
static int find_by_key(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                       bool *taken)
{
    char id[STORE_CONV_ID_MAX + 1];
    *taken = false;
    if (!in->request_key[0])
        return -TD_ERR_NOTFOUND;
    conv_id_from_key(in->request_key, id);
    int rc = conv_load(config->conversations, in->tenant, in->principal, id, &t->version, &t->conversation);
    if (rc < 0)
        return rc;
    *taken = true;
    if (strcmp(t->conversation.last_request_key, in->request_key) == 0 &&
        usable(config, &t->conversation) == 0)
        return 0;
    conv_free(&t->conversation);
    return -TD_ERR_NOTFOUND;
}

/* The id that the request asks for or whose history it has. 0, -TD_ERR_NOTFOUND: neither, … */
static int find_id(const struct turn_config *config, const struct turn_input *in, const struct turn *t,
                   char id[STORE_CONV_ID_MAX + 1])
{
    uint32_t boundary;
    if (!in->conversation)
        return conv_index_match(config->conversations, in->tenant, in->principal,
                                (const uint8_t(*)[TD_HASH_SIZE])t->hashes, in->count - 1, id, &boundary);
    memcpy(id, in->conversation, strlen(in->conversation) + 1);
    return 0;
}

/* Find what the request builds on. */
static int find_conversation(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                             struct td_error *err)
{
    char id[STORE_CONV_ID_MAX + 1] = "";
    bool taken, found = false;
    int rc = find_by_key(config, in, t, &taken);
    bool id_by_key = in->request_key[0] && !taken;
    if (rc == -TD_ERR_NOTFOUND) {
        rc = find_id(config, in, t, id);
        if (rc == 0)
            rc = conv_load(config->conversations, in->tenant, in->principal, id, &t->version,
                           &t->conversation);
        found = rc == 0;
        if (rc == -TD_ERR_TIMEOUT && !in->conversation) /* who brings the history is served without */
            rc = -TD_ERR_NOTFOUND;
    }
    if (found && usable(config, &t->conversation) < 0) {
        conv_free(&t->conversation);
        rc = -TD_ERR_NOTFOUND; /* a history of another model's tokens is of no use */
        if (in->conversation)
            return td_fail(err, -TD_ERR_MISMATCH,
                           "conversation belongs to a model with another tokenizer; start a new one");
    }
    if (rc == -TD_ERR_NOTFOUND && in->conversation && conv_id_is_made(in->conversation))
        return td_fail(err, rc, "there is no conversation %s; leave the id out to begin one",
                       in->conversation);
    if (rc == -TD_ERR_NOTFOUND)
        return begin_new(config, in, t, id_by_key, err);
    if (rc < 0)
        return td_fail(err, rc, "cannot read the conversation: %s", td_status_text(rc));
    return place_on(config, in, t, id_by_key, err);
}

static int check_request(const struct turn_input *in, struct td_error *err)
{
    if (in->count == 0 || in->count > CONV_MESSAGES_MAX)
        return td_fail(err, -TD_ERR_ARG, "messages: 1 to %d are wanted, got %zu", CONV_MESSAGES_MAX,
                       in->count);
    if (strcmp(in->messages[in->count - 1].role, "assistant") == 0)
        return td_fail(err, -TD_ERR_ARG, "the last message is the assistant's; end with a user message");
    if (in->conversation && (!in->conversation[0] || strlen(in->conversation) > STORE_CONV_ID_MAX))
        return td_fail(err, -TD_ERR_ARG, "a conversation id has 1 to %d characters", STORE_CONV_ID_MAX);
    size_t key_size = strlen(in->request_key);
    if (key_size > 0 &&
        (key_size < CONV_ID_DIGITS || key_size >= sizeof((struct conversation *)0)->last_request_key))
        return td_fail(err, -TD_ERR_ARG, "a request key has %d to %zu characters, got %zu", CONV_ID_DIGITS,
                       sizeof((struct conversation *)0)->last_request_key - 1, key_size);
    return 0;
}

static int render(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                  struct td_error *err)
{
    const struct conversation *c = &t->conversation;
    bool continues = c->boundary_count > 0;
    bool reply_open = continues && c->boundaries[c->boundary_count - 1].reply_open;
    /* The renderer's `first` tells whether a conversation goes on. When messages are appended to one whose
     * earlier messages the client did not send, an empty placeholder stands for what is already tokens. */
    const struct chat_message *messages = in->model_messages;
    struct chat_message *shifted = NULL;
    size_t count = in->count, first = t->first_new;
    if (continues && first == 0) {
        shifted = malloc((in->count + 1) * sizeof *shifted);
        if (!shifted)
            return -TD_ERR_NOMEM;
        shifted[0] = (struct chat_message){"assistant", "", 0};
        memcpy(shifted + 1, in->model_messages, in->count * sizeof *shifted);
        messages = shifted, count = in->count + 1, first = 1;
    }
    struct chat_text text;
    int rc =
        chat_template_render(config->template_kind, messages, count, first, reply_open, true, &text, err);
    free(shifted);
    if (rc < 0)
        return rc;
    bool add_bos = !continues && text.add_bos;
    int64_t new_count = tokenizer_encode_new(config->tokenizer, text.text, text.size, text.special,
                                             text.special_count, add_bos, c->ids_count, &t->ids);
    chat_text_free(&text);
    if (new_count < 0)
        return td_fail(err, (int)new_count, "cannot tokenise the messages: %s",
                       td_status_text((int)new_count));
    if (c->ids_count)
        memcpy(t->ids, c->ids, c->ids_count * sizeof *t->ids);
    t->known_count = c->ids_count;
    t->ids_count = c->ids_count + (uint32_t)new_count;
    return 0;
}

/* The stored ids go on behind the cut: a repeat's prompt is their beginning. */
static int check_repeat(const struct turn *t, struct td_error *err)
{
    const struct conversation *c = &t->conversation;
    if (!t->is_repeat)
        return 0;
    if (t->ids_count <= c->boundaries[c->boundary_count].ids_count && /* the one that was cut off */
        memcmp(t->ids, c->ids, t->ids_count * sizeof *t->ids) == 0)
        return 0;
    return td_fail(err, -TD_ERR_CONFLICT, "the idempotency key was used for another request; use a new one");
}

int turn_prepare(const struct turn_config *config, const struct turn_input *in, struct turn *out,
                 struct td_error *err)
{
    memset(out, 0, sizeof *out);
    int rc = check_request(in, err);
    if (rc == 0)
        rc = hash_messages(config, in, out);
    if (rc == 0)
        rc = find_conversation(config, in, out, err);
    if (rc == 0)
        rc = render(config, in, out, err);
    if (rc == 0)
        rc = check_repeat(out, err);
    if (rc == 0 && out->ids_count >= config->context_max)
        rc = td_fail(err, -TD_ERR_CONTEXT, "the prompt has %u tokens, the context %u", out->ids_count,
                     config->context_max);
    if (rc == -TD_ERR_CONTEXT)
        return rc; /* ids_count is for the error's counts; turn_free still wanted */
    if (rc < 0)
        turn_free(out);
    return rc;
}

static void set_title(struct conversation *c, const struct turn_input *in)
{
    if (c->title[0])
        return;
    for (size_t i = 0; i < in->count; i++) {
        const struct chat_message *m = &in->model_messages[i];
        if (strcmp(m->role, "user") != 0)
            continue;
        size_t size = utf8_complete(m->content, TD_MIN(m->content_size, (size_t)CONV_TITLE_MAX));
        memcpy(c->title, m->content, size);
        c->title[size] = 0;
        for (char *p = c->title; *p; p++)
            if ((unsigned char)*p < ' ')
                *p = ' ';
        return;
    }
}

/* conversation := prompt + reply, with one more boundary. */
static int append_turn(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                       const int32_t *reply, uint32_t reply_count, const char *reply_text,
                       size_t reply_text_size)
{
    struct conversation *c = &t->conversation;
    int32_t *ids = realloc(c->ids, ((size_t)t->ids_count + reply_count + 1) * sizeof *ids);
    if (!ids)
        return -TD_ERR_NOMEM;
    c->ids = ids;
    memcpy(c->ids, t->ids, t->ids_count * sizeof *ids);
    if (reply_count)
        memcpy(c->ids + t->ids_count, reply, reply_count * sizeof *ids);
    c->ids_count = t->ids_count + reply_count;
    struct conv_boundary *boundaries = realloc(c->boundaries, (c->boundary_count + 1) * sizeof *boundaries);
    if (!boundaries)
        return -TD_ERR_NOMEM;
    c->boundaries = boundaries;
    struct conv_boundary *b = &boundaries[c->boundary_count++];
    b->ids_count = c->ids_count;
    b->reply_open = reply_count == 0 || !tokenizer_is_end(config->tokenizer, reply[reply_count - 1]);
    conv_history_next(in->principal_key, t->hashes[t->message_count - 1], "assistant", reply_text,
                      reply_text_size, b->history);
    return 0;
}

int turn_commit_begin(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                      const int32_t *reply, uint32_t reply_count, const char *reply_text,
                      size_t reply_text_size, const uint8_t *vault, uint32_t vault_size)
{
    if (t->is_repeat)
        return 0;
    struct conversation *c = &t->conversation;
    int rc = append_turn(config, in, t, reply, reply_count, reply_text, reply_text_size);
    if (rc < 0)
        return rc;
    if (vault) {
        uint8_t *copy = malloc(vault_size + 1u);
        if (!copy)
            return -TD_ERR_NOMEM;
        memcpy(copy, vault, vault_size);
        if (c->vault)
            crypto_wipe(c->vault, c->vault_size);
        free(c->vault);
        c->vault = copy, c->vault_size = vault_size;
    }
    set_title(c, in);
    memcpy(c->last_request_key, in->request_key,
           TD_MIN(strlen(in->request_key) + 1, sizeof c->last_request_key));
    c->last_request_key[sizeof c->last_request_key - 1] = 0;
    c->updated_us = clock_wall_us();
    return conv_save_begin(config->conversations, in->tenant, in->principal, t->version, c, &t->waiter);
}

int turn_commit_end(const struct turn_config *config, const struct turn_input *in, struct turn *t)
{
    struct conv_index *x = config->conversations;
    if (t->is_repeat) /* of one that may be on its way yet */
        return conv_is_durable(x, in->tenant, in->principal, t->conversation.id, t->version)
                   ? 0
                   : -TD_ERR_TIMEOUT;
    return conv_save_end(x, in->tenant, in->principal, t->version, &t->conversation, t->waiter);
}

int turn_commit(const struct turn_config *config, const struct turn_input *in, struct turn *t,
                const int32_t *reply, uint32_t reply_count, const char *reply_text, size_t reply_text_size,
                const uint8_t *vault, uint32_t vault_size)
{
    int rc =
        turn_commit_begin(config, in, t, reply, reply_count, reply_text, reply_text_size, vault, vault_size);
    return rc < 0 ? rc : turn_commit_end(config, in, t);
}

void turn_lost(const struct turn_config *config, const struct turn_input *in, const struct turn *t)
{
    const char *id = t->conversation.id;
    if (t->is_repeat || (t->version == 0 && conv_id_is_made(id))) /* such an id is unknown now, and says so */
        return;
    conv_note_lost(config->conversations, in->tenant, in->principal, id, t->version + 1, in->request_key);
}

void turn_free(struct turn *t)
{
    conv_free(&t->conversation);
    if (t->ids)
        crypto_wipe(t->ids, t->ids_count * sizeof *t->ids);
    free(t->ids);
    free(t->hashes);
    memset(t, 0, sizeof *t);
}
