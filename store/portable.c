/* portable: see portable.h. */
#include "store/portable.h"
#include "shared/new_file.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { SALT_AT = 8, ITERATIONS_AT = 40, FRAME_HEAD = 8, AAD_SIZE = PORTABLE_HEAD_SIZE + FRAME_HEAD };

struct portable {
    struct new_file made; /* writing; its stream is `file` */
    FILE *file;
    char *path;
    bool ended;
    uint32_t frames;
    uint8_t key[CRYPTO_KEY_SIZE];
    uint8_t aad[AAD_SIZE]; /* the file's head, then the frame's */
};

void portable_key(const char *words, const uint8_t salt[32], uint32_t iterations,
                  uint8_t out[CRYPTO_KEY_SIZE])
{
    static const uint8_t first_block[4] = {0, 0, 0, 1};
    uint8_t password[TD_HASH_SIZE], u[TD_HASH_SIZE];
    sha256_once(words, strlen(words), password);
    hmac_sha256(password, (const struct span[]){{salt, 32}, {first_block, 4}}, 2, u);
    memcpy(out, u, CRYPTO_KEY_SIZE);
    for (uint32_t i = 1; i < iterations; i++) {
        hmac_sha256(password, &(struct span){u, sizeof u}, 1, u);
        for (size_t j = 0; j < CRYPTO_KEY_SIZE; j++)
            out[j] ^= u[j];
    }
    crypto_wipe(password, sizeof password);
    crypto_wipe(u, sizeof u);
}

static struct portable *make(const char *path)
{
    struct portable *p = calloc(1, sizeof *p);
    if (p && !(p->path = strdup(path))) {
        free(p);
        p = NULL;
    }
    return p;
}

void portable_close(struct portable *p)
{
    if (!p)
        return;
    if (p->made.stream)
        new_file_discard(&p->made);
    else if (p->file)
        fclose(p->file);
    crypto_wipe(p->key, sizeof p->key);
    free(p->path);
    free(p);
}

/* ---- writing ------------------------------------------------------------------------------------------------ */

static int begin(struct portable *p, const char *words, uint32_t iterations, struct td_error *err)
{
    int rc = new_file_create(&p->made, p->path, err);
    if (rc < 0)
        return rc;
    p->file = p->made.stream;
    memcpy(p->aad, PORTABLE_MAGIC, 8);
    if (crypto_random(p->aad + SALT_AT, 32) < 0)
        return td_fail(err, -TD_ERR_CRYPTO, "cannot seal %s: no random numbers", p->path);
    store_le32(p->aad + ITERATIONS_AT, iterations);
    portable_key(words, p->aad + SALT_AT, iterations, p->key);
    errno = 0;
    return fwrite(p->aad, PORTABLE_HEAD_SIZE, 1, p->file) == 1 ? 0 : new_file_failed(&p->made, err);
}

int portable_create(const char *path, const char *words, struct portable **out, struct td_error *err)
{
    return portable_create_with(path, words, PORTABLE_ITERATIONS, out, err);
}

int portable_create_with(const char *path, const char *words, uint32_t iterations, struct portable **out,
                         struct td_error *err)
{
    struct portable *p = make(path);
    int rc = p ? begin(p, words, iterations, err) : td_fail(err, -TD_ERR_NOMEM, "out of memory");
    if (rc < 0) {
        portable_close(p);
        return rc;
    }
    *out = p;
    return 0;
}

static int write_frame(struct portable *p, const void *data, size_t size, bool last, struct td_error *err)
{
    uint8_t tag[CRYPTO_TAG_SIZE], *frame = p->aad + PORTABLE_HEAD_SIZE;
    if (size > PORTABLE_FRAME_MAX || p->frames == UINT32_MAX)
        return td_fail(err, -TD_ERR_LIMIT, "cannot write %s: too much for one file", p->path);
    uint8_t *sealed = malloc(size + 1);
    if (!sealed)
        return td_fail(err, -TD_ERR_NOMEM, "cannot write %s: out of memory", p->path);
    store_le32(frame, (uint32_t)size);
    store_le32(frame + 4, last);
    int rc = gcm_seal(p->key, p->frames++, p->aad, sizeof p->aad, data, size, sealed, tag);
    errno = 0;
    if (rc < 0)
        td_fail(err, rc, "cannot seal %s", p->path);
    else if (fwrite(frame, FRAME_HEAD, 1, p->file) != 1 || fwrite(sealed, 1, size, p->file) != size ||
             fwrite(tag, sizeof tag, 1, p->file) != 1)
        rc = new_file_failed(&p->made, err);
    free(sealed);
    return rc;
}

int portable_write(struct portable *p, const void *data, size_t size, struct td_error *err)
{
    return write_frame(p, data, size, false, err);
}

int portable_finish(struct portable *p, struct td_error *err)
{
    int rc = write_frame(p, "", 0, true, err);
    if (rc == 0) {
        rc = new_file_finish(&p->made, err);
        p->file = NULL;
    }
    portable_close(p);
    return rc;
}

/* ---- reading: hostile bytes --------------------------------------------------------------------------------- */

static int start(struct portable *p, const char *words, struct td_error *err)
{
    p->file = fopen(p->path, "rbe");
    if (!p->file)
        return td_fail(err, -TD_ERR_IO, "cannot open %s: %s", p->path, strerror(errno));
    if (fread(p->aad, PORTABLE_HEAD_SIZE, 1, p->file) != 1 || memcmp(p->aad, PORTABLE_MAGIC, 8) != 0)
        return td_fail(err, -TD_ERR_FORMAT, "cannot read %s: it is no sealed export", p->path);
    uint32_t iterations = load_le32(p->aad + ITERATIONS_AT);
    if (iterations == 0 || iterations > PORTABLE_ITERATIONS_MAX)
        return td_fail(err, -TD_ERR_FORMAT, "cannot read %s: it is damaged", p->path);
    portable_key(words, p->aad + SALT_AT, iterations, p->key);
    return 0;
}

int portable_open(const char *path, const char *words, struct portable **out, struct td_error *err)
{
    struct portable *p = make(path);
    int rc = p ? start(p, words, err) : td_fail(err, -TD_ERR_NOMEM, "out of memory");
    if (rc < 0) {
        portable_close(p);
        return rc;
    }
    *out = p;
    return 0;
}

/* Memory for what is there, however much a damaged head promises. */
static int read_body(struct portable *p, size_t size, uint8_t **out, struct td_error *err)
{
    enum { PIECE = 4 << 20 };
    uint8_t *data = NULL;
    size_t have = 0, wanted = size + CRYPTO_TAG_SIZE;
    while (have < wanted) {
        size_t more = TD_MIN(wanted - have, (size_t)PIECE);
        uint8_t *grown = realloc(data, have + more);
        if (!grown) {
            free(data);
            return td_fail(err, -TD_ERR_NOMEM, "cannot read %s: out of memory", p->path);
        }
        data = grown;
        if (fread(data + have, 1, more, p->file) != more) {
            free(data);
            return td_fail(err, -TD_ERR_TRUNCATED, "cannot read %s: it was cut off", p->path);
        }
        have += more;
    }
    *out = data;
    return 0;
}

int portable_read(struct portable *p, uint8_t **data, size_t *size, struct td_error *err)
{
    uint8_t *frame = p->aad + PORTABLE_HEAD_SIZE, *body = NULL;
    if (p->ended)
        return 0;
    if (fread(frame, FRAME_HEAD, 1, p->file) != 1)
        return td_fail(err, -TD_ERR_TRUNCATED, "cannot read %s: it was cut off", p->path);
    *size = load_le32(frame);
    if (*size > PORTABLE_FRAME_MAX)
        return td_fail(err, -TD_ERR_FORMAT, "cannot read %s: it is damaged", p->path);
    int rc = read_body(p, *size, &body, err);
    if (rc < 0)
        return rc;
    rc = gcm_open(p->key, p->frames++, p->aad, sizeof p->aad, body, *size, body, body + *size);
    p->ended = rc == 0 && load_le32(frame + 4) == 1;
    if (rc < 0 || p->ended)
        free(body);
    if (rc < 0)
        return td_fail(err, rc, "cannot open %s: it was sealed with other words, or it is damaged", p->path);
    *data = p->ended ? NULL : body;
    return !p->ended;
}

void portable_progress(const struct portable *p, uint64_t *done, uint64_t *total)
{
    struct stat st;
    off_t at = ftello(p->file);
    *done = at > 0 ? (uint64_t)at : 0;
    *total = fstat(fileno(p->file), &st) == 0 ? (uint64_t)st.st_size : *done;
}
