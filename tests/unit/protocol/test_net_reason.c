/* Why a server's certificate is refused is said also where its answer is there as soon as the client's first words have left, and so all is over in one turn. */
#include "net_rig.h"
#include <poll.h>

static char certs[64], why[512];
static atomic_bool hello_is_answered_at_once;
static atomic_int failed;
static struct net_connect target;
static struct ws_conn *conn;
ssize_t __real_write(int fd, const void *data, size_t size);
ssize_t __wrap_write(int fd, const void *data, size_t size);

ssize_t __wrap_write(int fd, const void *data, size_t size)
{
    const uint8_t *record = data;
    bool is_hello = size > 5 && record[0] == 22 && record[5] == 1;
    ssize_t n = __real_write(fd, data, size);
    if (is_hello && atomic_exchange(&hello_is_answered_at_once, false))
        poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, CLIENT_WAIT_MS);
    return n;
}

static void on_failed(void *ctx, const char *text)
{
    (void)ctx;
    snprintf(why, sizeof why, "%s", text);
    atomic_store(&failed, 1);
}

static const struct ws_handler handler = {.on_failed = on_failed};

static void do_connect(void *loop)
{
    struct td_error err = {0};
    if (ws_connect(loop, &target, &conn, &err))
        on_failed(NULL, err.text);
}

static void fails(const char *host, const char *cert, const char *ca, const char *expected)
{
    char cert_path[128], key_path[128], ca_path[128];
    snprintf(cert_path, sizeof cert_path, "%s/%s", certs, cert);
    snprintf(key_path, sizeof key_path, "%s/server.key", certs);
    snprintf(ca_path, sizeof ca_path, "%s/%s", certs, ca);
    struct net_loop *server = loop_make(), *client = loop_make();
    target = (struct net_connect){.host = host, .tls = true, .ca_path = ca_path, .ws = &handler};
    target.port = loop_listen(server, &(struct net_listen){.bind_address = "0.0.0.0",
                                                           .cert_path = cert_path,
                                                           .key_path = key_path,
                                                           .http = &answering});
    pthread_t server_thread = loop_begin(server), client_thread = loop_begin(client);
    atomic_store(&failed, 0);
    atomic_store(&hello_is_answered_at_once, true);
    net_loop_post(client, do_connect, client);
    bool told = reaches(&failed, 1);
    loop_end(client, client_thread);
    loop_end(server, server_thread);
    assert_true(told);
    assert_false(atomic_load(&hello_is_answered_at_once));
    if (!strstr(why, expected))
        fail_msg("'%s' does not say '%s'", why, expected);
}

static void an_answer_at_once_is_judged_as_any_other(void **state)
{
    (void)state;
    fails("localhost", "dates/expired.crt", "ca.crt", "expired on 2021-02-03 04:05 UTC");
    fails("127.0.0.2", "server.crt", "ca.crt", "another name");
    fails("localhost", "server.crt", "stranger/ca.crt", "is not trusted");
}

static int make_certificates(void **state)
{
    (void)state;
    snprintf(certs, sizeof certs, "/tmp/td-reasons-%d", (int)getpid());
    setenv("CERTS", certs, 1);
    return system("'" TEST_DATA "/../../deploy/certs.sh' $CERTS >/dev/null && "
                  "'" TEST_DATA "/../../deploy/certs.sh' $CERTS/stranger >/dev/null && "
                  "'" TEST_DATA "/../dated_certs.sh' $CERTS");
}

static int remove_certificates(void **state)
{
    (void)state;
    return system("rm -rf $CERTS");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_answer_at_once_is_judged_as_any_other),
    };
    return cmocka_run_group_tests(tests, make_certificates, remove_certificates);
}
