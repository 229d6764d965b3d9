/* conv_lost: conversations whose last turn could not be stored, because the disk was full or failed. Who goes on with one by its name, with the new message
 * alone, would build on the turn before without knowing; so that is refused until something that its client knows to be whole is stored.
 *
 * In memory alone: what cannot be written cannot be noted on the disk either, and the reply itself has said that its turn was not kept. Bounded: the note
 * that was made first goes first. */
#include "store/conv_lost.h"
#include <stdio.h>
#include <stdlib.h>

struct lost_turn { /* id "": free */
    char tenant[STORE_TENANT_MAX + 1], principal[STORE_TENANT_MAX + 1], id[STORE_CONV_ID_MAX + 1];
    char request_key[CONV_KEY_MAX + 1];
    uint64_t version;
    bool deleted; /* as asked for; it may not have happened yet, and may fail */
};

struct conv_lost {
    struct lost_turn turns[CONV_LOST_MAX]; /* the index's lock guards them */
    size_t count, next;
};

struct conv_lost *conv_lost_create(void)
{
    return calloc(1, sizeof(struct conv_lost));
}

void conv_lost_destroy(struct conv_lost *l)
{
    free(l);
}

static struct lost_turn *find(struct conv_lost *l, const char *tenant, const char *principal, const char *id)
{
    for (size_t i = 0; i < l->count; i++) {
        struct lost_turn *t = &l->turns[i];
        if (strcmp(t->id, id) == 0 && strcmp(t->principal, principal) == 0 && strcmp(t->tenant, tenant) == 0)
            return t;
    }
    return NULL;
}

void conv_lost_note(struct conv_lost *l, const char *tenant, const char *principal, const char *id,
                    uint64_t version, const char *request_key)
{
    struct lost_turn *t = find(l, tenant, principal, id);
    if (!t) {
        t = &l->turns[l->next];
        l->next = (l->next + 1) % CONV_LOST_MAX;
        l->count = TD_MAX(l->count, (size_t)(t - l->turns) + 1);
    }
    snprintf(t->tenant, sizeof t->tenant, "%s", tenant);
    snprintf(t->principal, sizeof t->principal, "%s", principal);
    snprintf(t->id, sizeof t->id, "%s", id);
    snprintf(t->request_key, sizeof t->request_key, "%s", request_key);
    t->version = version;
    t->deleted = false;
}

void conv_lost_note_deleted(struct conv_lost *l, const char *tenant, const char *principal, const char *id)
{
    struct lost_turn *t = find(l, tenant, principal, id);
    if (t)
        t->deleted = true;
}

uint64_t conv_lost_version(struct conv_lost *l, const char *tenant, const char *principal, const char *id,
                           const char *request_key, bool *deleted)
{
    const struct lost_turn *t = find(l, tenant, principal, id);
    *deleted = t && t->deleted;
    return t && (!request_key[0] || strcmp(t->request_key, request_key) != 0) ? t->version : 0;
}

void conv_lost_forget(struct conv_lost *l, const char *tenant, const char *principal, const char *id)
{
    struct lost_turn *t = find(l, tenant, principal, id);
    if (t)
        memset(t, 0, sizeof *t);
}

void conv_lost_forget_tenant(struct conv_lost *l, const char *tenant)
{
    for (size_t i = 0; i < l->count; i++)
        if (strcmp(l->turns[i].tenant, tenant) == 0)
            memset(&l->turns[i], 0, sizeof l->turns[i]);
}
