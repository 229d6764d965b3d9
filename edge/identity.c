/* identity: see identity.h.
 *
 *   offset  size
 *        0     4  "TDID"
 *        4    32  salt: the file's key is HKDF(the store's chain key for this device, salt, "tandem-identity" ‖ 0 ‖ the model's fingerprint)
 *       36   ...  struct below, fields in order, integers u32le, sealed with AES-256-GCM, the first 36 bytes authenticated with it
 *      ...    16  tag
 *
 * Written beside its name and renamed: a reader sees one whole file or the other. It is not synced: it can be had again from the cloud. */
#include "edge/identity.h"
#include "edge/edge_turn.h"
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#define HEAD_SIZE 36u
#define NAME_SIZE (LIMIT_NAME_SIZE + 1u)
#define BODY_SIZE (2 * NAME_SIZE + CRYPTO_KEY_SIZE + 12)
#define FILE_SIZE (HEAD_SIZE + BODY_SIZE + CRYPTO_TAG_SIZE)

static const uint8_t magic[4] = {'T', 'D', 'I', 'D'};

static int file_key(struct store *store, const uint8_t *salt, const uint8_t *fingerprint,
                    uint8_t key[CRYPTO_KEY_SIZE])
{
    static const char label[] = "tandem-identity"; /* with its NUL */
    uint8_t chain_key[CRYPTO_KEY_SIZE], info[sizeof label + TD_HASH_SIZE];
    struct td_error err;
    memcpy(info, label, sizeof label);
    memcpy(info + sizeof label, fingerprint, TD_HASH_SIZE);
    int rc = store_chain_key(store, EDGE_TENANT, chain_key, &err);
    if (rc == 0)
        hkdf_sha256(chain_key, salt, 32, info, sizeof info, key);
    crypto_wipe(chain_key, sizeof chain_key);
    return rc;
}

static void pack(const struct edge_identity *i, uint8_t body[BODY_SIZE])
{
    uint8_t *at = body + 2 * NAME_SIZE + CRYPTO_KEY_SIZE;
    memset(body, 0, BODY_SIZE);
    memcpy(body, i->tenant, strlen(i->tenant));
    memcpy(body + NAME_SIZE, i->principal, strlen(i->principal));
    memcpy(body + 2 * NAME_SIZE, i->principal_key, CRYPTO_KEY_SIZE);
    store_le32(at, i->context_max);
    store_le32(at + 4, i->codec_mask);
    store_le32(at + 8, i->hidden_mask);
}

static void unpack(const uint8_t body[BODY_SIZE], struct edge_identity *i)
{
    const uint8_t *at = body + 2 * NAME_SIZE + CRYPTO_KEY_SIZE;
    memcpy(i->tenant, body, NAME_SIZE);
    memcpy(i->principal, body + NAME_SIZE, NAME_SIZE);
    i->tenant[NAME_SIZE - 1] = i->principal[NAME_SIZE - 1] = '\0';
    memcpy(i->principal_key, body + 2 * NAME_SIZE, CRYPTO_KEY_SIZE);
    i->context_max = load_le32(at);
    i->codec_mask = load_le32(at + 4);
    i->hidden_mask = load_le32(at + 8);
}

int identity_load(struct store *store, const char *path, const uint8_t fingerprint[TD_HASH_SIZE],
                  struct edge_identity *out)
{
    uint8_t file[FILE_SIZE + 1], key[CRYPTO_KEY_SIZE];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -TD_ERR_NOTFOUND;
    ssize_t size = read(fd, file, sizeof file);
    close(fd);
    if (size != FILE_SIZE || memcmp(file, magic, sizeof magic) != 0)
        return -TD_ERR_NOTFOUND;
    uint8_t *body = file + HEAD_SIZE;
    int rc = file_key(store, file + sizeof magic, fingerprint, key);
    if (rc == 0 && gcm_open(key, 0, file, HEAD_SIZE, body, BODY_SIZE, body, body + BODY_SIZE) < 0)
        rc = -TD_ERR_NOTFOUND;
    if (rc == 0)
        unpack(body, out);
    crypto_wipe(file, sizeof file);
    crypto_wipe(key, sizeof key);
    return rc;
}

static int write_file(const char *path, const uint8_t file[FILE_SIZE])
{
    char temporary[4096];
    int n = snprintf(temporary, sizeof temporary, "%s.new", path);
    if (n < 0 || (size_t)n >= sizeof temporary)
        return -TD_ERR_IO;
    unlink(temporary);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return -TD_ERR_IO;
    bool good = write(fd, file, FILE_SIZE) == (ssize_t)FILE_SIZE;
    good = close(fd) == 0 && good;
    if (good && rename(temporary, path) == 0)
        return 0;
    unlink(temporary);
    return -TD_ERR_IO;
}

int identity_save(struct store *store, const char *path, const uint8_t fingerprint[TD_HASH_SIZE],
                  const struct edge_identity *identity)
{
    uint8_t file[FILE_SIZE], key[CRYPTO_KEY_SIZE];
    uint8_t *body = file + HEAD_SIZE;
    memcpy(file, magic, sizeof magic);
    int rc = crypto_random(file + sizeof magic, 32);
    if (rc == 0)
        rc = file_key(store, file + sizeof magic, fingerprint, key);
    if (rc == 0) {
        pack(identity, body);
        rc = gcm_seal(key, 0, file, HEAD_SIZE, body, BODY_SIZE, body, body + BODY_SIZE);
    }
    if (rc == 0)
        rc = write_file(path, file);
    crypto_wipe(file, sizeof file);
    crypto_wipe(key, sizeof key);
    return rc;
}
