/* tenant_keys: see tenant_keys.h. A list: tenants are few, and one is looked for once a connection or request. */
#include "cloud/tenant_keys.h"
#include <pthread.h>
#include <stdlib.h>

struct tenant_key {
    struct tenant_key *next;
    char tenant[STORE_TENANT_MAX + 1];
    uint8_t key[CRYPTO_KEY_SIZE];
};

struct tenant_keys {
    struct store *store;
    pthread_mutex_t lock; /* guards the list */
    struct tenant_key *first;
    uint64_t forgotten; /* tenants: what was read before one went may be its old key, and is not remembered */
};

struct tenant_keys *tenant_keys_create(struct store *store)
{
    struct tenant_keys *k = calloc(1, sizeof *k);
    if (!k)
        return NULL;
    k->store = store;
    pthread_mutex_init(&k->lock, NULL);
    return k;
}

void tenant_keys_destroy(struct tenant_keys *k)
{
    if (!k)
        return;
    while (k->first) {
        struct tenant_key *next = k->first->next;
        crypto_wipe(k->first, sizeof *k->first);
        free(k->first);
        k->first = next;
    }
    pthread_mutex_destroy(&k->lock);
    free(k);
}

static bool find(struct tenant_keys *k, const char *tenant, uint8_t out[CRYPTO_KEY_SIZE], uint64_t *forgotten)
{
    pthread_mutex_lock(&k->lock);
    *forgotten = k->forgotten;
    struct tenant_key *t = k->first;
    while (t && strcmp(t->tenant, tenant) != 0)
        t = t->next;
    if (t)
        memcpy(out, t->key, CRYPTO_KEY_SIZE);
    pthread_mutex_unlock(&k->lock);
    return t != NULL;
}

/* Two threads may both ask the store and both remember the answer: it is the same one. */
int tenant_keys_get(struct tenant_keys *k, const char *tenant, uint8_t out[CRYPTO_KEY_SIZE],
                    struct td_error *err)
{
    if (strlen(tenant) > STORE_TENANT_MAX)
        return td_fail(err, -TD_ERR_ARG, "a tenant's name has more than %d characters", STORE_TENANT_MAX);
    uint64_t forgotten;
    if (find(k, tenant, out, &forgotten))
        return 0;
    int rc = store_chain_key(k->store, tenant, out, err);
    if (rc < 0)
        return rc;
    struct tenant_key *t = calloc(1, sizeof *t);
    if (!t)
        return 0; /* known, only not remembered */
    memcpy(t->tenant, tenant, strlen(tenant) + 1);
    memcpy(t->key, out, CRYPTO_KEY_SIZE);
    pthread_mutex_lock(&k->lock);
    bool keep = forgotten == k->forgotten;
    if (keep) {
        t->next = k->first;
        k->first = t;
    }
    pthread_mutex_unlock(&k->lock);
    if (!keep) {
        crypto_wipe(t, sizeof *t);
        free(t);
    }
    return 0;
}

void tenant_keys_forget(struct tenant_keys *k, const char *tenant)
{
    pthread_mutex_lock(&k->lock);
    k->forgotten++;
    for (struct tenant_key **at = &k->first; *at;) {
        struct tenant_key *t = *at;
        if (strcmp(t->tenant, tenant) != 0) {
            at = &t->next;
            continue;
        }
        *at = t->next;
        crypto_wipe(t, sizeof *t);
        free(t);
    }
    pthread_mutex_unlock(&k->lock);
}
