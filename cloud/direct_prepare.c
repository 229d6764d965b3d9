/* direct_prepare: the parts of a call that may take long: from messages to ids, and from a reply to the conversation's next state. On the
 * worker's thread, while the loop leaves the call alone but for `api` and its place in the list. */
#include "cloud/direct_internal.h"
#include <stdio.h>
#include <stdlib.h>

/* ---- texts ---- */

static char *copy_text(const char *text, size_t size)
{
    char *copy = malloc(size + 1);
    if (copy) {
        if (size)
            memcpy(copy, text, size);
        copy[size] = '\0';
    }
    return copy;
}

static void free_text(const char *text, size_t size)
{
    if (text)
        crypto_wipe((char *)text, size);
    free((char *)text);
}

static int copy_messages(struct direct_call *c, const struct api_request *r)
{
    c->messages = calloc(r->message_count + 1, sizeof *c->messages);
    if (!c->messages)
        return -TD_ERR_NOMEM;
    for (size_t i = 0; i < r->message_count; i++) {
        const struct chat_message *m = &r->messages[i];
        struct chat_message *copy = &c->messages[c->message_count++];
        copy->role = copy_text(m->role, strlen(m->role));
        copy->content = copy_text(m->content, m->content_size);
        copy->content_size = m->content_size;
        if (!copy->role || !copy->content)
            return -TD_ERR_NOMEM;
    }
    return 0;
}

int direct_copy_texts(struct direct_call *c, const struct api_request *r)
{
    if (r->chat)
        return copy_messages(c, r);
    if (r->prompt) {
        c->prompt = copy_text(r->prompt, r->prompt_size);
        c->prompt_size = r->prompt_size;
        return c->prompt ? 0 : -TD_ERR_NOMEM;
    }
    c->ids = malloc((r->prompt_id_count + 1) * sizeof *c->ids);
    if (!c->ids)
        return -TD_ERR_NOMEM;
    if (r->prompt_id_count)
        memcpy(c->ids, r->prompt_ids, r->prompt_id_count * sizeof *c->ids);
    c->ids_count = (uint32_t)r->prompt_id_count;
    return 0;
}

void direct_free_texts(struct direct_call *c)
{
    for (size_t i = 0; i < c->message_count; i++) {
        free((char *)c->messages[i].role);
        free_text(c->messages[i].content, c->messages[i].content_size);
    }
    free(c->messages);
    free_text(c->prompt, c->prompt_size);
    free_text(c->text, c->text_size);
}

/* ---- before ---- */

static int prepare_chat(struct direct_call *c)
{
    c->input = (struct turn_input){.tenant = c->tenant,
                                   .principal = c->principal,
                                   .principal_key = c->own_key,
                                   .messages = c->messages,
                                   .model_messages = c->messages,
                                   .count = c->message_count,
                                   .conversation = c->conversation_named ? c->conversation : NULL,
                                   .request_key = c->request_key};
    int rc = turn_prepare(&c->direct->turns, &c->input, &c->turn, &c->error);
    if (rc == -TD_ERR_CONTEXT) { /* its count is for the answer */
        c->ids_count = c->turn.ids_count;
        turn_free(&c->turn);
    }
    if (rc < 0)
        return rc;
    c->has_turn = true;
    c->ids = malloc((c->turn.ids_count + 1u) * sizeof *c->ids);
    if (!c->ids)
        return -TD_ERR_NOMEM;
    memcpy(c->ids, c->turn.ids, c->turn.ids_count * sizeof *c->ids);
    c->ids_count = c->turn.ids_count;
    memcpy(c->conversation, c->turn.conversation.id, strlen(c->turn.conversation.id) + 1);
    return 0;
}

static int prepare_text(struct direct_call *c)
{
    const struct tokenizer *t = c->direct->service->tokenizer;
    bool bos = tokenizer_add_bos(t);
    int64_t count = tokenizer_encode_new(t, c->prompt, c->prompt_size, NULL, 0, bos, 0, &c->ids);
    if (count < 0)
        return (int)count;
    c->ids_count = (uint32_t)count;
    return 0;
}

void direct_prepare(struct io_job *job)
{
    struct direct_call *c = (struct direct_call *)((char *)job - offsetof(struct direct_call, job));
    c->status = c->chat ? prepare_chat(c) : c->ids ? 0 : prepare_text(c);
    if (c->status == 0 && c->ids_count == 0)
        c->status = td_fail(&c->error, -TD_ERR_ARG, "the prompt is empty");
    if (c->status == 0 && c->ids_count >= c->direct->service->context_max)
        c->status = -TD_ERR_CONTEXT;
    if (c->status < 0 && !c->error.text[0])
        td_fail(&c->error, c->status, "cannot prepare the prompt: %s", td_status_text(c->status));
}

/* ---- after ---- */

void direct_commit(struct io_job *job)
{
    struct direct_call *c = (struct direct_call *)((char *)job - offsetof(struct direct_call, job));
    c->status = turn_commit_begin(&c->direct->turns, &c->input, &c->turn, c->reply, c->reply_count,
                                  c->text ? c->text : "", c->text_size, NULL, 0);
}

void direct_commit_wait(struct io_job *job)
{
    struct direct_call *c = (struct direct_call *)((char *)job - offsetof(struct direct_call, job));
    if (c->status == 0)
        c->status = turn_commit_end(&c->direct->turns, &c->input, &c->turn);
    if (c->status < 0 && c->status != -TD_ERR_CONFLICT)
        turn_lost(&c->direct->turns, &c->input, &c->turn);
}
