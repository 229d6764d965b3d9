/* net_listen: one vhost for each listener, after everything that an operator may have got wrong has been checked by ourselves.
 *
 * libwebsockets would retry a busy port in silence, take over another program's Unix socket and name no file in a TLS error. So the
 * port is bound once for a trial, a socket path is asked for somebody alive behind it, and certificate and key are read and compared
 * before libwebsockets sees them. libwebsockets chooses a vhost by port, hence one listener a port. */
#include "protocol/net_internal.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* Enumerator 0 is HTTP, because a connection starts there; WebSocket is there only for listeners that serve it. */
static const struct lws_protocols protocols_http[] = {{.name = "http", .callback = http_callback},
                                                      {.name = NULL}};
static const struct lws_protocols protocols_both[] = {{.name = "http", .callback = http_callback},
                                                      {.name = NET_SUBPROTOCOL,
                                                       .callback = ws_callback,
                                                       .rx_buffer_size = 64u << 10,
                                                       .tx_packet_size = LIMIT_FRAME_SIZE + 16},
                                                      {.name = NULL}};

/* ---- addresses --------------------------------------------------------------------------------------------- */

static int parse_address(const char *text, uint16_t port, struct sockaddr_storage *out, socklen_t *size)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    memset(out, 0, sizeof *out);
    if (inet_pton(AF_INET, text, &v4.sin_addr) == 1)
        memcpy(out, &v4, *size = sizeof v4);
    else if (inet_pton(AF_INET6, text, &v6.sin6_addr) == 1)
        memcpy(out, &v6, *size = sizeof v6);
    else
        return -TD_ERR_ARG;
    return 0;
}

static int try_bind(const char *address, uint16_t port, struct td_error *err)
{
    struct sockaddr_storage at;
    socklen_t size;
    if (parse_address(address, port, &at, &size))
        return td_fail(err, -TD_ERR_ARG,
                       "cannot listen on %s: not an IP address (use 127.0.0.1, ::1, 0.0.0.0 …)", address);
    int on = 1, code = 0, fd = socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return td_fail(err, -TD_ERR_IO, "cannot listen on %s: %s", address, strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (at.ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&at, size) || listen(fd, 1)) {
        if (errno == EADDRINUSE)
            code = td_fail(err, -TD_ERR_EXISTS,
                           "cannot listen on %s port %u: another program uses it; stop that one or choose "
                           "another --listen-port",
                           address, port);
        else if (errno == EACCES)
            code = td_fail(err, -TD_ERR_AUTH,
                           "cannot listen on %s port %u: not permitted; choose a port above 1023", address,
                           port);
        else
            code =
                td_fail(err, -TD_ERR_IO, "cannot listen on %s port %u: %s", address, port, strerror(errno));
    }
    close(fd);
    return code;
}

/* The place is free: can a socket be made there? libwebsockets would try for ever. */
static int try_bind_unix(const struct sockaddr_un *at, struct td_error *err)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int failed = fd < 0 || bind(fd, (const struct sockaddr *)at, sizeof *at) ? errno : 0;
    if (fd >= 0)
        close(fd);
    if (failed)
        return td_fail(err, -TD_ERR_IO, "cannot listen on %s: %s", at->sun_path, strerror(failed));
    unlink(at->sun_path);
    return 0;
}

/* libwebsockets unlinks whatever is at the path: so it must be nothing, or a socket that nobody serves any more. */
static int check_unix_path(const char *path, struct td_error *err)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    struct stat st;
    if (strlen(path) >= sizeof at.sun_path || path[0] != '/')
        return td_fail(err, -TD_ERR_ARG,
                       "cannot listen on %s: a socket path is absolute and at most %zu bytes long", path,
                       sizeof at.sun_path - 1);
    strcpy(at.sun_path, path);
    if (lstat(path, &st))
        return errno == ENOENT ? try_bind_unix(&at, err)
                               : td_fail(err, -TD_ERR_IO, "cannot listen on %s: %s", path, strerror(errno));
    if (!S_ISSOCK(st.st_mode))
        return td_fail(err, -TD_ERR_EXISTS, "cannot listen on %s: a file that is no socket is in the way",
                       path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool alive = fd >= 0 && connect(fd, (struct sockaddr *)&at, sizeof at) == 0;
    if (fd >= 0)
        close(fd);
    if (alive)
        return td_fail(err, -TD_ERR_EXISTS,
                       "cannot listen on %s: another program serves it; stop that one or choose another path",
                       path);
    unlink(path);
    return try_bind_unix(&at, err);
}

/* ---- listeners --------------------------------------------------------------------------------------------- */

static int check_config(struct net_loop *l, const struct net_listen *config, const char *address,
                        struct td_error *err)
{
    if (!config->cert_path != !config->key_path)
        return td_fail(err, -TD_ERR_ARG, "TLS needs both a certificate and its private key: %s is missing",
                       config->cert_path ? "the key" : "the certificate");
    if (config->client_ca_path && !config->cert_path)
        return td_fail(err, -TD_ERR_ARG,
                       "client certificates need TLS: give the server a certificate and a key");
    int code = config->cert_path ? net_check_certificate(config->cert_path, config->key_path, err) : 0;
    if (code == 0 && config->client_ca_path)
        code = net_check_authority(config->client_ca_path, err);
    if (code)
        return code;
    for (struct listener *other = l->listeners; other; other = other->next)
        if (!config->unix_path && config->port && other->port == config->port)
            return td_fail(err, -TD_ERR_EXISTS,
                           "cannot listen on %s port %u: this program already listens on that port (%s)",
                           address, config->port, other->address);
    return config->unix_path ? check_unix_path(config->unix_path, err) : try_bind(address, config->port, err);
}

static bool copy_text(char **out, const char *text)
{
    *out = text ? strdup(text) : NULL;
    return *out || !text;
}

static bool copy_origins(struct listener *v, const char *const *origins)
{
    size_t count = 0;
    while (origins && origins[count])
        count++;
    v->origins = origins ? calloc(count + 1, sizeof *v->origins) : NULL;
    if (origins && !v->origins)
        return false;
    for (size_t i = 0; i < count; i++)
        if (!(v->origins[i] = strdup(origins[i])))
            return false;
    return true;
}

/* Linked in before it listens, so that the loop frees it whatever happens. */
static struct listener *create_listener(struct net_loop *l, const struct net_listen *config,
                                        const char *address)
{
    struct listener *v = calloc(1, sizeof *v);
    if (!v)
        return NULL;
    *v = (struct listener){.loop = l,
                           .next = l->listeners,
                           .http = config->http,
                           .ws = config->ws,
                           .loopback_hosts_only = config->loopback_hosts_only,
                           .takes_all_files = config->takes_all_files};
    l->listeners = v;
    snprintf(v->name, sizeof v->name, "listener-%u", ++l->vhost_serial);
    snprintf(v->address, sizeof v->address, "%s", address);
    bool good = copy_text(&v->unix_path, config->unix_path) && copy_text(&v->cert_path, config->cert_path) &&
                copy_text(&v->key_path, config->key_path) &&
                copy_text(&v->client_ca_path, config->client_ca_path) &&
                copy_origins(v, config->origins_allowed);
    return good ? v : NULL;
}

static void create_vhost(struct net_loop *l, struct listener *v, uint16_t port)
{
    struct lws_context_creation_info info = {
        .port = port,
        .iface = v->unix_path ? v->unix_path : v->address,
        .vhost_name = v->name,
        .protocols = v->ws ? protocols_both : protocols_http,
        .user = v,
        .keepalive_timeout = (int)((l->idle_us + 999999) / 1000000),
        .timeout_secs_ah_idle = (unsigned)((l->idle_us + 999999) / 1000000),
        .options = LWS_SERVER_OPTION_FAIL_UPON_UNABLE_TO_BIND | LWS_SERVER_OPTION_DISABLE_TLS_SESSION_CACHE,
    };
    if (v->unix_path)
        info.options |= LWS_SERVER_OPTION_UNIX_SOCK;
    if (v->cert_path) {
        info.options |=
            LWS_SERVER_OPTION_DO_SSL_GLOBAL_INIT; /* without it the vhost would speak plain HTTP */
        info.ssl_cert_filepath = v->cert_path;
        info.ssl_private_key_filepath = v->key_path;
    }
    if (v->client_ca_path) {
        info.ssl_ca_filepath = v->client_ca_path;
        info.options |= LWS_SERVER_OPTION_REQUIRE_VALID_OPENSSL_CLIENT_CERT;
    }
    net_last_error();
    v->vhost = lws_create_vhost(l->context, &info);
}

int net_listen(struct net_loop *l, const struct net_listen *config, uint16_t *bound_port,
               struct td_error *err)
{
    const char *address = config->bind_address ? config->bind_address : "127.0.0.1";
    if (strcmp(address, "localhost") == 0)
        address = "127.0.0.1";
    int code = check_config(l, config, address, err);
    if (code)
        return code;
    struct listener *v = create_listener(l, config, address);
    if (!v)
        return td_fail(err, -TD_ERR_NOMEM, "cannot listen on %s: not enough memory", address);
    /* Only the owner may talk to a Unix socket until the operator opens it up. */
    mode_t mask = v->unix_path ? umask(0177) : 0;
    create_vhost(l, v, config->port);
    if (v->unix_path)
        umask(mask);
    if (!v->vhost)
        return td_fail(err, -TD_ERR_IO, "cannot listen on %s: %s", v->unix_path ? v->unix_path : address,
                       net_last_error());
    v->port = v->unix_path ? 0 : (uint16_t)lws_get_vhost_listen_port(v->vhost);
    if (bound_port)
        *bound_port = v->port;
    return 0;
}
