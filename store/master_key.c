/* master_key: the key that wraps keys.td, from the environment or from a file that only its owner may read. */
#include "shared/config.h"
#include "store/store_internal.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MASTER_KEY_VARIABLE "TANDEM_STORE_KEY"
#define HEX_SIZE            (2 * CRYPTO_KEY_SIZE)

static int decode(const char *hex, const char *source, uint8_t out[CRYPTO_KEY_SIZE], struct td_error *err)
{
    if (strlen(hex) != HEX_SIZE || hex_decode(hex, out, CRYPTO_KEY_SIZE) < 0)
        return td_fail(err, -TD_ERR_FORMAT, "cannot use the master key in %s: it must be %d hex digits",
                       source, HEX_SIZE);
    return 0;
}

static int write_file(const char *path, const uint8_t key[CRYPTO_KEY_SIZE], struct td_error *err)
{
    char directory[IO_PATH_MAX], text[HEX_SIZE + 2];
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    size_t length = slash ? (size_t)(slash - path) : 0;
    if (length >= sizeof directory)
        return td_fail(err, -TD_ERR_ARG, "cannot make the master key file: its path is too long");
    memcpy(directory, path, length);
    strcpy(directory + length, length ? "" : slash ? "/" : ".");

    hex_encode(key, CRYPTO_KEY_SIZE, text);
    text[HEX_SIZE] = '\n';
    errno = 0;
    int rc = io_replace_file(&io_posix, directory, name, text, HEX_SIZE + 1), why = errno;
    crypto_wipe(text, sizeof text);
    return rc < 0 ? td_fail(err, rc, "cannot make the master key file %s: %s", path,
                            rc == -TD_ERR_IO && why ? strerror(why) : td_status_text(rc))
                  : 0;
}

static int create_file(const char *path, struct td_error *err)
{
    uint8_t key[CRYPTO_KEY_SIZE];
    int rc = crypto_random(key, sizeof key);
    rc = rc < 0 ? td_fail(err, rc, "cannot make the master key file %s: no random numbers", path)
                : write_file(path, key, err);
    crypto_wipe(key, sizeof key);
    return rc;
}

static int read_file(const char *path, uint8_t out[CRYPTO_KEY_SIZE], struct td_error *err)
{
    char text[HEX_SIZE + 2];
    int rc = config_read_secret(path, text, sizeof text, err);
    if (rc == 0)
        rc = decode(text, path, out, err);
    crypto_wipe(text, sizeof text);
    return rc;
}

int store_master_key_load(const char *path, bool create, uint8_t out[CRYPTO_KEY_SIZE], struct td_error *err)
{
    const char *variable = getenv(MASTER_KEY_VARIABLE);
    if (variable && *variable)
        return decode(variable, "the environment variable " MASTER_KEY_VARIABLE, out, err);
    if (!path || !*path)
        return td_fail(err, -TD_ERR_NOTFOUND,
                       "no master key: set " MASTER_KEY_VARIABLE " or name a key file with --store-key-file");
    int fd = io_posix.open(&io_posix, path, O_RDONLY);
    if (fd >= 0) {
        io_posix.close(&io_posix, fd);
    } else if (create && io_status(fd) == -TD_ERR_NOTFOUND) {
        int rc = create_file(path, err);
        if (rc < 0)
            return rc;
    }
    return read_file(path, out, err);
}

/* ---- rotation --------------------------------------------------------------------------------------------- */

static bool next_path(const char *path, char out[IO_PATH_MAX])
{
    int length = snprintf(out, IO_PATH_MAX, "%s.new", path);
    return length > 0 && length < IO_PATH_MAX;
}

/* `path`.new becomes `path`. */
static int take_over(const char *next, const char *path, struct td_error *err)
{
    char directory[IO_PATH_MAX];
    int rc = rename(next, path) < 0 ? -errno : 0;
    snprintf(directory, sizeof directory, "%s", path);
    char *slash = strrchr(directory, '/');
    if (slash)
        slash[slash == directory] = '\0';
    rc = rc < 0 ? rc : io_posix.sync_directory(&io_posix, slash ? directory : ".");
    return rc < 0
               ? td_fail(
                     err, io_status(rc),
                     "the new master key is in use and lies in %s; it could not be moved to %s (%s): move it",
                     next, path, strerror(-rc))
               : 0;
}

int master_key_finish_rotation(const char *path, uint8_t key[CRYPTO_KEY_SIZE],
                               int (*fits)(void *ctx, const uint8_t key[CRYPTO_KEY_SIZE]), void *ctx,
                               struct td_error *err)
{
    char next[IO_PATH_MAX];
    uint8_t candidate[CRYPTO_KEY_SIZE];
    if (!path || !next_path(path, next) || access(next, F_OK) != 0)
        return -TD_ERR_NOTFOUND;
    int rc = read_file(next, candidate, err);
    rc = rc < 0 ? rc : fits(ctx, candidate);
    rc = rc < 0 ? rc : take_over(next, path, err);
    if (rc == 0)
        memcpy(key, candidate, CRYPTO_KEY_SIZE);
    crypto_wipe(candidate, sizeof candidate);
    return rc;
}

/* A rotation that was cut off when `path`.new was in use already: it must not be written over. */
static int finish_earlier(struct store *s, const char *next, const char *path, struct td_error *err)
{
    uint8_t key[CRYPTO_KEY_SIZE];
    if (access(next, F_OK) != 0 || read_file(next, key, NULL) < 0)
        return 0;
    bool in_use = keys_master_is(s->keys, key);
    crypto_wipe(key, sizeof key);
    return in_use ? take_over(next, path, err) : 0;
}

int store_rotate_master_file(struct store *s, const char *path, struct td_error *err)
{
    char next[IO_PATH_MAX];
    uint8_t key[CRYPTO_KEY_SIZE];
    if (!next_path(path, next))
        return td_fail(err, -TD_ERR_ARG, "cannot rotate the master key: the path of its file is too long");
    int rc = finish_earlier(s, next, path, err);
    rc = rc < 0 ? rc : create_file(next, err);
    rc = rc < 0 ? rc : read_file(next, key, err);
    if (rc == 0) {
        rc = store_rotate_master(s, key, err);
        if (rc == 0)
            rc = take_over(next, path, err);
        else if (!keys_master_is(s->keys,
                                 key)) /* else either key may be the one after a loss of power: both stay */
            unlink(next);
    }
    crypto_wipe(key, sizeof key);
    return rc;
}
