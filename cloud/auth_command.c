/* auth_command: see auth_command.h. Two commands at once are kept apart by a lock on the file itself; since a revocation replaces the
 * file, whoever gets the lock looks whether the path still leads to what was locked. */
#include "cloud/auth_command.h"
#include "cloud/settings.h"
#include "shared/config.h"
#include "shared/crypto.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOCK_TRIES 100u

static int fail_errno(struct td_error *err, const char *what, const char *path)
{
    return td_fail(err, errno == ENOSPC ? -TD_ERR_DISKFULL : -TD_ERR_IO, "cannot %s the tokens file %s: %s",
                   what, path, strerror(errno));
}

/* The open, locked file or a negative code. */
static int open_locked(const char *path, bool create, struct td_error *err)
{
    for (unsigned i = 0; i < LOCK_TRIES; i++) {
        int fd = open(path, O_RDWR | O_APPEND | O_CLOEXEC | (create ? O_CREAT : 0), 0600);
        if (fd < 0 && errno == ENOENT && !create)
            return auth_no_file(path, err);
        if (fd < 0)
            return fail_errno(err, "open", path);
        struct stat locked, there;
        if (flock(fd, LOCK_EX) == 0 && fstat(fd, &locked) == 0 && stat(path, &there) == 0 &&
            locked.st_ino == there.st_ino && locked.st_dev == there.st_dev)
            return fd;
        close(fd);
    }
    return td_fail(err, -TD_ERR_BUSY, "cannot lock the tokens file %s: another command keeps changing it",
                   path);
}

static int write_all(int fd, const char *text, size_t size)
{
    while (size > 0) {
        ssize_t n = write(fd, text, size);
        if (n < 0 && errno != EINTR)
            return -TD_ERR_IO;
        if (n > 0)
            text += n, size -= (size_t)n;
    }
    return 0;
}

/* A rename or a new file is there after a power cut only once its directory is synced. */
static void sync_directory(const char *path)
{
    char directory[PATH_MAX];
    const char *slash = strrchr(path, '/');
    snprintf(directory, sizeof directory, "%.*s", slash ? (int)(slash - path + 1) : 1, slash ? path : ".");
    int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return;
    (void)fsync(fd);
    close(fd);
}

static void format_time(uint64_t at_s, char *out, size_t size)
{
    time_t seconds = (time_t)at_s;
    struct tm utc;
    gmtime_r(&seconds, &utc);
    strftime(out, size, "%Y-%m-%dT%H:%M:%SZ", &utc);
}

static int append_line(int fd, const char *path, const char *line, struct td_error *err)
{
    struct stat st;
    char last = '\n';
    if (fstat(fd, &st) < 0 || (st.st_size > 0 && pread(fd, &last, 1, st.st_size - 1) != 1))
        return fail_errno(err, "read", path);
    if (st.st_mode & 077)
        return td_fail(err, -TD_ERR_AUTH,
                       "cannot use the tokens file %s: other users may read or write it; run: chmod 600 %s",
                       path, path);
    if ((last != '\n' && write_all(fd, "\n", 1) < 0) || write_all(fd, line, strlen(line)) < 0 ||
        fsync(fd) < 0) {
        int rc = fail_errno(err, "write", path);
        if (ftruncate(fd, st.st_size) < 0)
            return rc; /* half a line stays: the next start names it */
        return rc;
    }
    sync_directory(path);
    return 0;
}

int auth_token_new(const char *path, const char *tenant, const char *principal, uint64_t expires_s,
                   char token[AUTH_TOKEN_DIGITS + 1], struct td_error *err)
{
    if (!auth_name_valid(tenant) || !auth_name_valid(principal))
        return td_fail(err, -TD_ERR_ARG,
                       "cannot make a token: --tenant and --principal want 1 to %u of A-Z a-z 0-9 . _ - each",
                       LIMIT_NAME_SIZE);
    uint8_t secret[AUTH_TOKEN_DIGITS / 2], hash[TD_HASH_SIZE];
    if (crypto_random(secret, sizeof secret) < 0)
        return td_fail(err, -TD_ERR_CRYPTO, "cannot make a token: no random numbers");
    hex_encode(secret, sizeof secret, token);
    sha256_once(token, AUTH_TOKEN_DIGITS, hash);
    char digits[2 * TD_HASH_SIZE + 1], expiry[32] = "", line[sizeof digits + 2 * LIMIT_NAME_SIZE + 40];
    hex_encode(hash, sizeof hash, digits);
    if (expires_s)
        format_time(expires_s, expiry, sizeof expiry);
    snprintf(line, sizeof line, "%s %s %s%s%s\n", digits, tenant, principal, expires_s ? " " : "", expiry);
    int fd = open_locked(path, true, err);
    if (fd < 0)
        return fd;
    int rc = append_line(fd, path, line, err);
    close(fd);
    return rc;
}

/* ---- revoke ---- */

static bool line_is(const char *line, size_t size, const char *id)
{
    struct auth_entry e;
    char digits[2 * TD_HASH_SIZE + 1];
    if (auth_parse_line(line, size, &e, NULL) != 1)
        return false;
    hex_encode(e.hash, sizeof e.hash, digits);
    return strncmp(digits, id, strlen(id)) == 0;
}

/* Move the lines that stay to the front; returns their size. */
static size_t remove_lines(char *text, size_t size, const char *id, unsigned *removed)
{
    size_t kept = 0;
    for (size_t at = 0; at < size;) {
        const char *newline = memchr(text + at, '\n', size - at);
        size_t length = newline ? (size_t)(newline - (text + at)) + 1 : size - at;
        if (line_is(text + at, newline ? length - 1 : length, id)) {
            (*removed)++;
        } else {
            memmove(text + kept, text + at, length);
            kept += length;
        }
        at += length;
    }
    return kept;
}

static int replace_file(const char *path, const char *text, size_t size, struct td_error *err)
{
    char temporary[PATH_MAX];
    if (snprintf(temporary, sizeof temporary, "%s.new", path) >= (int)sizeof temporary)
        return td_fail(err, -TD_ERR_ARG, "the path of the tokens file is too long");
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return fail_errno(err, "replace", path);
    int rc = 0;
    if (fchmod(fd, 0600) < 0 || write_all(fd, text, size) < 0 || fsync(fd) < 0)
        rc = fail_errno(err, "replace", path);
    close(fd);
    if (rc == 0 && rename(temporary, path) < 0)
        rc = fail_errno(err, "replace", path);
    if (rc < 0)
        unlink(temporary);
    else
        sync_directory(path);
    return rc;
}

int auth_token_revoke(const char *path, const char *id, struct td_error *err)
{
    size_t digits = strlen(id);
    if (digits < AUTH_ID_DIGITS || digits > 2 * TD_HASH_SIZE || strspn(id, "0123456789abcdef") != digits)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot revoke: give the token's id, %d or more hex digits as `token list` shows it",
                       AUTH_ID_DIGITS);
    int fd = open_locked(path, false, err);
    if (fd < 0)
        return fd;
    char *text = NULL;
    size_t size = 0;
    unsigned removed = 0;
    int rc = auth_read_file(path, &text, &size, err);
    if (rc == 0) {
        size = remove_lines(text, size, id, &removed);
        rc = removed ? replace_file(path, text, size, err)
                     : td_fail(err, -TD_ERR_NOTFOUND, "no token with the id %s is in %s", id, path);
    }
    free(text);
    close(fd);
    return rc;
}

/* ---- list ---- */

static int token_list(const char *path, struct td_error *err)
{
    char *text = NULL;
    size_t size = 0, number = 0;
    int rc = auth_read_file(path, &text, &size, err);
    if (rc < 0)
        return rc;
    uint64_t now_s = clock_wall_us() / 1000000;
    printf("%-*s  %-20s  %-20s  %s\n", AUTH_ID_DIGITS, "id", "tenant", "principal", "expires");
    for (size_t at = 0; at < size;) {
        const char *newline = memchr(text + at, '\n', size - at);
        size_t length = newline ? (size_t)(newline - (text + at)) : size - at;
        struct auth_entry e;
        struct td_error why;
        number++;
        int got = auth_parse_line(text + at, length, &e, &why);
        at += length + 1;
        if (got < 0)
            printf("line %zu: %s\n", number, why.text);
        if (got != 1)
            continue;
        char digits[2 * TD_HASH_SIZE + 1], expiry[48] = "never";
        hex_encode(e.hash, sizeof e.hash, digits);
        if (e.expires_s)
            format_time(e.expires_s, expiry, sizeof expiry);
        printf("%.*s  %-20s  %-20s  %s%s\n", AUTH_ID_DIGITS, digits, e.tenant, e.principal, expiry,
               e.expires_s && e.expires_s <= now_s ? " (expired)" : "");
    }
    free(text);
    return 0;
}

/* ---- the command ---- */

struct token_settings {
    const char *tokens_file, *tenant, *principal;
    int64_t days;
};

static const struct config_option token_options[] = {
    {.name = "tokens-file",
     .type = CONFIG_STRING,
     .offset = offsetof(struct token_settings, tokens_file),
     .metavar = "FILE",
     .help = "the node's tokens file; without it, the one that tandem-cloud uses by default"},
    {.name = "tenant",
     .type = CONFIG_STRING,
     .offset = offsetof(struct token_settings, tenant),
     .metavar = "NAME",
     .help = "new: whose data it is; tenants never share anything"},
    {.name = "principal",
     .type = CONFIG_STRING,
     .offset = offsetof(struct token_settings, principal),
     .metavar = "NAME",
     .help = "new: who within the tenant; conversations belong to a principal"},
    {.name = "days",
     .type = CONFIG_INT,
     .offset = offsetof(struct token_settings, days),
     .max = 36500,
     .metavar = "N",
     .help = "new: the token expires after so many days; 0: never"},
};

static int run_command(char **words, int count, const struct token_settings *s, const char *path,
                       struct td_error *err)
{
    if (count == 1 && strcmp(words[0], "new") == 0) {
        char token[AUTH_TOKEN_DIGITS + 1];
        uint64_t expires_s = s->days > 0 ? clock_wall_us() / 1000000 + (uint64_t)s->days * 86400 : 0;
        int rc = auth_token_new(path, s->tenant, s->principal, expires_s, token, err);
        if (rc == 0)
            printf("%s\n", token);
        crypto_wipe(token, sizeof token);
        return rc;
    }
    if (count == 1 && strcmp(words[0], "list") == 0)
        return token_list(path, err);
    if (count == 2 && strcmp(words[0], "revoke") == 0) {
        int rc = auth_token_revoke(path, words[1], err);
        if (rc == 0)
            printf("revoked %s in %s; running nodes end its connections within a second\n", words[1], path);
        return rc;
    }
    return td_fail(err, -TD_ERR_ARG,
                   "usage: tandem-cloud token new --tenant NAME --principal NAME | list | revoke ID");
}

static int choose_path(const struct token_settings *s, char *out, size_t size, struct td_error *err)
{
    if (!s->tokens_file[0])
        return path_default(out, size, "tokens", "--tokens-file", err);
    if (strlen(s->tokens_file) >= size)
        return td_fail(err, -TD_ERR_LIMIT, "the path of the tokens file is too long");
    strcpy(out, s->tokens_file);
    return 0;
}

int auth_command(int argc, char **argv)
{
    static const struct config_spec spec = {
        .program = "tandem-cloud token",
        .env_prefix = "TANDEM_CLOUD",
        .summary =
            "Credentials of a tandem-cloud node: new, list, revoke ID. Running nodes notice within a second.",
        .usage = "new --tenant NAME --principal NAME [--days N]\nlist\nrevoke ID",
        .examples = "  tandem-cloud token new --tenant acme --principal alice\n  tandem-cloud token list\n"
                    "  tandem-cloud token revoke 3f9a0c21b7de\n",
        .options = token_options,
        .option_count = TD_COUNT(token_options)};
    struct token_settings settings;
    struct config *config;
    struct td_error err;
    char **words, path[PATH_MAX];
    int count, rc = config_load(&spec, argc, argv, &settings, &config, &words, &count, &err);
    if (rc == 1)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "tandem-cloud: %s\n", err.text);
        return 2;
    }
    rc = choose_path(&settings, path, sizeof path, &err);
    if (rc == 0 && count > 0 && strcmp(words[0], "new") == 0)
        rc = path_make_parents(path, &err);
    if (rc == 0)
        rc = run_command(words, count, &settings, path, &err);
    config_free(config);
    if (rc == 0)
        return fflush(stdout) == 0 ? 0 : 1;
    fprintf(stderr, "tandem-cloud: %s\n", err.text);
    return rc == -TD_ERR_ARG ? 2 : 1;
}
