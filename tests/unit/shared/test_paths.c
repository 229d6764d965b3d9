/* paths: where data goes for root and for others, and folders made on the way. */
#include "shared/base.h"
#include "shared/paths.h"
#include <setjmp.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static struct td_error err;

static void test_default(void **state)
{
    (void)state;
    char out[64];
    setenv("HOME", "/home/ada", 1);
    setenv("XDG_DATA_HOME", "/data", 1);
    assert_int_equal(path_default(out, sizeof out, "cloud", "--store", &err), 0);
    assert_string_equal(out, geteuid() == 0 ? "/var/lib/tandem/cloud" : "/data/tandem/cloud");
    assert_int_equal(path_default(out, 10, "cloud", "--store", &err), -TD_ERR_LIMIT);
    if (geteuid() == 0 && seteuid(65534) < 0)
        skip();
    setenv("XDG_DATA_HOME", "not/absolute", 1);
    assert_int_equal(path_default(out, sizeof out, "cloud", "--store", &err), 0);
    assert_string_equal(out, "/home/ada/.local/share/tandem/cloud");
    unsetenv("HOME");
    assert_int_equal(path_default(out, sizeof out, "cloud", "--store", &err), -TD_ERR_NOTFOUND);
    assert_non_null(strstr(err.text, "--store"));
    if (getuid() == 0)
        assert_int_equal(seteuid(0), 0);
}

static void test_parents(void **state)
{
    (void)state;
    char folder[64], path[96];
    struct stat st;
    snprintf(folder, sizeof folder, "/tmp/td-test-paths-%d", (int)getpid());
    snprintf(path, sizeof path, "%s/a/b/store.key", folder);
    assert_int_equal(path_make_parents(path, &err), 0);
    assert_int_equal(path_make_parents(path, &err), 0);
    assert_true(stat(path, &st) < 0);
    snprintf(path, sizeof path, "%s/a/b", folder);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0700);
    rmdir(path);
    snprintf(path, sizeof path, "%s/a", folder);
    rmdir(path);
    rmdir(folder);
    assert_int_equal(path_make_parents("/proc/nothing/here", &err), -TD_ERR_IO);
    assert_non_null(strstr(err.text, "/proc/nothing"));
}

static void test_model_name(void **state)
{
    (void)state;
    static const struct {
        const char *path, *name;
    } cases[] = {{"models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"},
                 {"model.gguf", "model"},
                 {"/m/model.bin", "model.bin"},
                 {"/m/.gguf", ".gguf"},
                 {"a.gguf/b", "b"}};
    char out[32];
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        path_model_name(cases[i].path, out, sizeof out);
        assert_string_equal(out, cases[i].name);
    }
    path_model_name("long-name.gguf", out, 5);
    assert_string_equal(out, "long");
}

static void many_files_may_be_open(void **state)
{
    (void)state;
    struct rlimit before, after;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    rlim_t granted = before.rlim_max < FILES_MAX ? before.rlim_max : FILES_MAX;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &(struct rlimit){granted / 2, before.rlim_max}), 0);
    files_settle();
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &after), 0);
    assert_int_equal(after.rlim_cur, granted);
    assert_int_equal(after.rlim_max, before.rlim_max);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_default), cmocka_unit_test(test_parents),
                                       cmocka_unit_test(many_files_may_be_open),
                                       cmocka_unit_test(test_model_name)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
