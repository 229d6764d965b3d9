/* keys: tenants in RAM and the file keys.td. See keys.h; byte tables in FORMAT.md. */
#include "store/keys.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#define KEYS_MAGIC    "TDKEYS\0\0"
#define KEYS_VERSION  1
#define LOCK_PAUSE_MS 5
#define SLOT_COUNT    (2 * KEYS_TENANTS_MAX) /* of each hash; a power of two */

enum { /* file */
       AT_VERSION = 8,
       AT_COUNT = 12,
       AT_GENERATION = 16,
       AT_SALT = 32,
       AT_CHECK = 64,
       HEAD_SIZE = 96,
       ENTRY_SIZE = 256,
       MAC_SIZE = 32,
       TAIL_SIZE = MAC_SIZE + 4, /* MAC, CRC */
};
enum { /* entry */
       ENTRY_AT_SALT = RECORD_KEY_ID,
       ENTRY_AT_SEALED = 48,
       PLAIN_AT_NAME = 4,
       PLAIN_AT_DATA_KEY = 96,
       PLAIN_AT_CHAIN_KEY = 128,
       PLAIN_SIZE = 160,
};

struct keys {
    struct io *io;
    char directory[IO_PATH_MAX];
    uint8_t master[CRYPTO_KEY_SIZE];
    bool read_only, shared;
    uint64_t generation;
    pthread_mutex_t update; /* held while the file changes; taken before `lock` */
    pthread_rwlock_t lock;  /* guards what follows */
    uint32_t count;         /* tenants ever seen by this process, the erased ones included */
    struct tenant_keys *tenants[KEYS_TENANTS_MAX + 1]; /* [1..count]; NULL: erased */
    uint32_t by_name[SLOT_COUNT], by_id[SLOT_COUNT];   /* open addressing; erased tenants keep their slots */
};

bool keys_name_is_valid(const char *name)
{
    size_t size = strnlen(name, STORE_TENANT_MAX + 1);
    if (size == 0 || size > STORE_TENANT_MAX)
        return false;
    return strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") == size;
}

/* ---- look-up ---------------------------------------------------------------------------------------------- */

static uint32_t name_hash(const char *name)
{
    uint32_t hash = 2166136261u;
    for (; *name; name++)
        hash = (hash ^ (uint8_t)*name) * 16777619u;
    return hash;
}

/* Caller holds `lock`. */
static uint32_t find_name(const struct keys *k, const char *name)
{
    for (uint32_t at = name_hash(name);; at++) {
        uint32_t tenant = k->by_name[at % SLOT_COUNT];
        if (tenant == 0 || (k->tenants[tenant] && strcmp(k->tenants[tenant]->name, name) == 0))
            return tenant;
    }
}

static uint32_t find_id(const struct keys *k, const uint8_t key_id[RECORD_KEY_ID])
{
    for (uint32_t at = load_le32(key_id);; at++) {
        uint32_t tenant = k->by_id[at % SLOT_COUNT];
        if (tenant == 0 ||
            (k->tenants[tenant] && memcmp(k->tenants[tenant]->key_id, key_id, RECORD_KEY_ID) == 0))
            return tenant;
    }
}

/* Take ownership of t. Caller holds `lock` for writing, or is the only one. Returns the number. */
static uint32_t add_tenant(struct keys *k, struct tenant_keys *t)
{
    uint32_t tenant = ++k->count;
    k->tenants[tenant] = t;
    uint32_t at = name_hash(t->name);
    while (k->by_name[at % SLOT_COUNT] != 0)
        at++;
    k->by_name[at % SLOT_COUNT] = tenant;
    at = load_le32(t->key_id);
    while (k->by_id[at % SLOT_COUNT] != 0)
        at++;
    k->by_id[at % SLOT_COUNT] = tenant;
    return tenant;
}

uint32_t keys_find(struct keys *k, const char *name)
{
    pthread_rwlock_rdlock(&k->lock);
    uint32_t tenant = find_name(k, name);
    pthread_rwlock_unlock(&k->lock);
    return tenant;
}

uint32_t keys_find_id(struct keys *k, const uint8_t key_id[RECORD_KEY_ID])
{
    pthread_rwlock_rdlock(&k->lock);
    uint32_t tenant = find_id(k, key_id);
    pthread_rwlock_unlock(&k->lock);
    return tenant;
}

int keys_get(struct keys *k, uint32_t tenant, struct tenant_keys *out)
{
    pthread_rwlock_rdlock(&k->lock);
    bool found = tenant > 0 && tenant <= k->count && k->tenants[tenant];
    if (found)
        *out = *k->tenants[tenant];
    pthread_rwlock_unlock(&k->lock);
    return found ? 0 : -TD_ERR_NOTFOUND;
}

/* ---- file ------------------------------------------------------------------------------------------------- */

static void derive(const uint8_t master[CRYPTO_KEY_SIZE], const uint8_t salt[RECORD_SALT], const char *label,
                   const uint8_t *id, uint8_t out[CRYPTO_KEY_SIZE])
{
    uint8_t info[64];
    size_t size = strlen(label);
    memcpy(info, label, size);
    if (id) {
        memcpy(info + size, id, RECORD_KEY_ID);
        size += RECORD_KEY_ID;
    }
    hkdf_sha256(master, salt, RECORD_SALT, info, size, out);
}

static void file_mac(const struct keys *k, const uint8_t *file, size_t size, uint8_t out[MAC_SIZE])
{
    uint8_t key[CRYPTO_KEY_SIZE];
    derive(k->master, file + AT_SALT, "tandem-keys-mac", NULL, key);
    hmac_sha256(key, &(struct span){file, size}, 1, out);
    crypto_wipe(key, sizeof key);
}

static int entry_write(const struct keys *k, const struct tenant_keys *t, uint8_t out[ENTRY_SIZE])
{
    uint8_t plain[PLAIN_SIZE] = {0}, wrap[CRYPTO_KEY_SIZE];
    memset(out, 0, ENTRY_SIZE);
    memcpy(out, t->key_id, RECORD_KEY_ID);
    int rc = crypto_random(out + ENTRY_AT_SALT, RECORD_SALT);
    if (rc < 0)
        return rc;
    store_le32(plain, (uint32_t)strlen(t->name));
    memcpy(plain + PLAIN_AT_NAME, t->name, strlen(t->name));
    memcpy(plain + PLAIN_AT_DATA_KEY, t->data_key, CRYPTO_KEY_SIZE);
    memcpy(plain + PLAIN_AT_CHAIN_KEY, t->chain_key, CRYPTO_KEY_SIZE);
    derive(k->master, out + ENTRY_AT_SALT, "tandem-keys-wrap", t->key_id, wrap);
    uint8_t *sealed = out + ENTRY_AT_SEALED;
    rc = gcm_seal(wrap, 0, t->key_id, RECORD_KEY_ID, plain, PLAIN_SIZE, sealed, sealed + PLAIN_SIZE);
    crypto_wipe(plain, sizeof plain);
    crypto_wipe(wrap, sizeof wrap);
    return rc;
}

static void tenant_derive(struct tenant_keys *t)
{
    static const char label[] = "tandem-conversation-id";
    hkdf_sha256(t->data_key, NULL, 0, label, sizeof label - 1, t->conversation_key);
}

static int entry_read(const struct keys *k, const uint8_t in[ENTRY_SIZE], struct tenant_keys *t)
{
    uint8_t plain[PLAIN_SIZE], wrap[CRYPTO_KEY_SIZE];
    const uint8_t *sealed = in + ENTRY_AT_SEALED;
    derive(k->master, in + ENTRY_AT_SALT, "tandem-keys-wrap", in, wrap);
    int rc = gcm_open(wrap, 0, in, RECORD_KEY_ID, sealed, PLAIN_SIZE, plain, sealed + PLAIN_SIZE);
    crypto_wipe(wrap, sizeof wrap);
    if (rc < 0)
        return rc;
    memset(t, 0, sizeof *t);
    uint32_t name_size = load_le32(plain);
    if (name_size <= STORE_TENANT_MAX)
        memcpy(t->name, plain + PLAIN_AT_NAME, name_size);
    memcpy(t->key_id, in, RECORD_KEY_ID);
    memcpy(t->data_key, plain + PLAIN_AT_DATA_KEY, CRYPTO_KEY_SIZE);
    memcpy(t->chain_key, plain + PLAIN_AT_CHAIN_KEY, CRYPTO_KEY_SIZE);
    tenant_derive(t);
    crypto_wipe(plain, sizeof plain);
    return keys_name_is_valid(t->name) ? 0 : -TD_ERR_FORMAT;
}

/* Write all tenants but `without`, plus `added` (may be NULL). Caller holds `update`, so nobody else changes the set. */
static int file_save(struct keys *k, const struct tenant_keys *added, uint32_t without)
{
    uint8_t *file = calloc(1, HEAD_SIZE + (size_t)ENTRY_SIZE * (k->count + 1) + TAIL_SIZE);
    if (!file)
        return -TD_ERR_NOMEM;
    uint32_t written = 0;
    int rc = crypto_random(file + AT_SALT, RECORD_SALT);
    for (uint32_t i = 1; i <= k->count + 1 && rc == 0; i++) {
        const struct tenant_keys *t = i > k->count ? added : k->tenants[i];
        if (t && i != without)
            rc = entry_write(k, t, file + HEAD_SIZE + (size_t)ENTRY_SIZE * written++);
    }
    if (rc == 0) {
        size_t size = HEAD_SIZE + (size_t)ENTRY_SIZE * written;
        memcpy(file, KEYS_MAGIC, 8);
        store_le32(file + AT_VERSION, KEYS_VERSION);
        store_le32(file + AT_COUNT, written);
        store_le64(file + AT_GENERATION, k->generation + 1);
        derive(k->master, file + AT_SALT, "tandem-keys-check", NULL, file + AT_CHECK);
        file_mac(k, file, size, file + size);
        store_le32(file + size + MAC_SIZE, crc32c(0, file, size + MAC_SIZE));
        rc = io_replace_file(k->io, k->directory, KEYS_FILE, file, size + TAIL_SIZE);
    }
    if (rc == 0)
        k->generation++;
    free(file);
    return rc;
}

static int file_damaged(const struct keys *k, int code, struct td_error *err)
{
    return td_fail(err, code, "cannot read %s/" KEYS_FILE ": it is damaged; restore it from a backup",
                   k->directory);
}

static int file_load(struct keys *k, const uint8_t *file, size_t size, struct td_error *err)
{
    if (size < HEAD_SIZE + TAIL_SIZE || memcmp(file, KEYS_MAGIC, 8) != 0)
        return file_damaged(k, -TD_ERR_FORMAT, err);
    if (load_le32(file + AT_VERSION) != KEYS_VERSION)
        return td_fail(err, -TD_ERR_VERSION,
                       "cannot read %s/" KEYS_FILE ": it is of version %u, this program reads version %d",
                       k->directory, load_le32(file + AT_VERSION), KEYS_VERSION);
    uint32_t count = load_le32(file + AT_COUNT);
    size_t body = size - TAIL_SIZE;
    if (count > KEYS_TENANTS_MAX || body != HEAD_SIZE + (size_t)ENTRY_SIZE * count ||
        crc32c(0, file, size - 4) != load_le32(file + size - 4))
        return file_damaged(k, -TD_ERR_CHECKSUM, err);
    uint8_t check[CRYPTO_KEY_SIZE], mac[MAC_SIZE];
    derive(k->master, file + AT_SALT, "tandem-keys-check", NULL, check);
    if (!crypto_equal(check, file + AT_CHECK, sizeof check))
        return td_fail(err, -TD_ERR_AUTH,
                       "cannot open %s/" KEYS_FILE ": the master key is not the one that it was written with",
                       k->directory);
    file_mac(k, file, body, mac);
    if (!crypto_equal(mac, file + body, sizeof mac))
        return file_damaged(k, -TD_ERR_CRYPTO, err);
    k->generation = load_le64(file + AT_GENERATION);
    for (uint32_t i = 0; i < count; i++) {
        struct tenant_keys *t = malloc(sizeof *t);
        int rc = t ? entry_read(k, file + HEAD_SIZE + (size_t)ENTRY_SIZE * i, t) : -TD_ERR_NOMEM;
        if (rc < 0) {
            free(t);
            return file_damaged(k, rc, err);
        }
        add_tenant(k, t);
    }
    return 0;
}

int keys_open(struct io *io, const char *directory, bool shared, const uint8_t master[CRYPTO_KEY_SIZE],
              bool read_only, bool *found, struct keys **out, struct td_error *err)
{
    char path[IO_PATH_MAX];
    struct keys *k = calloc(1, sizeof *k);
    if (!k || !io_path(k->directory, directory, "") || !io_path(path, directory, KEYS_FILE)) {
        free(k);
        return td_fail(err, -TD_ERR_NOMEM, "cannot open the keys of store %s: out of memory", directory);
    }
    k->directory[strlen(directory)] = '\0';
    k->io = io;
    k->read_only = read_only;
    k->shared = shared;
    memcpy(k->master, master, sizeof k->master);
    pthread_mutex_init(&k->update, NULL);
    pthread_rwlock_init(&k->lock, NULL);

    uint8_t *file = NULL;
    size_t size = 0, size_max = HEAD_SIZE + (size_t)ENTRY_SIZE * KEYS_TENANTS_MAX + TAIL_SIZE;
    int rc = io_read_file(io, path, size_max, &file, &size);
    *found = rc != -TD_ERR_NOTFOUND;
    if (rc == 0)
        rc = file_load(k, file, size, err);
    else if (rc == -TD_ERR_NOTFOUND)
        rc = 0;
    else
        td_fail(err, rc, "cannot read %s: %s", path, td_status_text(rc));
    free(file);
    if (rc < 0) {
        keys_close(k);
        return rc;
    }
    *out = k;
    return 0;
}

static void tenant_free(struct tenant_keys *t)
{
    if (t)
        crypto_wipe(t, sizeof *t);
    free(t);
}

void keys_close(struct keys *k)
{
    if (!k)
        return;
    for (uint32_t i = 1; i <= k->count; i++)
        tenant_free(k->tenants[i]);
    crypto_wipe(k->master, sizeof k->master);
    pthread_rwlock_destroy(&k->lock);
    pthread_mutex_destroy(&k->update);
    free(k);
}

/* ---- sharing ---------------------------------------------------------------------------------------------- */

/* Take the lock of a shared directory: a descriptor to be closed, -1 where there is nothing to lock, or a code below that. */
static int lock_file(struct keys *k, int *fd)
{
    char path[IO_PATH_MAX];
    pid_t holder;
    *fd = -1;
    if (!k->shared)
        return 0;
    if (!io_path(path, k->directory, KEYS_LOCK_FILE))
        return -TD_ERR_ARG;
    for (unsigned waited_ms = 0;; waited_ms += LOCK_PAUSE_MS) {
        *fd = k->io->lock(k->io, path, false, &holder);
        if (*fd >= 0)
            return 0;
        if (*fd != -EWOULDBLOCK || waited_ms >= KEYS_LOCK_MS)
            return *fd == -EWOULDBLOCK ? -TD_ERR_BUSY : io_status(*fd);
        nanosleep(&(struct timespec){.tv_nsec = LOCK_PAUSE_MS * 1000000L}, NULL);
    }
}

static void unlock_file(struct keys *k, int fd)
{
    if (fd >= 0)
        k->io->close(k->io, fd);
}

/* Make the set what the file says: others may have erased tenants and made some. */
static int take_over(struct keys *k, struct keys *file)
{
    for (uint32_t i = 1; i <= k->count; i++) {
        struct tenant_keys *t = k->tenants[i];
        if (!t || find_id(file, t->key_id))
            continue;
        tenant_free(t);
        k->tenants[i] = NULL;
    }
    for (uint32_t i = 1; i <= file->count; i++)
        if (!find_id(k, file->tenants[i]->key_id)) {
            if (k->count == KEYS_TENANTS_MAX)
                return -TD_ERR_LIMIT;
            add_tenant(k, file->tenants[i]);
            file->tenants[i] = NULL;
        }
    k->generation = file->generation;
    return 0;
}

/* With the file's lock and `update`. */
static int reload(struct keys *k, struct td_error *err)
{
    struct keys *file = NULL;
    bool found;
    if (!k->shared)
        return 0;
    int rc = keys_open(k->io, k->directory, false, k->master, true, &found, &file, err);
    if (rc < 0)
        return rc;
    if (found) {
        pthread_rwlock_wrlock(&k->lock);
        rc = take_over(k, file);
        pthread_rwlock_unlock(&k->lock);
    }
    keys_close(file);
    return rc;
}

/* Before any change: `update`, the file's lock, and the file as it is now. */
static int begin_change(struct keys *k, int *fd, struct td_error *err)
{
    pthread_mutex_lock(&k->update);
    int rc = lock_file(k, fd);
    if (rc < 0)
        td_fail(err, rc, "cannot change %s/" KEYS_FILE ": %s", k->directory, td_status_text(rc));
    rc = rc < 0 ? rc : reload(k, err);
    if (rc < 0) {
        unlock_file(k, *fd);
        pthread_mutex_unlock(&k->update);
    }
    return rc;
}

static void end_change(struct keys *k, int fd)
{
    unlock_file(k, fd);
    pthread_mutex_unlock(&k->update);
}

/* ---- changes ---------------------------------------------------------------------------------------------- */

/* Caller holds `update`. */
static int create_tenant(struct keys *k, const char *name, uint32_t *tenant, struct td_error *err)
{
    if (k->count >= KEYS_TENANTS_MAX)
        return td_fail(err, -TD_ERR_LIMIT, "cannot make keys for a new tenant: the store has its limit of %d",
                       KEYS_TENANTS_MAX);
    struct tenant_keys *t = calloc(1, sizeof *t);
    if (!t)
        return td_fail(err, -TD_ERR_NOMEM, "cannot make keys for a new tenant: out of memory");
    strcpy(t->name, name); /* the caller has checked its length */
    int rc = crypto_random(t->key_id, sizeof t->key_id);
    rc = rc < 0 ? rc : crypto_random(t->data_key, sizeof t->data_key);
    rc = rc < 0 ? rc : crypto_random(t->chain_key, sizeof t->chain_key);
    rc = rc < 0 ? rc : file_save(k, t, 0);
    if (rc < 0) {
        tenant_free(t);
        return td_fail(err, rc, "cannot write %s/" KEYS_FILE ": %s; check space and permissions",
                       k->directory, td_status_text(rc));
    }
    tenant_derive(t);
    pthread_rwlock_wrlock(&k->lock);
    *tenant = add_tenant(k, t);
    pthread_rwlock_unlock(&k->lock);
    return 0;
}

int keys_ensure(struct keys *k, const char *name, uint32_t *tenant, struct td_error *err)
{
    if (!keys_name_is_valid(name))
        return td_fail(err, -TD_ERR_ARG, "a tenant's name has 1 to %d characters of A-Z a-z 0-9 . _ -",
                       STORE_TENANT_MAX);
    *tenant = keys_find(k, name);
    if (*tenant)
        return 0;
    if (k->read_only)
        return td_fail(err, -TD_ERR_NOTFOUND, "the store has no such tenant");
    int fd, rc = begin_change(k, &fd, err);
    if (rc < 0)
        return rc;
    *tenant = keys_find(k, name); /* somebody may have been faster */
    rc = *tenant ? 0 : create_tenant(k, name, tenant, err);
    end_change(k, fd);
    return rc;
}

int keys_erase(struct keys *k, uint32_t tenant, struct td_error *err)
{
    int fd, rc = begin_change(k, &fd, err);
    if (rc < 0)
        return rc;
    rc = tenant > 0 && tenant <= k->count && k->tenants[tenant] ? file_save(k, NULL, tenant)
                                                                : -TD_ERR_NOTFOUND;
    if (rc == 0) {
        pthread_rwlock_wrlock(&k->lock);
        tenant_free(k->tenants[tenant]);
        k->tenants[tenant] = NULL;
        pthread_rwlock_unlock(&k->lock);
    } else {
        td_fail(err, rc, "cannot erase a tenant's keys from %s/" KEYS_FILE ": %s", k->directory,
                td_status_text(rc));
    }
    end_change(k, fd);
    return rc;
}

/* Which key the file is under decides: what failed may have been the sync of a directory that names the new file already. */
static bool file_is_under(const struct keys *k, const uint8_t master[CRYPTO_KEY_SIZE])
{
    struct keys *file = NULL;
    bool found;
    if (keys_open(k->io, k->directory, false, master, true, &found, &file, NULL) < 0)
        return false;
    keys_close(file);
    return found;
}

bool keys_master_is(struct keys *k, const uint8_t master[CRYPTO_KEY_SIZE])
{
    pthread_mutex_lock(&k->update);
    bool same = crypto_equal(k->master, master, sizeof k->master);
    pthread_mutex_unlock(&k->update);
    return same;
}

int keys_rotate(struct keys *k, const uint8_t new_master[CRYPTO_KEY_SIZE], struct td_error *err)
{
    uint8_t old[CRYPTO_KEY_SIZE];
    int fd, rc = begin_change(k, &fd, err);
    if (rc < 0)
        return rc;
    memcpy(old, k->master, sizeof old);
    memcpy(k->master, new_master, sizeof k->master);
    rc = file_save(k, NULL, 0);
    if (rc < 0 && !file_is_under(k, new_master))
        memcpy(k->master, old, sizeof old);
    end_change(k, fd);
    crypto_wipe(old, sizeof old);
    return rc < 0 ? td_fail(err, rc, "cannot rewrite %s/" KEYS_FILE " with the new master key: %s",
                            k->directory, td_status_text(rc))
                  : 0;
}
