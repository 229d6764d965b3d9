/* api_internal: what the files of the OpenAI API share with each other, and with nobody else. */
#ifndef TANDEM_PROTOCOL_API_INTERNAL_H
#define TANDEM_PROTOCOL_API_INTERNAL_H
#include "protocol/api_text.h"
#include "protocol/openai.h"
#include <jansson.h>

#define API_MODEL_SIZE 256u
#define API_USER_SIZE  512u
/* tokens that repetition_penalty looks back over, unless the request says otherwise */
#define API_REPETITION_WINDOW 64

/* ---- JSON text (openai_parse.c) ---- */

/* 0, or -TD_ERR_LIMIT for a text whose values would cost the JSON library memory out of proportion, or recurse too deep. */
int api_json_check(const char *text, size_t size, struct td_error *err);
/* An object, the caller's; NULL: err says why, without quoting the text. */
json_t *api_json_load(const char *body, size_t size, struct td_error *err);

/* application/json, with or without parameters (http_head.c). */
bool http_is_json(const char *content_type);
bool http_is_json_or_nothing(const char *content_type, uint64_t body_size);
/* "model_not_found"-like code of a td code, or NULL. */
const char *api_error_code(int td_code);

#endif
