/* settings: addresses, names, secrets and defaults of tandem-edge, and the line that each mistake gets. */
#include "edge/settings.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

static char secret_path[] = "/tmp/td-edge-secret-XXXXXX";
static struct edge_settings settings;
static struct config *config;
static struct td_error err;

/* argv up to NULL. */
static int load(const char *first, ...)
{
    char *argv[32] = {(char *)(uintptr_t) "tandem-edge"};
    int argc = 1;
    va_list args;
    va_start(args, first);
    for (const char *a = first; a; a = va_arg(args, const char *))
        argv[argc++] = (char *)(uintptr_t)a;
    va_end(args);
    config_free(config);
    config = NULL;
    err = (struct td_error){0};
    return edge_settings_load(argc, argv, &settings, &config, &err);
}

static void defaults_are_the_documented_ones(void **state)
{
    (void)state;
    assert_int_equal(load("--model", "m.gguf", "--token-file", secret_path, NULL), 0);
    struct agent_config a;
    edge_settings_agent(&settings, &a);
    assert_string_equal(a.cloud_host, "localhost");
    assert_int_equal(a.cloud_port, 8443);
    assert_true(a.tls);
    assert_null(a.ca_path);
    assert_string_equal(a.token, "the-secret");
    assert_int_equal(a.edge_layers, PLANNER_AUTO);
    assert_null(a.codec); /* auto */
    assert_int_equal(a.hidden_dtype, HIDDEN_F16);
    assert_int_equal(a.accept, KV_ACCEPT_VISIBLE_LOSSLESS);
    assert_int_equal(a.chunk_tokens, 64);
    assert_true(a.filter_pii);
    assert_null(a.words_path);
    assert_int_equal(a.cloud_timeout_ms, 30000);
    assert_int_equal(a.kv_memory, 256u << 20);
    assert_int_equal(a.kv_disk, 1u << 30);
    assert_string_equal(settings.listen, "127.0.0.1");
    assert_int_equal(settings.listen_port, 8081);
    assert_null(settings.origins[0]);
    assert_string_equal(settings.api_key, "");
}

static void everything_can_be_said(void **state)
{
    (void)state;
    assert_int_equal(load("--model=m", "--token-file", secret_path, "--cloud", "[::1]:7", "--codec", "raw",
                          "--hidden=int8", "--fidelity=exact", "--edge-layers", "0", "--no-filter",
                          "--words-file=w", "--allow-origin=http://a, http://b", "--plain", "--data=/d",
                          NULL),
                     0);
    struct agent_config a;
    edge_settings_agent(&settings, &a);
    assert_string_equal(a.cloud_host, "::1");
    assert_int_equal(a.cloud_port, 7);
    assert_false(a.tls);
    assert_int_equal(a.edge_layers, 0);
    assert_int_equal(a.codec->codec, KV_RAW);
    assert_int_equal(a.hidden_dtype, HIDDEN_INT8);
    assert_int_equal(a.accept, KV_ACCEPT_EXACT);
    assert_false(a.filter_pii);
    assert_null(a.words_path); /* no filter: no words either */
    assert_string_equal(a.data_dir, "/d");
    assert_string_equal(settings.origins[0], "http://a");
    assert_string_equal(settings.origins[1], "http://b");
    assert_null(settings.origins[2]);
}

static void mistakes_get_one_line(void **state)
{
    (void)state;
    static const struct {
        const char *flag, *says;
    } cases[] = {
        {"--codec=l9", "--codec l9: want auto, raw, l0, l1, l2, l2-k5 or l2-5bit"},
        {"--hidden=f8", "--hidden f8: want f32, f16 or int8"},
        {"--fidelity=best", "--fidelity best: want exact, visible-lossless or any"},
        {"--log-level=loud", "--log-level loud: want info, warn or error"},
        {"--chunk=100", "--chunk 100: want a multiple of 64"},
        {"--client-cert=c", "--client-cert and --client-key belong together"},
        {"--cloud=https://localhost:8443", "'https://localhost:8443' is no address"},
        {"--cloud=host:", "'host:' is no address"},
        {"--cloud=host:70000", "'host:70000' is no address"},
        {"--cloud=:8443", "':8443' is no address"},
        {"--cloud=[::1", "'[::1' is no address"},
        {"--api-key-file=/nonexistent", "/nonexistent"},
        {"--nonsense", "nonsense"},
        {"--listen=0.0.0.0", "give --api-key-file too"},
        {"--listen=::", "give --api-key-file too"},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        assert_true(load("--model=m", "--token-file", secret_path, cases[i].flag, NULL) < 0);
        if (!strstr(err.text, cases[i].says))
            fail_msg("%s: %s", cases[i].flag, err.text);
        assert_null(strchr(err.text, '\n'));
    }
    assert_true(load("--token-file", secret_path, NULL) < 0);
    assert_non_null(strstr(err.text, "no model"));
}

static void the_credential_comes_from_file_or_environment_only(void **state)
{
    (void)state;
    assert_true(load("--model=m", NULL) < 0);
    assert_non_null(strstr(err.text, "no credential"));
    assert_true(load("--model=m", "--token=abc", NULL) < 0);
    setenv("TANDEM_EDGE_TOKEN", "from-environment", 1);
    setenv("TANDEM_EDGE_PORT", "tcp://10.0.0.1:8081",
           1); /* what a container platform sets for a service of this name */
    assert_int_equal(load("--model=m", NULL), 0);
    assert_string_equal(settings.token_text, "from-environment");
    assert_int_equal(settings.listen_port, 8081);
    assert_int_equal(load("--model=m", "--token-file", secret_path, NULL), 0);
    assert_string_equal(settings.token_text, "the-secret"); /* the file wins */
    unsetenv("TANDEM_EDGE_TOKEN");
    unsetenv("TANDEM_EDGE_PORT");
    chmod(secret_path, 0644);
    assert_true(load("--model=m", "--token-file", secret_path, NULL) < 0); /* everybody can read it */
    chmod(secret_path, 0600);
}

static void plain_stays_on_the_machine(void **state)
{
    (void)state;
    assert_true(load("--model=m", "--token-file", secret_path, "--plain", "--cloud=cloud.example:1", NULL) <
                0);
    assert_non_null(strstr(err.text, "in the clear"));
    assert_int_equal(load("--model=m", "--token-file", secret_path, "--plain", "--cloud=127.0.0.2:1", NULL),
                     0);
    assert_int_equal(load("--model=m", "--token-file", secret_path, "--listen=0.0.0.0", "--api-key-file",
                          secret_path, NULL),
                     0);
    assert_true(edge_is_loopback("localhost"));
    assert_true(edge_is_loopback("::1"));
    assert_false(edge_is_loopback("0.0.0.0"));
    assert_false(edge_is_loopback("128.0.0.1"));
    assert_false(edge_is_loopback("localhost.example"));
}

static void addresses(void **state)
{
    (void)state;
    static const struct {
        const char *text, *host;
        uint16_t port;
    } cases[] = {
        {"a.example:1", "a.example", 1},           {"a.example", "a.example", EDGE_CLOUD_PORT},
        {"10.0.0.1:65535", "10.0.0.1", 65535},     {"[fe80::1]:443", "fe80::1", 443},
        {"[fe80::1]", "fe80::1", EDGE_CLOUD_PORT},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        char host[64];
        uint16_t port;
        assert_int_equal(edge_parse_address(cases[i].text, host, sizeof host, &port, NULL), 0);
        assert_string_equal(host, cases[i].host);
        assert_int_equal(port, cases[i].port);
    }
    char host[4];
    uint16_t port;
    assert_int_equal(edge_parse_address("abcd:1", host, sizeof host, &port, NULL), -TD_ERR_ARG);
    assert_int_equal(edge_parse_address("abc:1x", host, sizeof host, &port, NULL), -TD_ERR_ARG);
    assert_int_equal(edge_parse_address("abc:0", host, sizeof host, &port, NULL), -TD_ERR_ARG);
    assert_int_equal(edge_parse_address("abc:1", host, sizeof host, &port, NULL), 0);
}

static int set_up(void **state)
{
    (void)state;
    int fd = mkstemp(secret_path);
    return fd >= 0 && write(fd, "the-secret\n", 11) == 11 && fchmod(fd, 0600) == 0 && close(fd) == 0 ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    config_free(config);
    return unlink(secret_path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults_are_the_documented_ones),
        cmocka_unit_test(everything_can_be_said),
        cmocka_unit_test(mistakes_get_one_line),
        cmocka_unit_test(the_credential_comes_from_file_or_environment_only),
        cmocka_unit_test(plain_stays_on_the_machine),
        cmocka_unit_test(addresses),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
