/* http_client: HTTP by hand over a socket, for tests: what is sent is exactly what the test wrote. */
#ifndef TANDEM_TESTS_HTTP_CLIENT_H
#define TANDEM_TESTS_HTTP_CLIENT_H
#include "shared/base.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define CLIENT_WAIT_MS 60000 /* long: the machine may be busy */

struct client {
    int fd;
    char *data; /* received, not yet used */
    size_t size, capacity;
    bool ended;
};

struct response {
    int status;
    char headers[4096];
    char *body; /* de-chunked, NUL-terminated; the test's to free */
    size_t size;
};

/* Does a counter that another thread changes come to this value? */
static inline bool reaches(atomic_int *counter, int value)
{
    for (int i = 0; i < CLIENT_WAIT_MS && atomic_load(counter) < value; i++)
        usleep(1000);
    return atomic_load(counter) >= value;
}

static inline struct client client_open(uint16_t port)
{
    struct client c = {.fd = socket(AF_INET, SOCK_STREAM, 0)};
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (c.fd < 0 || connect(c.fd, (struct sockaddr *)&at, sizeof at))
        abort();
    return c;
}

static inline struct client client_open_unix(const char *path)
{
    struct client c = {.fd = socket(AF_UNIX, SOCK_STREAM, 0)};
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s", path);
    if (c.fd < 0 || connect(c.fd, (struct sockaddr *)&at, sizeof at))
        abort();
    return c;
}

static inline void client_close(struct client *c)
{
    close(c->fd);
    free(c->data);
    *c = (struct client){.fd = -1};
}

static inline void client_send(struct client *c, const void *data, size_t size)
{
    while (size > 0) {
        ssize_t n = send(c->fd, data, size, MSG_NOSIGNAL);
        if (n <= 0)
            return;
        data = (const char *)data + n, size -= (size_t)n;
    }
}

/* A request; extra: more header lines, each with its \r\n. body NULL: no Content-Length. */
static inline void client_request(struct client *c, const char *method, const char *path, const char *extra,
                                  const char *body)
{
    size_t body_size = body ? strlen(body) : 0, size = body_size + strlen(path) + strlen(extra) + 256;
    char *text = malloc(size);
    int n = snprintf(text, size, "%s %s HTTP/1.1\r\n%s%s", method, path,
                     strstr(extra, "Host:") ? "" : "Host: localhost\r\n", extra);
    if (body)
        n += snprintf(text + n, size - (size_t)n, "Content-Length: %zu\r\n", body_size);
    n += snprintf(text + n, size - (size_t)n, "\r\n%s", body ? body : "");
    client_send(c, text, (size_t)n);
    free(text);
}

/* More bytes, or false at the end or after CLIENT_WAIT_MS. */
static inline bool client_receive(struct client *c)
{
    struct pollfd p = {.fd = c->fd, .events = POLLIN};
    if (c->ended || poll(&p, 1, CLIENT_WAIT_MS) <= 0)
        return false;
    if (c->capacity - c->size < 65536) {
        c->capacity = 2 * c->capacity + 131072;
        c->data = realloc(c->data, c->capacity);
    }
    ssize_t n = recv(c->fd, c->data + c->size, c->capacity - c->size - 1, 0);
    if (n <= 0) {
        c->ended = true;
        return false;
    }
    c->size += (size_t)n;
    c->data[c->size] = '\0';
    return true;
}

static inline void client_use(struct client *c, size_t size)
{
    memmove(c->data, c->data + size, c->size - size + 1);
    c->size -= size;
}

/* Wait until the received bytes hold `text`. */
static inline bool client_wait_for(struct client *c, const char *text)
{
    while (!c->data || !memmem(c->data, c->size, text, strlen(text)))
        if (!client_receive(c))
            return false;
    return true;
}

/* Nothing more comes and the peer has closed. */
static inline bool client_at_end(struct client *c)
{
    while (client_receive(c))
        ;
    return c->ended;
}

static inline bool response_has(const struct response *r, const char *header_line)
{
    return strcasestr(r->headers, header_line) != NULL;
}

static inline size_t client_body_by_chunks(struct client *c, struct response *r)
{
    for (;;) {
        size_t line;
        char *end;
        while (!c->data || !(end = strstr(c->data, "\r\n")))
            if (!client_receive(c))
                return 0;
        line = (size_t)(end - c->data) + 2;
        size_t size = strtoul(c->data, NULL, 16);
        while (c->size < line + size + 2)
            if (!client_receive(c))
                return 0;
        r->body = realloc(r->body, r->size + size + 1);
        memcpy(r->body + r->size, c->data + line, size);
        r->size += size;
        r->body[r->size] = '\0';
        client_use(c, line + size + 2);
        if (size == 0)
            return 1;
    }
}

/* One response; status 0 if none came. 100 Continue is skipped. */
static inline struct response client_response(struct client *c, bool head_only)
{
    struct response r = {0};
    do {
        if (!client_wait_for(c, "\r\n\r\n"))
            return r;
        size_t size = (size_t)(strstr(c->data, "\r\n\r\n") - c->data) + 4;
        snprintf(r.headers, sizeof r.headers, "%.*s", (int)size, c->data);
        client_use(c, size);
        r.status = atoi(r.headers + 9);
    } while (r.status == 100);
    const char *length = strcasestr(r.headers, "\r\nContent-Length:");
    if (head_only || r.status == 204) {
        r.body = calloc(1, 1);
    } else if (length) {
        size_t size = strtoul(length + 17, NULL, 10);
        while (c->size < size)
            if (!client_receive(c))
                break;
        r.body = calloc(1, size + 1);
        r.size = TD_MIN(size, c->size);
        memcpy(r.body, c->data ? c->data : "", r.size);
        if (r.size)
            client_use(c, r.size);
    } else if (strcasestr(r.headers, "chunked")) {
        r.body = calloc(1, 1);
        if (!client_body_by_chunks(c, &r))
            r.status = 0;
    } else {
        while (client_receive(c))
            ;
        r.body = calloc(1, c->size + 1);
        memcpy(r.body, c->data, r.size = c->size);
        c->size = 0;
    }
    return r;
}

#endif
