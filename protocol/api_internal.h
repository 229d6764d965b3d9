/* api_internal: what the files of the OpenAI API share with each other, and with nobody else. */
#ifndef TANDEM_PROTOCOL_API_INTERNAL_H
#define TANDEM_PROTOCOL_API_INTERNAL_H
#include "protocol/openai.h"
#include <jansson.h>

#define API_MODEL_SIZE   256u
#define API_USER_SIZE    512u
#define API_TOP_LOGPROBS 20u
#define API_REPETITION_WINDOW                                                                                \
    64 /* tokens that repetition_penalty looks back over, unless the request says otherwise */

/* ---- JSON text (openai_parse.c) ---- */

/* -TD_ERR_LIMIT for a text whose values would cost the JSON library memory out of proportion, or recurse too
 * deep. */
int api_json_check(const char *text, size_t size);
/* An object, the caller's; NULL: err says why, without quoting the text. */
json_t *api_json_load(const char *body, size_t size, struct td_error *err);
/* What may stand in a header and in a path: 1 to LIMIT_NAME_SIZE letters, digits, - _ . : */
bool api_conversation_id_valid(const char *id);

/* ---- UTF-8 (api_text.c) ---- */

/* Bytes of the UTF-8 sequence at the start of data: its length if it is valid; 0 if it is the beginning of a
 * valid one that the data cuts short; -n if the first n bytes can be no part of any, and stand for one
 * U+FFFD. size > 0. */
int api_utf8_step(const uint8_t *data, size_t size);
/* Valid UTF-8 out of any bytes, malloc'ed, invalid ones replaced. */
char *api_utf8_repair(const char *data, size_t size, size_t *out_size);

struct api_text { /* grows; NUL-terminated once something was appended */
    char *data;
    size_t size, capacity;
};
int api_text_append(struct api_text *b, const void *data, size_t size);
void api_text_free(struct api_text *b);

struct api_text_stream { /* the text of one reply on its way to the client */
    char *const *stops;
    size_t stop_sizes[LIMIT_API_STOPS];
    size_t stop_count;
    bool strip_space; /* the text's first space belongs to the tokenizer, not to the reply */
    bool stopped;     /* a stop string is complete: nothing more is shown */
    uint8_t partial[4];
    size_t partial_size;
    struct api_text held; /* characters that may turn out to be a stop string */
    size_t shown_size;    /* bytes that have left */
};
void api_text_stream_init(struct api_text_stream *t, char *const *stops, size_t stop_count,
                          bool strip_space); /* stops: borrowed */
void api_text_stream_deinit(struct api_text_stream *t);
/* Take a token's bytes; what may be shown now is appended to out. flush: nothing follows. 0 or -TD_ERR_NOMEM; see t->stopped. */
int api_text_stream_feed(struct api_text_stream *t, const void *data, size_t size, bool flush,
                         struct api_text *out);

/* application/json, with or without parameters (http_head.c). */
bool http_is_json(const char *content_type);
/* "model_not_found"-like code of a td code, or NULL. */
const char *api_error_code(int td_code);

#endif
