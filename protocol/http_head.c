/* http_head: what libwebsockets parsed of a request's head, copied out, and the decisions that depend on it alone: which Host, which
 * Origin, which content type. */
#include "protocol/net_internal.h"
#include "protocol/api_internal.h"
#include <ctype.h>
#include <stdlib.h>
#include <strings.h>

/* ---- reading ----------------------------------------------------------------------------------------------- */

static char *copy_token(struct lws *wsi, enum lws_token_indexes token)
{
    int size = lws_hdr_total_length(wsi, token);
    char *text = calloc(1, (size_t)TD_MAX(size, 0) + 1);
    if (text && size > 0 && lws_hdr_copy(wsi, text, size + 1, token) < 0)
        text[0] = '\0';
    return text;
}

/* A header that libwebsockets does not know by number. name: lower case, with the colon. */
static char *copy_custom(struct lws *wsi, const char *name)
{
    int name_size = (int)strlen(name), size = lws_hdr_custom_length(wsi, name, name_size);
    char *text = calloc(1, (size_t)TD_MAX(size, 0) + 1);
    if (text && size > 0 && lws_hdr_custom_copy(wsi, text, size + 1, name, name_size) < 0)
        text[0] = '\0';
    return text;
}

/* The arguments, decoded by libwebsockets one by one and joined again. */
static char *copy_query(struct lws *wsi)
{
    int size = lws_hdr_total_length(wsi, WSI_TOKEN_HTTP_URI_ARGS), used = 0;
    if (size <= 0)
        return calloc(1, 1);
    size += 64; /* a separator for each argument */
    char *text = calloc(1, (size_t)size);
    for (int i = 0; text && i < 63 && used + 2 < size; i++) {
        int offset = used + (used > 0);
        int n = lws_hdr_copy_fragment(wsi, text + offset, size - offset, WSI_TOKEN_HTTP_URI_ARGS, i);
        if (n < 0)
            break;
        if (used > 0)
            text[used] = '&';
        used = offset + n;
    }
    if (text)
        text[used] = '\0';
    return text;
}

static void copy_method_and_path(struct lws *wsi, struct http_head *h)
{
    static const struct {
        enum lws_token_indexes token;
        const char *method;
    } methods[] = {{WSI_TOKEN_GET_URI, "GET"},         {WSI_TOKEN_POST_URI, "POST"},
                   {WSI_TOKEN_OPTIONS_URI, "OPTIONS"}, {WSI_TOKEN_DELETE_URI, "DELETE"},
                   {WSI_TOKEN_PUT_URI, "PUT"},         {WSI_TOKEN_PATCH_URI, "PATCH"},
                   {WSI_TOKEN_HEAD_URI, "HEAD"}};
    for (size_t i = 0; i < TD_COUNT(methods); i++)
        if (lws_hdr_total_length(wsi, methods[i].token) > 0) {
            h->method = strdup(methods[i].method);
            h->path = copy_token(wsi, methods[i].token);
            return;
        }
    h->method = strdup("?");
    h->path = strdup("");
}

int http_head_read(struct lws *wsi, struct http_head *h)
{
    const struct {
        char **out;
        enum lws_token_indexes token;
    } known[] = {{&h->host, WSI_TOKEN_HOST},
                 {&h->origin, WSI_TOKEN_ORIGIN},
                 {&h->connection, WSI_TOKEN_CONNECTION},
                 {&h->version, WSI_TOKEN_HTTP},
                 {&h->authorization, WSI_TOKEN_HTTP_AUTHORIZATION},
                 {&h->content_type, WSI_TOKEN_HTTP_CONTENT_TYPE},
                 {&h->content_length, WSI_TOKEN_HTTP_CONTENT_LENGTH},
                 {&h->transfer_encoding, WSI_TOKEN_HTTP_TRANSFER_ENCODING},
                 {&h->expect, WSI_TOKEN_HTTP_EXPECT}};
    *h = (struct http_head){0};
    copy_method_and_path(wsi, h);
    bool good = h->method && h->path && (h->query = copy_query(wsi));
    for (size_t i = 0; good && i < TD_COUNT(known); i++)
        good = (*known[i].out = copy_token(wsi, known[i].token)) != NULL;
    good = good && (h->idempotency_key = copy_custom(wsi, "idempotency-key:")) &&
           (h->conversation_id = copy_custom(wsi, "x-conversation-id:"));
    return good ? 0 : -TD_ERR_NOMEM;
}

void http_head_free(struct http_head *h)
{
    char **all[] = {&h->method,
                    &h->path,
                    &h->query,
                    &h->host,
                    &h->origin,
                    &h->connection,
                    &h->version,
                    &h->authorization,
                    &h->content_type,
                    &h->content_length,
                    &h->transfer_encoding,
                    &h->expect,
                    &h->idempotency_key,
                    &h->conversation_id};
    for (size_t i = 0; i < TD_COUNT(all); i++)
        free(*all[i]);
    *h = (struct http_head){0};
}

/* ---- deciding ---------------------------------------------------------------------------------------------- */

int http_content_length(const char *text, uint64_t *out)
{
    *out = 0;
    size_t digits = 0;
    for (; digits < 19 && isdigit((unsigned char)text[digits]); digits++)
        *out = *out * 10 + (uint64_t)(text[digits] - '0');
    return text[digits] == '\0' ? 0 : -TD_ERR_FORMAT;
}

static bool host_is_loopback(const char *host)
{
    static const char *const names[] = {"localhost", "127.0.0.1", "[::1]"};
    for (size_t i = 0; i < TD_COUNT(names); i++) {
        size_t size = strlen(names[i]);
        if (strncasecmp(host, names[i], size) != 0)
            continue;
        const char *rest = host + size;
        if (*rest == '\0')
            return true;
        return *rest == ':' && rest[1] != '\0' && rest[1 + strspn(rest + 1, "0123456789")] == '\0';
    }
    return false;
}

/* A web page can make a browser send requests to this machine under a name of its own, but not to a Unix socket. */
bool http_host_refused(const struct listener *l, const char *host)
{
    return l->loopback_hosts_only && !l->unix_path && !host_is_loopback(host);
}

bool http_origin_allowed(const struct listener *l, const char *origin)
{
    for (char **o = l->origins; o && *o; o++)
        if (strcasecmp(*o, origin) == 0)
            return true;
    return false;
}

bool http_is_json(const char *content_type)
{
    static const char json[] = "application/json";
    if (strncasecmp(content_type, json, sizeof json - 1) != 0)
        return false;
    char after = content_type[sizeof json - 1];
    return after == '\0' || after == ';' || after == ' ';
}

/* Neither type nor body: what `curl -X POST` sends. A web page's form has a type; a script can send nothing, but not without an Origin. */
bool http_is_json_or_nothing(const char *content_type, uint64_t body_size)
{
    return http_is_json(content_type) || (!content_type[0] && body_size == 0);
}

bool http_token_in_list(const char *list, const char *token)
{
    size_t size = strlen(token);
    while (*list) {
        list += strspn(list, " \t,");
        size_t n = strcspn(list, " \t,");
        if (n == size && strncasecmp(list, token, n) == 0)
            return true;
        list += n;
    }
    return false;
}
