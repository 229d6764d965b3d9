/* master_key: the key that wraps keys.td, from the environment or from a file that only its owner may read. */
#include "shared/config.h"
#include "store/io.h"
#include "store/store.h"
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#define MASTER_KEY_VARIABLE "TANDEM_STORE_KEY"
#define HEX_SIZE            (2 * CRYPTO_KEY_SIZE)

static int decode(const char *hex, const char *source, uint8_t out[CRYPTO_KEY_SIZE], struct td_error *err)
{
    if (strlen(hex) != HEX_SIZE || hex_decode(hex, out, CRYPTO_KEY_SIZE) < 0)
        return td_fail(err, -TD_ERR_FORMAT, "cannot use the master key in %s: it must be %d hex digits",
                       source, HEX_SIZE);
    return 0;
}

static int create_file(const char *path, struct td_error *err)
{
    char directory[IO_PATH_MAX], text[HEX_SIZE + 2];
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    size_t length = slash ? (size_t)(slash - path) : 0;
    if (length >= sizeof directory)
        return td_fail(err, -TD_ERR_ARG, "cannot make the master key file: its path is too long");
    memcpy(directory, path, length);
    strcpy(directory + length, length ? "" : slash ? "/" : ".");

    uint8_t key[CRYPTO_KEY_SIZE];
    int rc = crypto_random(key, sizeof key);
    if (rc == 0) {
        hex_encode(key, sizeof key, text);
        text[HEX_SIZE] = '\n';
        rc = io_replace_file(&io_posix, directory, name, text, HEX_SIZE + 1);
    }
    crypto_wipe(key, sizeof key);
    crypto_wipe(text, sizeof text);
    return rc < 0 ? td_fail(err, rc, "cannot make the master key file %s: %s", path, td_status_text(rc)) : 0;
}

int store_master_key_load(const char *path, bool create, uint8_t out[CRYPTO_KEY_SIZE], struct td_error *err)
{
    const char *variable = getenv(MASTER_KEY_VARIABLE);
    if (variable && *variable)
        return decode(variable, "the environment variable " MASTER_KEY_VARIABLE, out, err);
    if (!path || !*path)
        return td_fail(err, -TD_ERR_NOTFOUND,
                       "no master key: set " MASTER_KEY_VARIABLE " or name a key file");
    int fd = io_posix.open(&io_posix, path, O_RDONLY);
    if (fd >= 0) {
        io_posix.close(&io_posix, fd);
    } else if (create && io_status(fd) == -TD_ERR_NOTFOUND) {
        int rc = create_file(path, err);
        if (rc < 0)
            return rc;
    }
    char text[HEX_SIZE + 2];
    int rc = config_read_secret(path, text, sizeof text, err);
    if (rc == 0)
        rc = decode(text, path, out, err);
    crypto_wipe(text, sizeof text);
    return rc;
}
