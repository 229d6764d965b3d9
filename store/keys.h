/* keys: the tenants' keys and the one small file that holds them, keys.td. FORMAT.md has the bytes.
 *
 * Each tenant has a random key id (what records carry instead of its name), a random data key (seals its records) and a random chain
 * key (names its blocks). They are wrapped by the master key, so rotating the master rewrites this file alone, and dropping an entry
 * makes everything that the tenant ever stored unreadable.
 *
 * Invariant: a key is handed out only once a file that holds it is on disk, whole and synced.
 * Threads: all functions are thread-safe; look-ups never wait for the disk. */
#ifndef TANDEM_STORE_KEYS_H
#define TANDEM_STORE_KEYS_H
#include "store/io.h"
#include "store/record.h"
#include "store/store.h"

#define KEYS_TENANTS_MAX 4096
#define KEYS_FILE        "keys.td"
#define KEYS_LOCK_FILE   "keys.lock"
#define KEYS_LOCK_MS     5000 /* as long does a change wait for those of other nodes */

struct keys;
struct tenant_keys {
    char name[STORE_TENANT_MAX + 1];
    uint8_t key_id[RECORD_KEY_ID];
    uint8_t data_key[CRYPTO_KEY_SIZE], chain_key[CRYPTO_KEY_SIZE];
    uint8_t conversation_key[CRYPTO_KEY_SIZE]; /* derived from data_key: names conversations and principals */
};

/* Read directory/keys.td. A missing file is an empty set (*found = false); a wrong master key and a damaged file are errors
 * with their own line. shared: other processes change the file, too; every change is made under a lock on keys.lock, on what the file holds then. */
int keys_open(struct io *io, const char *directory, bool shared, const uint8_t master[CRYPTO_KEY_SIZE],
              bool read_only, bool *found, struct keys **out, struct td_error *err);
void keys_close(struct keys *k); /* wipes */

/* Tenants are numbered from 1 for the life of the process; 0: none. */
uint32_t keys_find(struct keys *k, const char *name);
uint32_t keys_find_id(struct keys *k, const uint8_t key_id[RECORD_KEY_ID]);
/* Make the tenant if it is new, and write the file before returning. */
int keys_ensure(struct keys *k, const char *name, uint32_t *tenant, struct td_error *err);
/* Copy of a tenant's keys, to be wiped by the caller; -TD_ERR_NOTFOUND once erased. */
int keys_get(struct keys *k, uint32_t tenant, struct tenant_keys *out);
bool keys_master_is(struct keys *k, const uint8_t master[CRYPTO_KEY_SIZE]);
int keys_rotate(struct keys *k, const uint8_t new_master[CRYPTO_KEY_SIZE], struct td_error *err);
int keys_erase(struct keys *k, uint32_t tenant, struct td_error *err);
/* [A-Za-z0-9._-]{1,STORE_TENANT_MAX} */
bool keys_name_is_valid(const char *name);

#endif
