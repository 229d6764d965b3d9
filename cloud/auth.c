/* auth: see auth.h. */
#include "cloud/auth.h"
#include "shared/crypto.h"
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct stamp { /* what tells one state of the file from another */
    bool exists;
    dev_t device;
    ino_t inode;
    off_t size;
    struct timespec modified, changed;
};

struct auth {
    char *path;
    pthread_mutex_t lock; /* guards all below */
    struct auth_entry *entries;
    size_t count;
    struct stamp stamp;
    unsigned missing_looks; /* in a row that found no file */
};

bool auth_name_valid(const char *name)
{
    size_t size = strnlen(name, LIMIT_NAME_SIZE + 1);
    if (size == 0 || size > LIMIT_NAME_SIZE)
        return false;
    for (size_t i = 0; i < size; i++)
        if (!isalnum((unsigned char)name[i]) && !strchr("._-", name[i]))
            return false;
    return name[0] != '.'; /* names become parts of paths elsewhere */
}

/* ---- lines ---- */

/* The next word of [*at, end): its size, 0 at the end. *at moves behind it, *word is its start. */
static size_t next_word(const char **at, const char *end, const char **word)
{
    while (*at < end && (**at == ' ' || **at == '\t' || **at == '\r'))
        (*at)++;
    *word = *at;
    while (*at < end && **at != ' ' && **at != '\t' && **at != '\r')
        (*at)++;
    return (size_t)(*at - *word);
}

static bool take_name(const char **at, const char *end, char out[LIMIT_NAME_SIZE + 1])
{
    const char *word;
    size_t size = next_word(at, end, &word);
    if (size == 0 || size > LIMIT_NAME_SIZE)
        return false;
    memcpy(out, word, size);
    out[size] = '\0';
    return auth_name_valid(out);
}

/* "2027-01-31T00:00:00Z" or "2027-01-31" -> Unix time, or -TD_ERR_FORMAT. */
static int parse_time(const char *text, uint64_t *out_s)
{
    struct tm t = {0};
    const char *rest = strptime(text, "%Y-%m-%d", &t);
    if (rest && *rest == 'T')
        rest = strptime(rest, "T%H:%M:%SZ", &t);
    if (!rest || *rest)
        return -TD_ERR_FORMAT;
    time_t seconds = timegm(&t);
    if (seconds <= 0)
        return -TD_ERR_FORMAT;
    *out_s = (uint64_t)seconds;
    return 0;
}

int auth_parse_line(const char *line, size_t size, struct auth_entry *out, struct td_error *err)
{
    const char *at = line, *word, *comment = memchr(line, '#', size), *end = comment ? comment : line + size;
    memset(out, 0, sizeof *out);
    size_t length = next_word(&at, end, &word);
    if (length == 0)
        return 0;
    char text[2 * TD_HASH_SIZE + 1];
    if (length != 2 * TD_HASH_SIZE)
        return td_fail(err, -TD_ERR_FORMAT, "the first word is not the SHA-256 of a token (64 hex digits)");
    memcpy(text, word, length);
    text[length] = '\0';
    if (hex_decode(text, out->hash, TD_HASH_SIZE) < 0)
        return td_fail(err, -TD_ERR_FORMAT, "the first word is not the SHA-256 of a token (64 hex digits)");
    if (!take_name(&at, end, out->tenant) || !take_name(&at, end, out->principal))
        return td_fail(err, -TD_ERR_FORMAT,
                       "a tenant and a principal are wanted after the hash: 1 to %u of A-Z a-z 0-9 . _ -",
                       LIMIT_NAME_SIZE);
    length = next_word(&at, end, &word);
    if (length == 0)
        return 1;
    if (length >= sizeof text)
        return td_fail(err, -TD_ERR_FORMAT, "the expiry is not a time such as 2027-01-31T00:00:00Z");
    memcpy(text, word, length);
    text[length] = '\0';
    if (parse_time(text, &out->expires_s) < 0)
        return td_fail(err, -TD_ERR_FORMAT, "the expiry is not a time such as 2027-01-31T00:00:00Z");
    if (next_word(&at, end, &word))
        return td_fail(err, -TD_ERR_FORMAT, "there is something after the expiry");
    return 1;
}

/* ---- the file ---- */

static int check_private(int fd, const char *path, struct stat *st, struct td_error *err)
{
    if (fstat(fd, st) < 0)
        return td_fail(err, -TD_ERR_IO, "cannot read the tokens file %s: %s", path, strerror(errno));
    if (!S_ISREG(st->st_mode))
        return td_fail(err, -TD_ERR_ARG, "cannot use the tokens file %s: not a regular file", path);
    if (st->st_mode & 077)
        return td_fail(err, -TD_ERR_AUTH,
                       "cannot use the tokens file %s: other users may read or write it; run: chmod 600 %s",
                       path, path);
    if (st->st_uid != geteuid() && st->st_uid != 0)
        return td_fail(err, -TD_ERR_AUTH, "cannot use the tokens file %s: it belongs to another user", path);
    if (st->st_size > AUTH_FILE_SIZE_MAX)
        return td_fail(err, -TD_ERR_LIMIT, "cannot use the tokens file %s: it has more than %u bytes", path,
                       AUTH_FILE_SIZE_MAX);
    return 0;
}

/* At most `size` bytes: what is appended meanwhile is read next time. */
static int read_text(int fd, char *text, size_t size, size_t *got)
{
    *got = 0;
    while (*got < size) {
        ssize_t n = read(fd, text + *got, size - *got);
        if (n == 0)
            break;
        if (n < 0 && errno != EINTR)
            return -TD_ERR_IO;
        if (n > 0)
            *got += (size_t)n;
    }
    return 0;
}

int auth_no_file(const char *path, struct td_error *err)
{
    return td_fail(err, -TD_ERR_NOTFOUND, "there is no tokens file %s: `tandem-cloud token new` makes it",
                   path);
}

int auth_read_file(const char *path, char **text, size_t *size, struct td_error *err)
{
    *text = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT
                   ? auth_no_file(path, err)
                   : td_fail(err, -TD_ERR_IO, "cannot read the tokens file %s: %s", path, strerror(errno));
    struct stat st;
    int rc = check_private(fd, path, &st, err);
    if (rc == 0 && !(*text = malloc((size_t)st.st_size + 1)))
        rc = td_fail(err, -TD_ERR_NOMEM, "cannot read the tokens file %s: out of memory", path);
    if (rc == 0 && read_text(fd, *text, (size_t)st.st_size, size) < 0)
        rc = td_fail(err, -TD_ERR_IO, "cannot read the tokens file %s: %s", path, strerror(errno));
    close(fd);
    if (rc < 0) {
        free(*text);
        *text = NULL;
        return rc;
    }
    (*text)[*size] = '\0';
    return 0;
}

static int parse_all(const char *path, const char *text, size_t size, struct auth_entry **entries,
                     size_t *count, struct td_error *err)
{
    size_t lines = 1, number = 0;
    for (size_t i = 0; i < size; i++)
        lines += text[i] == '\n';
    *count = 0;
    *entries = calloc(lines, sizeof **entries);
    if (!*entries)
        return td_fail(err, -TD_ERR_NOMEM, "cannot read the tokens file %s: out of memory", path);
    for (const char *at = text, *end = text + size; at < end;) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        size_t length = newline ? (size_t)(newline - at) : (size_t)(end - at);
        struct td_error why;
        number++;
        int rc = auth_parse_line(at, length, &(*entries)[*count], &why);
        if (rc < 0) {
            free(*entries);
            *entries = NULL;
            return td_fail(err, rc, "cannot use the tokens file %s, line %zu: %s", path, number, why.text);
        }
        *count += (size_t)rc;
        at += length + 1;
    }
    return 0;
}

static struct stamp stamp_of(const char *path)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return (struct stamp){0};
    return (struct stamp){true, st.st_dev, st.st_ino, st.st_size, st.st_mtim, st.st_ctim};
}

static bool time_equal(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

static bool stamp_equal(const struct stamp *a, const struct stamp *b)
{
    return a->exists == b->exists && a->device == b->device && a->inode == b->inode && a->size == b->size &&
           time_equal(a->modified, b->modified) && time_equal(a->changed, b->changed);
}

/* ---- the table ---- */

int auth_open(const char *path, struct auth **out, struct td_error *err)
{
    struct auth *a = calloc(1, sizeof *a);
    if (!a || !(a->path = strdup(path))) {
        free(a);
        return td_fail(err, -TD_ERR_NOMEM, "cannot read the tokens file %s: out of memory", path);
    }
    pthread_mutex_init(&a->lock, NULL);
    int rc = auth_reload(a, true, err);
    if (rc < 0) {
        auth_close(a);
        return rc;
    }
    *out = a;
    return 0;
}

void auth_close(struct auth *a)
{
    if (!a)
        return;
    pthread_mutex_destroy(&a->lock);
    free(a->entries);
    free(a->path);
    free(a);
}

static void replace_table(struct auth *a, struct auth_entry *entries, size_t count)
{
    pthread_mutex_lock(&a->lock);
    struct auth_entry *old = a->entries;
    a->entries = entries;
    a->count = count;
    pthread_mutex_unlock(&a->lock);
    free(old);
}

/* No file has this stamp. */
static void look_again(struct auth *a)
{
    pthread_mutex_lock(&a->lock);
    a->stamp.size = -1;
    pthread_mutex_unlock(&a->lock);
}

/* The stamp is taken before the text is read: a change in between is seen at the next look. */
int auth_reload(struct auth *a, bool force, struct td_error *err)
{
    struct stamp stamp = stamp_of(a->path);
    pthread_mutex_lock(&a->lock);
    bool same = stamp_equal(&stamp, &a->stamp);
    a->missing_looks = stamp.exists ? 0 : a->missing_looks + 1;
    bool wait = !stamp.exists && a->stamp.exists && a->missing_looks < 2;
    if (!wait)
        a->stamp = stamp;
    pthread_mutex_unlock(&a->lock);
    if (wait || (same && !force))
        return 0;
    struct auth_entry *entries = NULL;
    size_t count = 0, size = 0;
    char *text = NULL;
    int rc = auth_read_file(a->path, &text, &size, err);
    if (rc == 0)
        rc = parse_all(a->path, text, size, &entries, &count, err);
    free(text);
    if (rc == -TD_ERR_IO || rc == -TD_ERR_NOMEM)
        look_again(a);
    if (rc < 0 && !(rc == -TD_ERR_NOTFOUND && !stamp.exists))
        return rc;
    replace_table(a, entries, count);
    if (err)
        *err = (struct td_error){0};
    return 1;
}

static bool entry_good(const struct auth_entry *e, uint64_t now_s)
{
    return e->expires_s == 0 || now_s < e->expires_s;
}

int auth_check(struct auth *a, const char *token, struct auth_identity *out)
{
    size_t size = strnlen(token, LIMIT_TOKEN_SIZE + 1);
    struct auth_identity found = {0};
    uint8_t hash[TD_HASH_SIZE];
    sha256_once(token, size, hash);
    uint64_t now_s = clock_wall_us() / 1000000;
    bool good = false;
    pthread_mutex_lock(&a->lock);
    for (size_t i = 0; i < a->count; i++) {
        const struct auth_entry *e = &a->entries[i];
        bool hit = crypto_equal(e->hash, hash, TD_HASH_SIZE);
        if (hit & entry_good(e, now_s)) { /* one line a token: at most one entry ever takes this branch */
            memcpy(found.tenant, e->tenant, sizeof found.tenant);
            memcpy(found.principal, e->principal, sizeof found.principal);
            good = true;
        }
    }
    pthread_mutex_unlock(&a->lock);
    if (!good || size == 0 || size > LIMIT_TOKEN_SIZE)
        return -TD_ERR_AUTH;
    memcpy(found.hash, hash, TD_HASH_SIZE);
    *out = found;
    return 0;
}

bool auth_still_valid(struct auth *a, const uint8_t hash[TD_HASH_SIZE])
{
    uint64_t now_s = clock_wall_us() / 1000000;
    bool good = false;
    pthread_mutex_lock(&a->lock);
    for (size_t i = 0; i < a->count; i++)
        good |= crypto_equal(a->entries[i].hash, hash, TD_HASH_SIZE) && entry_good(&a->entries[i], now_s);
    pthread_mutex_unlock(&a->lock);
    return good;
}

bool auth_principal_valid(struct auth *a, const char *tenant, const char *principal)
{
    uint64_t now_s = clock_wall_us() / 1000000;
    bool good = false;
    pthread_mutex_lock(&a->lock);
    for (size_t i = 0; i < a->count; i++)
        good |= strcmp(a->entries[i].tenant, tenant) == 0 &&
                strcmp(a->entries[i].principal, principal) == 0 && entry_good(&a->entries[i], now_s);
    pthread_mutex_unlock(&a->lock);
    return good;
}

size_t auth_count(struct auth *a)
{
    pthread_mutex_lock(&a->lock);
    size_t count = a->count;
    pthread_mutex_unlock(&a->lock);
    return count;
}

/* The callback may be slow (a tenant's first keys go to disk), so it runs on a copy. */
void auth_each_tenant(struct auth *a, void (*fn)(void *ctx, const char *tenant), void *ctx)
{
    pthread_mutex_lock(&a->lock);
    size_t count = a->count;
    struct auth_entry *copy = malloc((count + 1) * sizeof *copy);
    if (copy && count)
        memcpy(copy, a->entries, count * sizeof *copy);
    pthread_mutex_unlock(&a->lock);
    for (size_t i = 0; copy && i < count; i++)
        fn(ctx, copy[i].tenant);
    free(copy);
}
