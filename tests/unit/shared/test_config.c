/* config: the four sources and their order, every type at its edges, the file's form, errors that name their
 * source, secrets that stay out of argv and messages, --help, and secret files. */
#include "shared/base.h"
#include "shared/config.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

struct settings {
    const char *host, *token, *note;
    int64_t port, any;
    double ratio;
    bool verbose, cache;
    uint64_t memory;
};

#define FIELD(name) offsetof(struct settings, name)
static const struct config_option options[] = {
    {"listen-host", CONFIG_STRING, FIELD(host), "127.0.0.1", 0, 0, "HOST", "address to listen on", false},
    {"listen-port", CONFIG_INT, FIELD(port), "8081", 1, 65535, "PORT", "port to listen on", false},
    {"any-number", CONFIG_INT, FIELD(any), NULL, 0, 0, NULL, "any number", false},
    {"keep-ratio", CONFIG_FLOAT, FIELD(ratio), "0.5", 0, 1, NULL, "how much to keep", false},
    {"verbose", CONFIG_BOOL, FIELD(verbose), NULL, 0, 0, NULL, "say more", false},
    {"cache", CONFIG_BOOL, FIELD(cache), "true", 0, 0, NULL, "keep a cache", false},
    {"memory", CONFIG_SIZE, FIELD(memory), "1M", 4096, 0, NULL,
     "bytes of memory to use, which is explained in a text "
     "long enough to need more than one line of help",
     false},
    {"auth-token", CONFIG_STRING, FIELD(token), NULL, 0, 0, NULL, "credential", true},
    {"note", CONFIG_STRING, FIELD(note), NULL, 0, 0, NULL, "a note", false},
};
static const struct config_spec spec = {
    .program = "td-test",
    .env_prefix = "TDTEST",
    .summary = "A program for tests.",
    .examples = "  td-test --listen-port 9",
    .options = options,
    .option_count = TD_COUNT(options),
};

/* --- the harness --- */

static char directory[] = "/tmp/td-config-XXXXXX", ini_path[64], secret_path[64];
static struct settings got;
static struct config *loaded;
static struct td_error err;
static char **rest;
static int rest_count;

static void write_file(const char *path, const void *data, size_t size, mode_t mode)
{
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, size), size);
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static void write_ini(const char *text)
{
    write_file(ini_path, text, strlen(text), 0600);
}

/* Arguments after the program's name, up to NULL. */
static int load_with(int take_rest, ...)
{
    static char *argv[32];
    int argc = 0;
    argv[argc++] = (char *)(uintptr_t) "td-test";
    va_list args;
    va_start(args, take_rest);
    while ((argv[argc] = va_arg(args, char *)))
        argc++;
    va_end(args);
    config_free(loaded);
    memset(&err, 0, sizeof err);
    memset(&got, 0x55, sizeof got);
    int status = config_load(&spec, argc, argv, &got, &loaded, take_rest ? &rest : NULL, &rest_count, &err);
    assert_true((status == 0) == (loaded != NULL));
    assert_true((status < 0) == (err.text[0] != '\0'));
    return status;
}
#define load(...)      load_with(false, __VA_ARGS__, NULL)
#define load_file()    load("--config", ini_path)
#define load_nothing() load_with(false, NULL)

static void assert_error(int status, int code, const char *part)
{
    assert_int_equal(status, code);
    assert_int_equal(err.code, code);
    if (!strstr(err.text, part))
        fail_msg("\"%s\" lacks \"%s\"", err.text, part);
    struct settings untouched;
    memset(&untouched, 0x55, sizeof untouched);
    assert_memory_equal(&got, &untouched, sizeof got);
}

static int set_up(void **state)
{
    (void)state;
    if (!mkdtemp(directory))
        return -1;
    snprintf(ini_path, sizeof ini_path, "%s/edge.ini", directory);
    snprintf(secret_path, sizeof secret_path, "%s/secret", directory);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    config_free(loaded);
    unlink(ini_path);
    unlink(secret_path);
    return rmdir(directory);
}

/* --- sources --- */

static void test_defaults(void **state)
{
    (void)state;
    assert_int_equal(load_nothing(), 0);
    assert_string_equal(got.host, "127.0.0.1");
    assert_string_equal(got.token, "");
    assert_string_equal(got.note, "");
    assert_int_equal(got.port, 8081);
    assert_int_equal(got.any, 0);
    assert_true(got.ratio == 0.5);
    assert_false(got.verbose);
    assert_true(got.cache);
    assert_int_equal(got.memory, 1 << 20);
}

static void test_order_of_sources(void **state)
{
    (void)state;
    write_ini("listen-port = 1001\nkeep_ratio = 0.25\nlisten-host = file\nnote = file\n");
    assert_int_equal(load_file(), 0);
    assert_int_equal(got.port, 1001);
    setenv("TDTEST_LISTEN_PORT", "1002", 1);
    setenv("TDTEST_LISTEN_HOST", "env", 1);
    setenv("TDTEST_NOTE", "", 1);          /* empty: as if it were not there */
    setenv("TDTEST_PORT", "tcp://1:2", 1); /* names nothing: Kubernetes sets such variables */
    assert_int_equal(load_file(), 0);
    assert_int_equal(got.port, 1002);
    assert_int_equal(load("--listen-port", "1003", "--config", ini_path),
                     0); /* the place of --config does not matter */
    assert_int_equal(got.port, 1003);
    assert_string_equal(got.host, "env");
    assert_string_equal(got.note, "file");
    assert_true(got.ratio == 0.25);
    setenv("TDTEST_CONFIG", ini_path, 1);
    assert_int_equal(load_nothing(), 0);
    assert_string_equal(got.note, "file");
    setenv("TDTEST_CONFIG", "/nonexistent", 1);
    assert_int_equal(load_file(), 0); /* the flag wins */
    assert_error(load_nothing(), -TD_ERR_NOTFOUND, "/nonexistent: No such file");
    unsetenv("TDTEST_CONFIG");
    setenv("TDTEST_LISTEN_PORT", "many", 1);
    assert_error(load_nothing(), -TD_ERR_ARG,
                 "TDTEST_LISTEN_PORT: listen-port needs a whole number, not \"many\"");
    unsetenv("TDTEST_LISTEN_PORT");
    unsetenv("TDTEST_LISTEN_HOST");
    unsetenv("TDTEST_NOTE");
    unsetenv("TDTEST_PORT");
}

/* --- flags --- */

static void test_flag_forms(void **state)
{
    (void)state;
    assert_int_equal(load("--listen-port=7", "--verbose", "--no-cache", "--note", "-1", "--any-number", "-5"),
                     0);
    assert_int_equal(got.port, 7);
    assert_true(got.verbose);
    assert_false(got.cache);
    assert_string_equal(got.note, "-1");
    assert_int_equal(got.any, -5);
    assert_int_equal(
        load("--note=--odd", "--verbose=no", "--listen_port", "8", "--listen-port", "9", "--cache=on"), 0);
    assert_string_equal(got.note, "--odd");
    assert_false(got.verbose);
    assert_int_equal(got.port, 9);
    assert_int_equal(load("--note="), 0);
    assert_string_equal(got.note, "");
}

static void test_flag_errors(void **state)
{
    (void)state;
    assert_error(load("--listen-prot=7"), -TD_ERR_ARG, "no option --listen-prot; see td-test --help");
    assert_error(load("--listen"), -TD_ERR_ARG, "no option --listen;");
    assert_error(load("--listen-port-more", "1"), -TD_ERR_ARG, "no option --listen-port-more;");
    assert_error(load("-p"), -TD_ERR_ARG, "no option -p;");
    assert_error(load("--listen-port"), -TD_ERR_ARG, "--listen-port needs a value");
    assert_error(load("--note", "--verbose"), -TD_ERR_ARG, "--note needs a value");
    assert_error(load("--no-note"), -TD_ERR_ARG, "no option --no-note");
    assert_error(load("--no-cache=true"), -TD_ERR_ARG, "--no-cache takes no value");
    assert_error(load("--config"), -TD_ERR_ARG, "--config needs a file");
    assert_error(load("extra"), -TD_ERR_ARG, "unexpected argument \"extra\"");
    assert_error(load("--listen-port=x"), -TD_ERR_ARG,
                 "cannot use --listen-port: listen-port needs a whole number");
}

static void test_positional_arguments(void **state)
{
    (void)state;
    assert_int_equal(load_with(true, "slice", "--verbose", "in.gguf", "-", "--", "--cache", "-h", NULL), 0);
    assert_int_equal(rest_count, 5);
    static const char *const expected[] = {"slice", "in.gguf", "-", "--cache", "-h"};
    for (int i = 0; i < 5; i++)
        assert_string_equal(rest[i], expected[i]);
    assert_null(rest[5]);
    assert_true(got.verbose);
    assert_int_equal(load_with(true, NULL), 0);
    assert_int_equal(rest_count, 0);
}

/* --- types --- */

static void test_numbers_at_their_edges(void **state)
{
    (void)state;
    assert_int_equal(load("--listen-port", "1"), 0);
    assert_int_equal(load("--listen-port", "65535"), 0);
    assert_error(load("--listen-port", "0"), -TD_ERR_ARG, "listen-port must be from 1 to 65535, not 0");
    assert_error(load("--listen-port", "65536"), -TD_ERR_ARG, "must be from 1 to 65535");
    assert_int_equal(load("--any-number", "9223372036854775807"), 0);
    assert_true(got.any == INT64_MAX);
    static const char *const not_ints[] = {
        "9223372036854775808", "", " 1", "1 ", "0x10", "1.0", "one", "\t1", "\n1"};
    for (size_t i = 0; i < TD_COUNT(not_ints); i++)
        assert_error(load("--any-number", not_ints[i]), -TD_ERR_ARG, "needs a whole number");
    assert_int_equal(load("--keep-ratio", "1e-3"), 0);
    assert_true(got.ratio == 1e-3);
    assert_error(load("--keep-ratio", "1.01"), -TD_ERR_ARG, "must be from 0 to 1");
    static const char *const not_floats[] = {"nan", "inf", "", "0.5x", " 0.5", "\v1"};
    for (size_t i = 0; i < TD_COUNT(not_floats); i++)
        assert_error(load("--keep-ratio", not_floats[i]), -TD_ERR_ARG, "needs a number");
}

static void test_sizes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t size;
    } good[] = {{"4096", 4096},     {"64K", 65536},    {"64k", 65536},     {"2M", 2u << 20},
                {"2MiB", 2u << 20}, {"2MB", 2u << 20}, {"3g", 3ull << 30}, {"1T", 1ull << 40},
                {"5000B", 5000},    {"010K", 10240}};
    for (size_t i = 0; i < TD_COUNT(good); i++) {
        assert_int_equal(load("--memory", good[i].text), 0);
        assert_true(got.memory == good[i].size);
    }
    static const char *const bad[] = {"",          "K",   "-1",   "+1",  " 1",
                                      "1.5M",      "1X",  "1KK",  "1iB", "99999999999999999999",
                                      "16777216T", "1 K", "4096{"};
    for (size_t i = 0; i < TD_COUNT(bad); i++)
        assert_error(load("--memory", bad[i]), -TD_ERR_ARG, "needs a size such as");
    assert_error(
        load("--memory", "4095"), -TD_ERR_ARG,
        "cannot use --memory: memory must be at least 4K (or 0), and this is 4095 bytes; the units are "
        "K, M, G and T");
    assert_int_equal(load("--memory", "0"), 0);
    assert_true(got.memory == 0);
}

static void test_bools(void **state)
{
    (void)state;
    static const char *const words[] = {"true", "no", "YES", "False", "on", "OFF", "1", "0"};
    char flag[32];
    for (size_t i = 0; i < TD_COUNT(words); i++) {
        snprintf(flag, sizeof flag, "--verbose=%s", words[i]);
        assert_int_equal(load(flag), 0);
        assert_int_equal(got.verbose, i % 2 == 0);
    }
    assert_error(load("--verbose=maybe"), -TD_ERR_ARG, "verbose needs true or false, not \"maybe\"");
    assert_error(load("--verbose="), -TD_ERR_ARG, "verbose needs true or false");
}

/* --- the file --- */

static void test_file_form(void **state)
{
    (void)state;
    write_ini("\xef\xbb\xbf# comment\n  ; comment\n\n[edge] # section\n"
              "listen_port=5\r\n"
              "\t listen-host \t=  a b#c ; comment\n"
              "verbose = yes # why\n"
              "note = \" # \\\"x\\\" \\\\ \\n ; \" # \"comment\"\n"
              "memory = 8K"); /* no newline at the end */
    assert_int_equal(load_file(), 0);
    assert_int_equal(got.port, 5);
    assert_string_equal(got.host, "a b#c");
    assert_true(got.verbose);
    assert_string_equal(got.note, " # \"x\" \\ \\n ; ");
    assert_int_equal(got.memory, 8192);
    write_ini("note =\n");
    assert_int_equal(load_file(), 0);
    assert_string_equal(got.note, "");
    write_ini("note = # only a comment\nlisten-host = \"\"\n");
    assert_int_equal(load_file(), 0);
    assert_string_equal(got.note, "");
    assert_string_equal(got.host, "");
    write_ini("");
    assert_int_equal(load_file(), 0);
}

static void test_file_errors_name_file_and_line(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int code;
        const char *message;
    } cases[] = {
        {"\n\nlisten-prot = 7\n", -TD_ERR_ARG,
         "edge.ini:3: there is no setting \"listen-prot\"; see td-test --help"},
        {"note = 1\nnote = 2\n", -TD_ERR_ARG, "edge.ini:2: note was already set in line 1"},
        {"listen-port = 7\nlisten_port = 7\n", -TD_ERR_ARG,
         "edge.ini:2: listen-port was already set in line 1"},
        {"# x\nlisten-port = 70000\n", -TD_ERR_ARG,
         "edge.ini:2: listen-port must be from 1 to 65535, not 70000"},
        {"listen-port =\n", -TD_ERR_ARG, "edge.ini:1: listen-port needs a whole number, not \"\""},
        {"note\n", -TD_ERR_FORMAT, "edge.ini:1: expected key = value"},
        {"= x\n", -TD_ERR_FORMAT, "edge.ini:1: expected key = value"},
        {"[edge\n", -TD_ERR_FORMAT, "edge.ini:1: a section needs"},
        {"note = \"x\n", -TD_ERR_FORMAT, "edge.ini:1: a quoted value needs"},
        {"note = \"x\\\"\n", -TD_ERR_FORMAT, "edge.ini:1: a quoted value needs"},
        {"note = \"x\" y\n", -TD_ERR_FORMAT, "edge.ini:1: a quoted value needs"},
        {"config = other.ini\n", -TD_ERR_ARG, "edge.ini:1: there is no setting \"config\""},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        write_ini(cases[i].text);
        assert_error(load_file(), cases[i].code, cases[i].message);
    }
    write_ini("listen-port = 70000\n"); /* found though a flag overrides it */
    assert_error(load("--config", ini_path, "--listen-port", "7"), -TD_ERR_ARG, "edge.ini:1");
    write_file(ini_path, "note = a\nnote = \0b\n", 19, 0600);
    assert_error(load_file(), -TD_ERR_FORMAT, "edge.ini:2: the line holds a NUL byte");
    assert_error(load("--config", directory), -TD_ERR_ARG, "it is not a regular file");
    unlink(ini_path);
    assert_int_equal(mkfifo(ini_path, 0600), 0); /* must not wait for a writer */
    assert_error(load_file(), -TD_ERR_ARG, "it is not a regular file");
    unlink(ini_path);
    assert_error(load("--config=/nonexistent"), -TD_ERR_NOTFOUND,
                 "cannot read configuration file /nonexistent");
}

static void test_file_size_limit(void **state)
{
    (void)state;
    size_t limit = 1u << 20;
    char *text = malloc(limit + 1);
    memset(text, '\n', limit + 1);
    memcpy(text + limit - 11, "\nnote = end", 11);
    write_file(ini_path, text, limit, 0600);
    assert_int_equal(load_file(), 0);
    assert_string_equal(got.note, "end");
    text[limit] = '\n';
    write_file(ini_path, text, limit + 1, 0600);
    assert_error(load_file(), -TD_ERR_LIMIT, "more than 1048576 bytes");
    free(text);
}

/* --- secrets --- */

static void test_secrets_stay_off_the_command_line(void **state)
{
    (void)state;
    assert_error(load("--auth-token", "hunter2"), -TD_ERR_ARG, "set TDTEST_AUTH_TOKEN");
    assert_null(strstr(err.text, "hunter2"));
    assert_error(load("--auth-token=hunter2"), -TD_ERR_ARG, "which every user can see");
    assert_null(strstr(err.text, "hunter2"));
    setenv("TDTEST_AUTH_TOKEN", "from env", 1);
    assert_int_equal(load_nothing(), 0);
    assert_string_equal(got.token, "from env");
    unsetenv("TDTEST_AUTH_TOKEN");
    write_ini("auth-token = from file\n");
    assert_int_equal(load_file(), 0);
    assert_string_equal(got.token, "from file");
    chmod(ini_path, 0640);
    assert_error(load_file(), -TD_ERR_AUTH, "run: chmod 600 ");
    assert_null(strstr(err.text, "from file"));
    write_file(ini_path, "note = x\n", 9, 0644); /* readable by all is fine without secrets */
    assert_int_equal(load_file(), 0);
}

static int read_secret(const char *text, size_t size, mode_t mode, char *out, size_t capacity)
{
    write_file(secret_path, text, size, mode);
    memset(&err, 0, sizeof err);
    memset(out, 'z', capacity);
    return config_read_secret(secret_path, out, capacity, &err);
}

static void test_secret_file(void **state)
{
    (void)state;
    char out[8];
    assert_int_equal(read_secret("hunter2\nmore\n", 13, 0600, out, sizeof out), 0); /* exactly fits */
    assert_string_equal(out, "hunter2");
    assert_int_equal(read_secret("abc", 3, 0400, out, sizeof out), 0);
    assert_string_equal(out, "abc");
    assert_int_equal(read_secret("abc\r\n", 5, 0600, out, sizeof out), 0);
    assert_string_equal(out, "abc");
    static const char zeros[8];
    static const struct {
        const char *text;
        size_t size;
        mode_t mode;
        int code;
        const char *message;
    } bad[] = {
        {"hunter22\n", 9, 0600, -TD_ERR_LIMIT, "more than 7 characters"},
        {"hunter22", 8, 0600, -TD_ERR_LIMIT, "more than 7 characters"},
        {"", 0, 0600, -TD_ERR_FORMAT, "is empty"},
        {"\nabc\n", 5, 0600, -TD_ERR_FORMAT, "is empty"},
        {"\r\n", 2, 0600, -TD_ERR_FORMAT, "is empty"},
        {"a\0b\n", 4, 0600, -TD_ERR_FORMAT, "NUL"},
        {"abc\n", 4, 0640, -TD_ERR_AUTH, "(mode 0640); run: chmod 600 /tmp/td-config-"},
        {"abc\n", 4, 0604, -TD_ERR_AUTH, "(mode 0604)"},
        {"abc\n", 4, 0620, -TD_ERR_AUTH, "(mode 0620)"},
    };
    for (size_t i = 0; i < TD_COUNT(bad); i++) {
        assert_int_equal(read_secret(bad[i].text, bad[i].size, bad[i].mode, out, sizeof out), bad[i].code);
        assert_memory_equal(out, zeros, sizeof out);
        assert_non_null(strstr(err.text, bad[i].message));
        assert_null(strstr(err.text, "hunter"));
    }
    assert_int_equal(config_read_secret("/nonexistent", out, sizeof out, &err), -TD_ERR_NOTFOUND);
    assert_int_equal(config_read_secret(directory, out, sizeof out, &err), -TD_ERR_ARG);
    assert_int_equal(config_read_secret(secret_path, out, 1, &err), -TD_ERR_ARG);
    unlink(secret_path);
    assert_int_equal(mkfifo(secret_path, 0600), 0); /* must not wait for a writer */
    assert_int_equal(config_read_secret(secret_path, out, sizeof out, NULL), -TD_ERR_ARG);
    if (geteuid() == 0) { /* only root can give a file away */
        write_file(secret_path, "abc\n", 4, 0600);
        assert_int_equal(chown(secret_path, 12345, (gid_t)-1), 0);
        assert_int_equal(config_read_secret(secret_path, out, sizeof out, &err), -TD_ERR_AUTH);
        assert_non_null(strstr(err.text, "belongs to user 12345"));
    }
}

/* --- help --- */

static char printed[8192];

/* What config_load prints to stdout for one argument. */
static int load_and_capture(const char *argument)
{
    fflush(stdout);
    int saved = dup(STDOUT_FILENO);
    int fd = open(ini_path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    dup2(fd, STDOUT_FILENO);
    int status = load(argument, "--unknown");
    fflush(stdout);
    dup2(saved, STDOUT_FILENO);
    close(saved);
    ssize_t size = pread(fd, printed, sizeof printed - 1, 0);
    printed[size < 0 ? 0 : size] = '\0';
    close(fd);
    return status;
}

static void test_help_and_version(void **state)
{
    (void)state;
    static const char *const help[] = {"--help", "-h"}, *const version[] = {"--version", "-V"};
    static const char *const parts[] = {
        "A program for tests.\n\nUsage: td-test [options]\n",
        "  --listen-port PORT          port to listen on (1 to 65535) [8081]\n",
        "  --[no-]verbose              say more\n",
        "  --any-number N              any number\n",
        "  --memory SIZE               bytes of memory to use, which is explained in a\n",
        "\n                              text long enough",
        "  auth-token                  credential (from the environment or the file only)\n",
        "  --config FILE ",
        "--keep-ratio is\nkeep-ratio in the file and TDTEST_KEEP_RATIO in the environment.\n",
        "\n\nExamples:\n  td-test --listen-port 9\n",
    };
    for (size_t i = 0; i < TD_COUNT(help); i++) {
        assert_int_equal(load_and_capture(help[i]), 1);
        for (size_t p = 0; p < TD_COUNT(parts); p++)
            if (!strstr(printed, parts[p]))
                fail_msg("no \"%s\" in:\n%s", parts[p], printed);
        for (char *line = strtok(printed, "\n"); line; line = strtok(NULL, "\n"))
            assert_true(strlen(line) <= 80);
    }
    for (size_t i = 0; i < TD_COUNT(version); i++) {
        assert_int_equal(load_and_capture(version[i]), 1);
        assert_string_equal(printed, "td-test " TANDEM_VERSION "\n");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_order_of_sources),
        cmocka_unit_test(test_flag_forms),
        cmocka_unit_test(test_flag_errors),
        cmocka_unit_test(test_positional_arguments),
        cmocka_unit_test(test_numbers_at_their_edges),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_bools),
        cmocka_unit_test(test_file_form),
        cmocka_unit_test(test_file_errors_name_file_and_line),
        cmocka_unit_test(test_file_size_limit),
        cmocka_unit_test(test_secrets_stay_off_the_command_line),
        cmocka_unit_test(test_secret_file),
        cmocka_unit_test(test_help_and_version),
    };
    return cmocka_run_group_tests_name("config", tests, set_up, tear_down);
}
