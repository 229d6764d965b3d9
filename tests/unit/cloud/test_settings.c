/* settings: what a command line may say, and what is wrong with one before anything is opened. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "cloud/settings.h"
#include "shared/kv_record.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define ARGS_MAX 16

static struct settings settings;
static struct config *config;
static struct td_error err;

static int load(const char *const *args)
{
    char *argv[ARGS_MAX + 2] = {(char *)"tandem-cloud"};
    int argc = 1;
    while (args[argc - 1])
        argv[argc] = (char *)args[argc - 1], argc++;
    err = (struct td_error){0};
    return settings_load(argc, argv, &settings, &config, &err);
}
#define LOAD(...) load((const char *const[]){__VA_ARGS__, NULL})

static void assert_refused(int rc, const char *part)
{
    assert_true(rc < 0);
    if (!strstr(err.text, part))
        fail_msg("\"%s\" does not say \"%s\"", err.text, part);
}

static void test_defaults(void **state)
{
    (void)state;
    assert_int_equal(LOAD("--model", "/m/Some.Model.Q4_1.gguf", "--cert", "c", "--key", "k"), 0);
    assert_string_equal(settings.model_name, "Some.Model.Q4_1");
    assert_string_equal(settings.listen, "127.0.0.1");
    assert_int_equal(settings.listen_port, 8443);
    assert_int_equal(settings.admin_port, 9443);
    assert_int_equal(settings.level, LOG_INFO);
    assert_string_equal(settings.device, "auto");
    assert_true(strlen(settings.tokens_path) > 0 && strlen(settings.store_path) > 0);
    config_free(config);
}

static void test_given(void **state)
{
    (void)state;
    assert_int_equal(LOAD("--model", "m.gguf", "--plain", "--listen", "::1", "--model-name", "small",
                          "--store", "/s", "--store-key-file", "/k", "--tokens-file", "/t", "--log-level",
                          "warn"),
                     0);
    assert_string_equal(settings.model_name, "small");
    assert_string_equal(settings.store_path, "/s");
    assert_string_equal(settings.store_key_path, "/k");
    assert_string_equal(settings.tokens_path, "/t");
    assert_int_equal(settings.level, LOG_WARN);
    config_free(config);
}

static void test_refused(void **state)
{
    (void)state;
    assert_refused(LOAD("--plain"), "--model");
    assert_refused(LOAD("--model", "m"), "--cert");
    assert_refused(LOAD("--model", "m", "--cert", "c"), "--key");
    assert_refused(LOAD("--model", "m", "--plain", "--listen", "0.0.0.0"), "loopback");
    assert_refused(LOAD("--model", "m", "--plain", "--listen", "10.0.0.1"), "loopback");
    assert_refused(LOAD("--model", "m", "--plain", "--cert", "c", "--key", "k"), "exclude");
    assert_refused(LOAD("--model", "m", "--plain", "--client-ca", "c"), "exclude");
    assert_refused(LOAD("--model", "m", "--plain", "--listen-port", "9443"), "two ports");
    assert_refused(LOAD("--model", "m", "--plain", "--listen-port", "65536"), "listen-port");
    assert_refused(LOAD("--model", "m", "--plain", "--sequences", "0"), "sequences");
    assert_refused(LOAD("--model", "m", "--plain", "--log-level", "loud"), "loud");
    assert_refused(LOAD("--model", "m", "--plain", "--device", "tpu"), "tpu");
    assert_refused(LOAD("--model", "m", "--plain", "--gpu-memory-utilization", "1.5"), "utilization");
    assert_refused(LOAD("--model", "m", "--plain", "--kv-dtype", "fp16"), "f16, fp8 or int8");
    assert_refused(LOAD("--model", "m", "--plain", "--no-such-flag"), "no-such-flag");
}

/* A service called tandem-cloud in Kubernetes: TANDEM_CLOUD_PORT=tcp://…, and more of the kind. */
static void test_redis(void **state)
{
    (void)state;
    static const struct {
        const char *text, *host;
        uint16_t port;
    } good[] = {{"cache:7000", "cache", 7000},
                {"10.0.0.5", "10.0.0.5", 6379},
                {"[::1]:6380", "::1", 6380},
                {"[fe80::2]", "fe80::2", 6379}};
    static const char *const bad[] = {":1", "a:0", "a:65536", "a:x", "a:1x", "[::1", "[]:1"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_int_equal(LOAD("--model", "m.gguf", "--plain", "--redis", good[i].text), 0);
        assert_string_equal(settings.redis_host, good[i].host);
        assert_int_equal(settings.redis_port, good[i].port);
        config_free(config);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_refused(LOAD("--model", "m.gguf", "--plain", "--redis", bad[i]), "HOST:PORT");
    assert_int_equal(LOAD("--model", "m.gguf", "--plain"), 0);
    assert_string_equal(settings.redis_host, "");
    config_free(config);
}

static void test_foreign_environment(void **state)
{
    (void)state;
    setenv("TANDEM_CLOUD_PORT", "tcp://10.0.0.7:8443", 1);
    setenv("TANDEM_CLOUD_SERVICE_PORT", "8443", 1);
    setenv("TANDEM_CLOUD_LISTEN_PORT", "8444", 1);
    assert_int_equal(LOAD("--model", "m", "--plain"), 0);
    assert_int_equal(settings.listen_port, 8444);
    config_free(config);
    unsetenv("TANDEM_CLOUD_PORT");
    unsetenv("TANDEM_CLOUD_SERVICE_PORT");
    unsetenv("TANDEM_CLOUD_LISTEN_PORT");
}

static void test_loopback(void **state)
{
    (void)state;
    static const char *const yes[] = {"localhost", "127.0.0.1", "127.9.9.9", "::1"};
    static const char *const no[] = {"0.0.0.0",           "::", "128.0.0.1", "10.0.0.1", "localhost.example",
                                     "127.0.0.1.example", ""};
    for (size_t i = 0; i < TD_COUNT(yes); i++)
        assert_true(settings_is_loopback(yes[i]));
    for (size_t i = 0; i < TD_COUNT(no); i++)
        assert_false(settings_is_loopback(no[i]));
}

#define DEMOTE(list) LOAD("--model", "m.gguf", "--plain", "--store-demote", list)

static void test_demotion(void **state)
{
    (void)state;
    assert_int_equal(LOAD("--model", "m.gguf", "--plain"), 0);
    assert_int_equal(settings.demote_count, 0);
    assert_null(settings.demote_others);
    config_free(config);
    assert_int_equal(DEMOTE("acme,bank=off,*=l1,small=l2-k5"), 0);
    assert_int_equal(settings.demote_count, 3);
    assert_string_equal(settings.demote[0].name, "acme");
    assert_ptr_equal(settings.demote[0].level, kv_level_find("l1"));
    assert_string_equal(settings.demote[1].name, "bank");
    assert_null(settings.demote[1].level);
    assert_ptr_equal(settings.demote[2].level, kv_level_find("l2-k5"));
    assert_ptr_equal(settings.demote_others, kv_level_find("l1"));
    config_free(config);
    static const char *const bad[] = {"acme=l0", "acme=raw",  "acme=l7", "acme=", "acme=l1-and-a-long-end",
                                      "=l1",     "*=nothing", "a/b",     ",",     "acme,,bank"};
    for (size_t i = 0; i < TD_COUNT(bad); i++)
        assert_refused(DEMOTE(bad[i]), "--store-demote wants");
    char name[80], many[1000] = "";
    memset(name, 'a', sizeof name);
    name[STORE_TENANT_MAX + 1] = '\0';
    assert_refused(DEMOTE(name), "--store-demote wants");
    name[STORE_TENANT_MAX] = '\0';
    assert_int_equal(DEMOTE(name), 0);
    config_free(config);
    for (int i = 0; i < SETTINGS_DEMOTE_MAX; i++)
        sprintf(many + strlen(many), "%st%d", i ? "," : "", i);
    assert_int_equal(DEMOTE(many), 0);
    config_free(config);
    strcat(many, ",one-more");
    assert_refused(DEMOTE(many), "--store-demote wants");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults), cmocka_unit_test(test_given),
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_redis),
        cmocka_unit_test(test_demotion), cmocka_unit_test(test_foreign_environment),
        cmocka_unit_test(test_loopback),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
