/* http: requests of the command line to an agent's or a node's API, through libcurl. Certificates are always verified. */
#include "cli/cli.h"
#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <unistd.h>

#define HTTP_BODY_MAX (64u << 20)
#define PATIENCE_US   2000000 /* a stream that is silent for so long is said to be waited for */

struct transfer {
    CURL *curl;
    struct cli_response *out;
    int (*on_data)(void *ctx, const char *data, size_t size);
    void *ctx;
    const struct cli_server *server;
    /* of a stream of which nothing has come; shown_s: what the line on the terminal says, 0: there is none */
    uint64_t begun_us, shown_s;
};

static void wait_ends(struct transfer *t)
{
    if (t->shown_s > 0)
        fputs("\r\033[K", stderr);
    t->shown_s = 0, t->begun_us = 0;
}

/* Somebody at a terminal sees that a stream which has not begun is still waited for: the agent keeps a request while its cloud is away. */
static void show_wait(struct transfer *t)
{
    uint64_t waited_us = t->begun_us ? clock_mono_us() - t->begun_us : 0;
    if (waited_us > PATIENCE_US && waited_us / 1000000 != t->shown_s) {
        t->shown_s = waited_us / 1000000;
        fprintf(stderr, "\rwaiting for the first token, %llu s", (unsigned long long)t->shown_s);
    }
}

static int on_progress(void *arg, curl_off_t down_total, curl_off_t down, curl_off_t up_total, curl_off_t up)
{
    struct transfer *t = arg;
    (void)down_total, (void)down, (void)up_total, (void)up;
    show_wait(t);
    return t->server->on_wait && !t->server->on_wait(t->server->wait_ctx);
}

static size_t take_body(char *data, size_t one, size_t size, void *arg)
{
    struct transfer *t = arg;
    (void)one;
    wait_ends(t);
    long status = 0;
    curl_easy_getinfo(t->curl, CURLINFO_RESPONSE_CODE, &status);
    if (t->on_data && status == 200)
        return t->on_data(t->ctx, data, size) == 0 ? size : CURL_WRITEFUNC_ERROR;
    char *grown = t->out->size + size < HTTP_BODY_MAX ? realloc(t->out->body, t->out->size + size + 1) : NULL;
    if (!grown)
        return CURL_WRITEFUNC_ERROR;
    memcpy(grown + t->out->size, data, size);
    t->out->body = grown;
    t->out->size += size;
    grown[t->out->size] = 0;
    return size;
}

static size_t take_header(char *data, size_t one, size_t size, void *arg)
{
    static const char NAME[] = "x-conversation-id:";
    struct transfer *t = arg;
    (void)one;
    size_t skip = sizeof NAME - 1;
    if (size <= skip || strncasecmp(data, NAME, skip) != 0)
        return size;
    while (skip < size && data[skip] == ' ')
        skip++;
    size_t end = size;
    while (end > skip && (data[end - 1] == '\r' || data[end - 1] == '\n'))
        end--;
    snprintf(t->out->conversation, sizeof t->out->conversation, "%.*s", (int)(end - skip), data + skip);
    return size;
}

static struct curl_slist *make_headers(const struct cli_server *server, bool has_body, struct td_error *err)
{
    struct curl_slist *headers =
        curl_slist_append(NULL, has_body ? "Content-Type: application/json" : "Accept: application/json");
    char key[256], line[300];
    if (!server->bearer && (!server->key_file || !server->key_file[0]))
        return headers;
    if (!server->bearer && config_read_secret(server->key_file, key, sizeof key, err) < 0) {
        curl_slist_free_all(headers);
        return NULL;
    }
    snprintf(line, sizeof line, "Authorization: Bearer %s", server->bearer ? server->bearer : key);
    return curl_slist_append(headers, line);
}

/* People paste the base URL of OpenAI clients: what stands behind the host is ours to add. */
static size_t base_size(const char *url)
{
    size_t size = strlen(url);
    while (size > 0 && url[size - 1] == '/')
        size--;
    if (size > 3 && memcmp(url + size - 3, "/v1", 3) == 0)
        size -= 3;
    return size;
}

static const char *advice_for(CURLcode code, const char *detail, const struct cli_server *server)
{
    switch (code) {
    case CURLE_SSL_CACERT_BADFILE:
        return "--ca names a PEM file with the authority's certificate";
    case CURLE_PEER_FAILED_VERIFICATION: /* OpenSSL's and curl's words */
        if (strstr(detail, "expired") || strstr(detail, "not yet valid"))
            return "it is to be renewed at the server, or this clock is wrong";
        if (strstr(detail, "subject name"))
            return "--url names the host as its certificate does";
        return "name the authority of its certificate with --ca FILE";
    case CURLE_SSL_CONNECT_ERROR:
        return "does it speak plain HTTP? then --url begins with http://";
    case CURLE_UNSUPPORTED_PROTOCOL:
        return "--url begins with http:// or https://";
    case CURLE_GOT_NOTHING:
    case CURLE_RECV_ERROR:
    case CURLE_WEIRD_SERVER_REPLY:
        if (server->no_answer)
            return server->no_answer;
        if (strncmp(server->url, "https:", 6) != 0)
            return "does it speak TLS? then --url begins with https://";
        return "try again";
    default:
        return "is the program running, and is that its address?";
    }
}

static int run(struct transfer *t, const struct cli_server *server, const char *method, const char *path,
               const char *json_body, struct curl_slist *headers, struct td_error *err)
{
    char url[1024], detail[CURL_ERROR_SIZE] = "";
    snprintf(url, sizeof url, "%.*s%s", (int)base_size(server->url), server->url, path);
    curl_easy_setopt(t->curl, CURLOPT_URL, url);
    curl_easy_setopt(t->curl, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(t->curl, CURLOPT_NOPROXY, "*");
    curl_easy_setopt(t->curl, CURLOPT_CUSTOMREQUEST, method);
    curl_easy_setopt(t->curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(t->curl, CURLOPT_ERRORBUFFER, detail);
    curl_easy_setopt(t->curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(t->curl, CURLOPT_CONNECTTIMEOUT, 10L);
    if (json_body)
        curl_easy_setopt(t->curl, CURLOPT_POSTFIELDS, json_body);
    if (server->ca_path && server->ca_path[0])
        curl_easy_setopt(t->curl, CURLOPT_CAINFO, server->ca_path);
    curl_easy_setopt(t->curl, CURLOPT_WRITEFUNCTION, take_body);
    curl_easy_setopt(t->curl, CURLOPT_WRITEDATA, t);
    curl_easy_setopt(t->curl, CURLOPT_HEADERFUNCTION, take_header);
    curl_easy_setopt(t->curl, CURLOPT_HEADERDATA, t);
    t->server = server;
    t->begun_us = t->on_data && cli_is_terminal(STDERR_FILENO) ? clock_mono_us() : 0;
    curl_easy_setopt(t->curl, CURLOPT_XFERINFOFUNCTION, on_progress);
    curl_easy_setopt(t->curl, CURLOPT_XFERINFODATA, t);
    curl_easy_setopt(t->curl, CURLOPT_NOPROGRESS, 0L);
    CURLcode code = curl_easy_perform(t->curl);
    wait_ends(t);
    curl_easy_getinfo(t->curl, CURLINFO_RESPONSE_CODE, &t->out->status);
    if (code == CURLE_OK)
        return 0;
    return td_fail(err, -TD_ERR_IO, "cannot talk to %s: %s; %s", server->url,
                   detail[0] ? detail : curl_easy_strerror(code), advice_for(code, detail, server));
}

int cli_http(const struct cli_server *server, const char *method, const char *path, const char *json_body,
             int (*on_data)(void *ctx, const char *data, size_t size), void *ctx, struct cli_response *out,
             struct td_error *err)
{
    memset(out, 0, sizeof *out);
    struct curl_slist *headers = make_headers(server, json_body != NULL, err);
    if (!headers)
        return err->code ? err->code : td_fail(err, -TD_ERR_NOMEM, "out of memory");
    struct transfer t = {.curl = curl_easy_init(), .out = out, .on_data = on_data, .ctx = ctx};
    int rc = t.curl ? run(&t, server, method, path, json_body, headers, err)
                    : td_fail(err, -TD_ERR_NOMEM, "out of memory");
    curl_easy_cleanup(t.curl);
    curl_slist_free_all(headers);
    if (rc < 0) {
        free(out->body);
        out->body = NULL;
    }
    return rc;
}

bool cli_is_loopback(const char *url)
{
    static const char *const hosts[] = {"http://127.0.0.1", "http://localhost", "http://[::1]"};
    for (size_t i = 0; i < TD_COUNT(hosts); i++) {
        size_t size = strlen(hosts[i]);
        if (strncmp(url, hosts[i], size) == 0 && (url[size] == '\0' || url[size] == ':' || url[size] == '/'))
            return true;
    }
    return false;
}

/* What a program that is no OpenAI server says: its first line, if that is text. */
static size_t first_line(const struct cli_response *r)
{
    size_t size = 0;
    while (r->body && size < r->size && size < 120 && r->body[size] >= ' ' && r->body[size] <= '~' &&
           r->body[0] != '<')
        size++;
    return size;
}

void cli_http_error(const struct cli_server *server, const struct cli_response *r, struct td_error *err)
{
    json_t *body = r->body ? json_loadb(r->body, r->size, 0, NULL) : NULL;
    const char *message = json_string_value(json_object_get(json_object_get(body, "error"), "message"));
    bool no_key = r->status == 401 && !server->bearer && (!server->key_file || !server->key_file[0]);
    int size = (int)first_line(r);
    if (message)
        td_fail(err, -TD_ERR_IO, "%s%s", message,
                no_key ? "; --key-file FILE names the file that holds it" : "");
    else
        td_fail(err, -TD_ERR_IO, "the server answered with status %ld%s%.*s", r->status, size ? ": " : "",
                size, size ? r->body : "");
    json_decref(body);
}
