/* ws_connect: from a host name to an open connection, or one clear line why not.
 *
 * libwebsockets would look names up on the loop's thread, where a dead name server stops every other connection for seconds. So names are
 * looked up on a short-lived thread of their own and libwebsockets is given addresses, one after the other until one works; the
 * name stays what the certificate is checked against. The whole attempt has NET_CONNECT_TIMEOUT_US.
 *
 * Of several addresses the first one's reason is told that was reached: that nothing listens at the others is no news then.
 *
 * A certificate that is out of date is looked at once more, to tell since when: a handshake that checks it ends at that fault, and only one
 * that is over lets the certificate be read. The second connection's checks nothing, and shows whoever is there this client's own certificate,
 * where it has one, with proof of its key. Behind its handshake nothing is sent.
 *
 * A set of trust anchor and client certificate is a vhost to libwebsockets. Vhosts are kept and used again, for an agent reconnects for
 * ever; when a file changes, a new one takes its place. */
#include "protocol/ws_internal.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#define SYSTEM_CA_PATH "/etc/ssl/certs/ca-certificates.crt"

static const struct lws_protocols client_protocols[] = {{.name = NET_SUBPROTOCOL,
                                                         .callback = ws_callback,
                                                         .rx_buffer_size = 64u << 10,
                                                         .tx_packet_size = LIMIT_FRAME_SIZE + 16},
                                                        {.name = NULL}};

/* ---- the end of an attempt ----------------------------------------------------------------------------------- */

static void job_detach(struct ws_conn *c);

void ws_connect_done(struct ws_conn *c)
{
    for (struct ws_conn **p = &c->loop->connecting; *p; p = &(*p)->next_connecting)
        if (*p == c) {
            *p = c->next_connecting;
            break;
        }
    net_timer_stop(&c->deadline);
    net_timer_stop(&c->timer);
}

static void give_up(struct ws_conn *c)
{
    char line[WS_WHY_SIZE + 320];
    const struct ws_handler *handler = c->handler;
    ws_connect_done(c);
    job_detach(c);
    if (c->wsi) {
        lws_set_opaque_user_data(c->wsi, NULL);
        net_kill(c->wsi);
        c->wsi = NULL;
    }
    snprintf(line, sizeof line, "cannot connect to %.255s:%u: %s", c->host, c->port,
             c->why[0] ? c->why : "unknown reason");
    ws_conn_free(c);
    if (handler->on_failed)
        handler->on_failed(handler->ctx, line);
}

/* Of libwebsockets (4.3.5, lib/tls), in none of its headers: 0, or text says what is wrong with the server's certificate. It calls this too, but not when a handshake
 * fails in the turn in which it began, as many on one machine do. */
int lws_tls_client_confirm_peer_cert(struct lws *wsi, char *text, size_t size);

#define NO_HANDSHAKE  "mbedtls connect"
#define NOT_GOOD      "didn't look good"
#define EXPIRED       NOT_GOOD ", expired"
#define NOT_YET_VALID NOT_GOOD ", notyetvalid"
#define REFUSED       "connection refused: nothing listens there"

/* libwebsockets' reasons, in words for people. Its texts: lib/roles/http/client, lib/core-net/client, lib/tls of 4.3.5. */
static const char *explain(const char *text, char *buffer, size_t size)
{
    static const struct {
        const char *found, *means;
    } reasons[] = {
        {NOT_GOOD ", hostname", "the server's certificate is for another name (TLS name mismatch)"},
        {NOT_GOOD ", invalidca",
         "the server's certificate is not trusted: --ca (without it, the system) names no authority that "
         "signed it (or it showed none: it speaks no TLS, or the connection was closed on the way)"},
        {EXPIRED, "the server's certificate has expired (or this clock is wrong)"},
        {NOT_YET_VALID, "the server's certificate is not valid yet (or this clock is wrong)"},
        {NOT_GOOD, "the server's certificate is not acceptable"},
        {"no peer cert", "the server speaks no TLS, or ended the handshake before its certificate"},
        {NO_HANDSHAKE,
         "the TLS handshake failed: the server may want a client certificate (--client-cert) that it trusts"},
        {"Timed out", "timed out"},
        {"HS: ws upgrade unauthorized", "the server refused this client (HTTP 401)"},
        {"HS: ws upgrade response not 101",
         "the server answered, but does not serve Tandem here (or refused this client)"},
        {"HS:", "the server answered, but does not speak Tandem's protocol"},
        {"ws protocol no match", "the server answered, but does not speak Tandem's protocol"},
        {"Peer hung up", "the server closed the connection during the handshake"},
        {"read failed", "the server closed the connection during the handshake"},
    };
    for (size_t i = 0; i < TD_COUNT(reasons); i++)
        if (strstr(text, reasons[i].found))
            return reasons[i].means;
    int number;
    const char *at = strstr(text, "conn fail: ");
    if (at && sscanf(at, "conn fail: %d", &number) == 1 && number > 0) {
        if (number == ECONNREFUSED)
            return REFUSED;
        snprintf(buffer, size, "%s", strerror(number));
        return buffer;
    }
    if (strstr(text, "Unable to connect"))
        return REFUSED;
    snprintf(buffer, size, "the connection ended during the handshake (%.80s)",
             text[0] ? text : "no reason given");
    return buffer;
}

/* Somebody answered at that address, if only with a refusal of ours. */
static bool was_reached(const char *text)
{
    return text[0] && !strstr(text, "conn fail") && !strstr(text, "Unable to connect") &&
           !strstr(text, "Timed out");
}

/* Reads the dates of the certificate, if that is what this connection is for: its handshake checked nothing and is over. */
static void look_at_certificate(struct ws_conn *c)
{
    union {
        union lws_tls_cert_info_results result;
        char room[sizeof(union lws_tls_cert_info_results) + CERTIFICATE_SIZE_MAX];
    } der;
    char line[WS_WHY_SIZE];
    if (c->looking &&
        lws_tls_peer_cert_info(c->wsi, LWS_TLS_CERT_INFO_DER_RAW, &der.result, CERTIFICATE_SIZE_MAX) == 0 &&
        net_certificate_dates(der.result.ns.name, (size_t)der.result.ns.len, line, sizeof line))
        ws_because(c, line);
}

bool ws_connect_may_send(struct ws_conn *c)
{
    look_at_certificate(c);
    return !c->looking;
}

void ws_connect_failed(struct ws_conn *c, const char *text, size_t size)
{
    char copy[256] = "", buffer[160];
    if (text)
        snprintf(copy, sizeof copy, "%.*s", (int)TD_MIN(size, sizeof copy - 1), text);
    if (c->wsi && strstr(copy, NO_HANDSHAKE))
        lws_tls_client_confirm_peer_cert(c->wsi, copy, sizeof copy);
    if (strstr(copy, NOT_GOOD))
        look_at_certificate(c);
    if (c->wsi) /* libwebsockets itself ends this one */
        lws_set_opaque_user_data(c->wsi, NULL);
    c->wsi = NULL;
    const char *why = c->looking ? c->looking : explain(copy, buffer, sizeof buffer);
    bool out_of_date = strstr(copy, EXPIRED) || strstr(copy, NOT_YET_VALID);
    if (out_of_date && !c->looking && !c->closing && !c->why[0]) {
        c->looking = why;
        c->address_next--;
        net_timer_start(&c->timer, 1);
        return;
    }
    bool last = c->closing || c->address_next >= c->address_count;
    if (last || c->looking || was_reached(copy))
        ws_because(c, why);
    c->looking = NULL;
    if (!last) {
        net_timer_start(&c->timer, 1); /* the next address, outside of this callback */
        return;
    }
    if (c->calling) /* lws_client_connect_via_info is still on the stack with this connection in hand */
        net_timer_start(&c->timer, 1), c->closing = true;
    else
        give_up(c);
}

static void on_deadline(void *ctx)
{
    struct ws_conn *c = ctx;
    ws_because(c, "timed out");
    give_up(c);
}

/* ---- connecting ---------------------------------------------------------------------------------------------- */

static void try_address(void *ctx)
{
    struct ws_conn *c = ctx;
    if (c->closing || c->address_next >= c->address_count) {
        give_up(c);
        return;
    }
    char host[300];
    snprintf(host, sizeof host, "%.255s:%u", c->host, c->port);
    struct lws_client_connect_info info = {
        .context = c->loop->context,
        .vhost = c->vhost->vhost,
        .address = c->addresses[c->address_next++],
        .port = c->port,
        .path = c->path,
        .host = host,
        .protocol = NET_SUBPROTOCOL,
        .local_protocol_name = NET_SUBPROTOCOL,
        .alpn = "http/1.1",
        .ssl_connection = !c->tls      ? 0
                          : c->looking ? LCCSCF_USE_SSL | LCCSCF_ALLOW_INSECURE
                                       : LCCSCF_USE_SSL,
        .opaque_user_data = c,
        .pwsi = &c->wsi,
    };
    c->calling = true;
    bool begun = lws_client_connect_via_info(&info) != NULL;
    c->calling = false;
    if (!begun) {
        c->wsi = NULL;
        if (c->looking || (!c->closing && c->address_next >= c->address_count))
            ws_because(c, c->looking ? c->looking : REFUSED);
        c->looking = NULL;
        net_timer_start(&c->timer, 1);
    }
}

/* ---- names ----------------------------------------------------------------------------------------------------- */

struct resolve_job { /* shared by the loop and one thread; the later of the two frees it */
    pthread_mutex_t lock;
    struct ws_conn *conn; /* NULL once the connection lost interest; loop's thread and `lock` */
    struct net_loop *loop;
    char *host;
    int holders;
    char addresses[NET_ADDRESSES_MAX][48];
    size_t count;
};

static void job_release(struct resolve_job *j)
{
    pthread_mutex_lock(&j->lock);
    int left = --j->holders;
    pthread_mutex_unlock(&j->lock);
    if (left)
        return;
    pthread_mutex_destroy(&j->lock);
    free(j->host);
    free(j);
}

static void job_detach(struct ws_conn *c)
{
    struct resolve_job *j = c->job;
    if (!j)
        return;
    c->job = NULL;
    pthread_mutex_lock(&j->lock);
    j->conn = NULL;
    pthread_mutex_unlock(&j->lock);
    job_release(j);
}

/* On the loop's thread. */
static void on_resolved(void *arg)
{
    struct resolve_job *j = arg;
    struct ws_conn *c = j->conn;
    if (c) {
        memcpy(c->addresses, j->addresses, sizeof c->addresses);
        c->address_count = j->count;
        job_detach(c);
        if (c->address_count == 0)
            ws_because(c, "the name is unknown, or no name server answers");
        try_address(c);
    }
    job_release(j);
}

static size_t look_up(const char *host, int flags, char out[NET_ADDRESSES_MAX][48])
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = flags}, *list = NULL;
    size_t count = 0;
    if (getaddrinfo(host, NULL, &hints, &list))
        return 0;
    for (struct addrinfo *a = list; a && count < NET_ADDRESSES_MAX; a = a->ai_next)
        if (getnameinfo(a->ai_addr, a->ai_addrlen, out[count], sizeof out[count], NULL, 0, NI_NUMERICHOST) ==
            0)
            count++;
    freeaddrinfo(list);
    return count;
}

static void *resolve_thread(void *arg)
{
    struct resolve_job *j = arg;
    char found[NET_ADDRESSES_MAX][48];
    size_t count = look_up(j->host, 0, found);
    pthread_mutex_lock(&j->lock);
    memcpy(j->addresses, found, sizeof found);
    j->count = count;
    /* While conn is set the loop lives: it detaches its connections, under this lock, before it goes. */
    bool posted = j->conn && net_loop_post(j->loop, on_resolved, j) == 0;
    pthread_mutex_unlock(&j->lock);
    if (!posted)
        job_release(j);
    return NULL;
}

static int start_resolving(struct ws_conn *c)
{
    struct resolve_job *j = calloc(1, sizeof *j);
    pthread_attr_t attributes;
    pthread_t thread;
    if (!j || !(j->host = strdup(c->host))) {
        free(j);
        return -TD_ERR_NOMEM;
    }
    pthread_mutex_init(&j->lock, NULL);
    j->conn = c, j->loop = c->loop, j->holders = 2;
    c->job = j;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &attributes, resolve_thread, j);
    pthread_attr_destroy(&attributes);
    if (failed) {
        job_detach(c);
        job_release(j);
        return -TD_ERR_NOMEM;
    }
    return 0;
}

/* ---- trust ------------------------------------------------------------------------------------------------------- */

static int64_t newest_change(const char *const *paths, size_t count)
{
    int64_t newest = 0;
    struct stat st;
    for (size_t i = 0; i < count; i++)
        if (paths[i] && stat(paths[i], &st) == 0)
            newest = TD_MAX(newest, (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec);
    return newest;
}

static bool same_text(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

static struct client_vhost *new_vhost(struct net_loop *l, const struct net_connect *config,
                                      const char *ca_path)
{
    struct client_vhost *v = calloc(1, sizeof *v);
    if (!v)
        return NULL;
    v->next = l->client_vhosts;
    l->client_vhosts = v;
    snprintf(v->name, sizeof v->name, "client-%u", ++l->vhost_serial);
    v->ca_path = ca_path ? strdup(ca_path) : NULL;
    v->cert_path = config->cert_path ? strdup(config->cert_path) : NULL;
    v->key_path = config->key_path ? strdup(config->key_path) : NULL;
    struct lws_context_creation_info info = {
        .port = CONTEXT_PORT_NO_LISTEN,
        .vhost_name = v->name,
        .protocols = client_protocols,
        .options = LWS_SERVER_OPTION_DISABLE_TLS_SESSION_CACHE |
                   (config->tls ? LWS_SERVER_OPTION_DO_SSL_GLOBAL_INIT : 0),
        .client_ssl_ca_filepath = v->ca_path,
        .client_ssl_cert_filepath = v->cert_path,
        .client_ssl_private_key_filepath = v->key_path,
        .connect_timeout_secs = NET_CONNECT_TIMEOUT_US / 1000000,
    };
    v->vhost = lws_create_vhost(l->context, &info);
    return v;
}

static struct client_vhost *find_vhost(struct net_loop *l, const struct net_connect *config,
                                       struct td_error *err)
{
    const char *ca_path = !config->tls ? NULL : config->ca_path ? config->ca_path : SYSTEM_CA_PATH;
    const char *const paths[] = {ca_path, config->cert_path, config->key_path};
    int64_t stamp = newest_change(paths, TD_COUNT(paths));
    if (config->tls && net_check_files(ca_path, config->cert_path, config->key_path, err))
        return NULL;
    for (struct client_vhost *v = l->client_vhosts; v; v = v->next)
        if (v->vhost && v->stamp == stamp && same_text(v->ca_path, ca_path) &&
            same_text(v->cert_path, config->cert_path) && same_text(v->key_path, config->key_path))
            return v;
    net_last_error();
    struct client_vhost *v = new_vhost(l, config, ca_path);
    if (v && v->vhost) {
        v->stamp = stamp;
        return v;
    }
    td_fail(err, -TD_ERR_CRYPTO, "cannot set up TLS with %s: %s", ca_path ? ca_path : "no CA",
            net_last_error());
    return NULL;
}

/* ---- the call --------------------------------------------------------------------------------------------------- */

int ws_connect(struct net_loop *l, const struct net_connect *config, struct ws_conn **out,
               struct td_error *err)
{
    *out = NULL;
    if (l->closing)
        return td_fail(err, -TD_ERR_CLOSED, "cannot connect to %s: the network loop is closing",
                       config->host);
    if (!config->host || !config->host[0] || strlen(config->host) > 255 || strchr(config->host, ':'))
        return td_fail(err, -TD_ERR_ARG,
                       "cannot connect: a host name is needed (an IPv6 address cannot be checked against a "
                       "certificate)");
    struct client_vhost *vhost = find_vhost(l, config, err);
    if (!vhost)
        return err ? err->code : -TD_ERR_CRYPTO;
    struct ws_conn *c = calloc(1, sizeof *c);
    if (!c)
        return td_fail(err, -TD_ERR_NOMEM, "cannot connect to %s: not enough memory", config->host);
    c->loop = l, c->vhost = vhost, c->handler = config->ws, c->user = config->user;
    c->port = config->port, c->tls = config->tls;
    c->host = strdup(config->host);
    c->path = strdup(config->path ? config->path : NET_WS_PATH);
    net_timer_init(&c->timer, l, try_address, c);
    net_timer_init(&c->deadline, l, on_deadline, c);
    c->address_count = c->host ? look_up(c->host, AI_NUMERICHOST, c->addresses) : 0;
    if (!c->host || !c->path || (c->address_count == 0 && start_resolving(c))) {
        ws_conn_free(c);
        return td_fail(err, -TD_ERR_NOMEM, "cannot connect to %s: not enough memory", config->host);
    }
    c->next_connecting = l->connecting;
    l->connecting = c;
    if (c->address_count)
        net_timer_start(&c->timer, 1);
    net_timer_start(&c->deadline, l->connect_timeout_us);
    *out = c;
    return 0;
}

/* The loop goes: nobody waits for these any more. */
void ws_destroy_connecting(struct net_loop *l)
{
    while (l->connecting) {
        ws_because(l->connecting, "the network loop is closing");
        give_up(l->connecting);
    }
}
