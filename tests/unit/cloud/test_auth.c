/* auth: who gets in, when the file changes, and what the token command does to it. SHA-256 of the fixed tokens below comes from sha256sum. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "cloud/auth_command.h"
#include "shared/crypto.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char path[64];

static void write_file(const char *text, mode_t mode)
{
    char temporary[80];
    snprintf(temporary, sizeof temporary, "%s.t", path);
    FILE *f = fopen(temporary, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    assert_int_equal(chmod(temporary, mode), 0);
    assert_int_equal(rename(temporary, path), 0);
}

static char *read_whole(void)
{
    static char text[65536];
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    return text;
}

static int set_up(void **state)
{
    (void)state;
    snprintf(path, sizeof path, "/tmp/td-test-auth-%d", (int)getpid());
    unlink(path);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    unlink(path);
    return 0;
}

static struct auth *open_with(const char *text)
{
    struct td_error err;
    struct auth *a = NULL;
    write_file(text, 0600);
    assert_int_equal(auth_open(path, &a, &err), 0);
    return a;
}

/* ---- lines ---- */

static const char *const hash_of_alpha = /* printf %s alpha | sha256sum */
    "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8";
static const char *const hash_of_beta = /* printf %s beta | sha256sum */
    "f44e64e75f3948e9f73f8dfa94721c4ce8cbb4f265c4790c702b2d41cfbf2753";

static int parse(const char *line, struct auth_entry *e, struct td_error *err)
{
    return auth_parse_line(line, strlen(line), e, err);
}

static void test_lines(void **state)
{
    (void)state;
    struct auth_entry e;
    struct td_error err;
    char line[400];
    assert_int_equal(parse("", &e, &err), 0);
    assert_int_equal(parse("   # a comment", &e, &err), 0);
    snprintf(line, sizeof line, "%s acme alice", hash_of_alpha);
    assert_int_equal(parse(line, &e, &err), 1);
    assert_string_equal(e.tenant, "acme");
    assert_string_equal(e.principal, "alice");
    assert_int_equal(e.expires_s, 0);
    snprintf(line, sizeof line, "\t%s  acme\talice  2027-01-31T00:00:00Z # laptop\r", hash_of_alpha);
    assert_int_equal(parse(line, &e, &err), 1);
    assert_int_equal(e.expires_s, 1801353600); /* date -u -d 2027-01-31 +%s */
    snprintf(line, sizeof line, "%s acme alice 2027-01-31", hash_of_alpha);
    assert_int_equal(parse(line, &e, &err), 1);
    assert_int_equal(e.expires_s, 1801353600);
}

static void test_bad_lines(void **state)
{
    (void)state;
    struct auth_entry e;
    struct td_error err;
    char line[400];
    static const char *const tails[] = {"",
                                        " acme",
                                        " acme al/ice",
                                        " ../acme alice",
                                        " acme alice tomorrow",
                                        " acme alice 2027-01-31T00:00:00Z x",
                                        " acme alice 2027-01-31T"};
    for (size_t i = 0; i < TD_COUNT(tails); i++) {
        snprintf(line, sizeof line, "%s%s", hash_of_alpha, tails[i]);
        assert_int_equal(parse(line, &e, &err), -TD_ERR_FORMAT);
        assert_null(strstr(err.text, hash_of_alpha)); /* a message never shows what a line holds */
    }
    assert_int_equal(parse("alpha acme alice", &e, &err), -TD_ERR_FORMAT);
    snprintf(line, sizeof line, "%.63sg acme alice", hash_of_alpha);
    assert_int_equal(parse(line, &e, &err), -TD_ERR_FORMAT);
    char name[LIMIT_NAME_SIZE + 2];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    snprintf(line, sizeof line, "%s %s alice", hash_of_alpha, name);
    assert_int_equal(parse(line, &e, &err), -TD_ERR_FORMAT);
    name[LIMIT_NAME_SIZE] = '\0';
    snprintf(line, sizeof line, "%s %s alice", hash_of_alpha, name);
    assert_int_equal(parse(line, &e, &err), 1);
}

/* ---- checks ---- */

static void test_who_gets_in(void **state)
{
    (void)state;
    char text[400];
    struct auth_identity who;
    snprintf(text, sizeof text, "%s acme alice\n%s globex bob 2001-01-01T00:00:00Z\n", hash_of_alpha,
             hash_of_beta);
    struct auth *a = open_with(text);
    assert_int_equal(auth_count(a), 2);
    assert_int_equal(auth_check(a, "alpha", &who), 0);
    assert_string_equal(who.tenant, "acme");
    assert_string_equal(who.principal, "alice");
    assert_true(auth_still_valid(a, who.hash));
    assert_int_equal(auth_check(a, "beta", &who), -TD_ERR_AUTH); /* expired */
    assert_int_equal(auth_check(a, "alph", &who), -TD_ERR_AUTH);
    assert_int_equal(auth_check(a, "", &who), -TD_ERR_AUTH);
    assert_int_equal(auth_check(a, hash_of_alpha, &who), -TD_ERR_AUTH); /* the hash is no token */
    assert_true(auth_principal_valid(a, "acme", "alice"));
    assert_false(auth_principal_valid(a, "acme", "bob"));
    assert_false(auth_principal_valid(a, "globex", "bob"));
    auth_close(a);
}

static void test_token_length(void **state)
{
    (void)state;
    char token[LIMIT_TOKEN_SIZE + 2], digits[65], text[400];
    uint8_t hash[TD_HASH_SIZE];
    struct auth_identity who;
    memset(token, 't', sizeof token - 1);
    token[LIMIT_TOKEN_SIZE] = '\0';
    sha256_once(token, LIMIT_TOKEN_SIZE, hash);
    hex_encode(hash, sizeof hash, digits);
    snprintf(text, sizeof text, "%s acme alice\n", digits);
    struct auth *a = open_with(text);
    assert_int_equal(auth_check(a, token, &who), 0);
    auth_close(a);
    token[LIMIT_TOKEN_SIZE] = 't', token[LIMIT_TOKEN_SIZE + 1] = '\0';
    sha256_once(token, LIMIT_TOKEN_SIZE + 1, hash);
    hex_encode(hash, sizeof hash, digits);
    snprintf(text, sizeof text, "%s acme alice\n", digits);
    a = open_with(text);
    assert_int_equal(auth_check(a, token, &who), -TD_ERR_AUTH);
    auth_close(a);
}

/* ---- the file ---- */

static void test_file_must_be_private(void **state)
{
    (void)state;
    struct auth *a = NULL;
    struct td_error err;
    write_file("", 0640);
    assert_int_equal(auth_open(path, &a, &err), -TD_ERR_AUTH);
    assert_non_null(strstr(err.text, "chmod 600"));
    write_file("nonsense\n", 0600);
    assert_int_equal(auth_open(path, &a, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, "line 1"));
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0); /* must not wait for a writer */
    assert_int_equal(auth_open(path, &a, &err), -TD_ERR_ARG);
    unlink(path);
    assert_int_equal(auth_open(path, &a, &err), 0); /* none yet: nobody comes in */
    assert_int_equal(auth_count(a), 0);
    auth_close(a);
}

static void test_reload(void **state)
{
    (void)state;
    char text[400];
    struct auth_identity who;
    struct td_error err;
    snprintf(text, sizeof text, "%s acme alice\n", hash_of_alpha);
    struct auth *a = open_with(text);
    assert_int_equal(auth_reload(a, false, &err), 0);
    assert_int_equal(auth_reload(a, true, &err), 1);
    assert_int_equal(auth_check(a, "alpha", &who), 0);

    snprintf(text, sizeof text, "%s acme bob\n", hash_of_beta);
    write_file(text, 0600);
    assert_int_equal(auth_reload(a, false, &err), 1);
    assert_int_equal(auth_check(a, "alpha", &(struct auth_identity){0}), -TD_ERR_AUTH);
    assert_false(auth_still_valid(a, who.hash));
    assert_int_equal(auth_check(a, "beta", &who), 0);

    write_file("broken\n", 0600); /* the table stays, and the complaint comes once */
    assert_int_equal(auth_reload(a, false, &err), -TD_ERR_FORMAT);
    assert_int_equal(auth_reload(a, false, &err), 0);
    assert_int_equal(auth_check(a, "beta", &who), 0);
    write_file(text, 0644); /* right again, but readable by others */
    assert_int_equal(auth_reload(a, false, &err), -TD_ERR_AUTH);
    assert_int_equal(auth_check(a, "beta", &who), 0);

    unlink(path); /* an editor may be at work; gone twice is gone */
    assert_int_equal(auth_reload(a, false, &err), 0);
    assert_int_equal(auth_check(a, "beta", &who), 0);
    assert_int_equal(auth_reload(a, false, &err), 1);
    assert_int_equal(auth_check(a, "beta", &who), -TD_ERR_AUTH);
    auth_close(a);
}

/* A token that was revoked just when no descriptor was left is not let in for good. */
static void test_reload_is_tried_again(void **state)
{
    (void)state;
    char text[400];
    struct auth_identity who;
    struct td_error err;
    struct rlimit files, none;
    snprintf(text, sizeof text, "%s acme alice\n", hash_of_alpha);
    struct auth *a = open_with(text);
    snprintf(text, sizeof text, "%s acme bob\n", hash_of_beta);
    write_file(text, 0600);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &files), 0);
    none = (struct rlimit){0, files.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    int rc = auth_reload(a, false, &err), again = auth_reload(a, false, &err);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &files), 0);
    assert_int_equal(rc, -TD_ERR_IO);
    assert_int_equal(again, -TD_ERR_IO);
    assert_int_equal(auth_check(a, "alpha", &who), 0);
    assert_int_equal(auth_reload(a, false, &err), 1);
    assert_int_equal(auth_check(a, "alpha", &who), -TD_ERR_AUTH);
    assert_int_equal(auth_check(a, "beta", &who), 0);
    auth_close(a);
}

static void count_tenant(void *ctx, const char *tenant)
{
    int *count = ctx;
    assert_true(strcmp(tenant, "acme") == 0 || strcmp(tenant, "globex") == 0);
    ++*count;
}

static void test_tenants(void **state)
{
    (void)state;
    char text[400];
    int count = 0;
    snprintf(text, sizeof text, "%s acme alice\n%s globex bob\n", hash_of_alpha, hash_of_beta);
    struct auth *a = open_with(text);
    auth_each_tenant(a, count_tenant, &count);
    assert_int_equal(count, 2);
    auth_close(a);
}

/* ---- the command ---- */

static void test_new_token(void **state)
{
    (void)state;
    char token[AUTH_TOKEN_DIGITS + 1], other[AUTH_TOKEN_DIGITS + 1];
    struct auth_identity who;
    struct td_error err;
    struct stat st;
    struct auth *a;
    assert_int_equal(auth_token_new(path, "acme", "alice", 0, token, &err), 0);
    assert_int_equal(strlen(token), AUTH_TOKEN_DIGITS);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_null(strstr(read_whole(), token)); /* kept nowhere */
    assert_int_equal(auth_token_new(path, "acme", "bob", 1801353600, other, &err), 0);
    assert_string_not_equal(token, other);
    assert_non_null(strstr(read_whole(), " acme bob 2027-01-31T00:00:00Z\n"));
    assert_int_equal(auth_open(path, &a, &err), 0);
    assert_int_equal(auth_check(a, token, &who), 0);
    assert_string_equal(who.principal, "alice");
    assert_int_equal(auth_check(a, other, &who), 0);
    auth_close(a);
    assert_int_equal(auth_token_new(path, "ac me", "alice", 0, token, &err), -TD_ERR_ARG);
    assert_int_equal(auth_token_new(path, "acme", "", 0, token, &err), -TD_ERR_ARG);
}

/* A file that a person edited may end without a newline. */
static void test_new_token_after_half_a_line(void **state)
{
    (void)state;
    char text[400], token[AUTH_TOKEN_DIGITS + 1];
    struct auth_identity who;
    struct td_error err;
    snprintf(text, sizeof text, "%s acme alice", hash_of_alpha);
    write_file(text, 0600);
    assert_int_equal(auth_token_new(path, "acme", "bob", 0, token, &err), 0);
    struct auth *a;
    assert_int_equal(auth_open(path, &a, &err), 0);
    assert_int_equal(auth_check(a, "alpha", &who), 0);
    assert_int_equal(auth_check(a, token, &who), 0);
    auth_close(a);
    write_file(text, 0644);
    assert_int_equal(auth_token_new(path, "acme", "bob", 0, token, &err), -TD_ERR_AUTH);
    assert_string_equal(read_whole(), text);
}

static void test_revoke(void **state)
{
    (void)state;
    char text[600], id[AUTH_ID_DIGITS + 1];
    struct td_error err;
    struct stat st;
    snprintf(text, sizeof text, "# people\n%s acme alice\n\n%s acme bob # laptop\n", hash_of_alpha,
             hash_of_beta);
    write_file(text, 0600);
    snprintf(id, sizeof id, "%.*s", AUTH_ID_DIGITS, hash_of_alpha);
    id[3] = id[3] == '0' ? '1' : '0';
    assert_int_equal(auth_token_revoke(path, id, &err), -TD_ERR_NOTFOUND);
    assert_int_equal(auth_token_revoke(path, "8ed3", &err), -TD_ERR_ARG); /* too short to mean one */
    assert_string_equal(read_whole(), text);
    snprintf(id, sizeof id, "%.*s", AUTH_ID_DIGITS, hash_of_alpha);
    assert_int_equal(auth_token_revoke(path, id, &err), 0);
    snprintf(text, sizeof text, "# people\n\n%s acme bob # laptop\n", hash_of_beta);
    assert_string_equal(read_whole(), text);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    unlink(path);
    assert_int_equal(auth_token_revoke(path, id, &err), -TD_ERR_NOTFOUND);
    assert_non_null(strstr(err.text, "token new"));
}

int main(void)
{
    crypto_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_bad_lines),
        cmocka_unit_test_setup_teardown(test_who_gets_in, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_token_length, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_file_must_be_private, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_reload, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_reload_is_tried_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_tenants, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_new_token, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_new_token_after_half_a_line, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_revoke, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
