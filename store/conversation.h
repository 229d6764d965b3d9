/* conversation: what a conversation record says, and how a stateless client's message history finds it.
 *
 * Token ids are the truth. Message boundaries carry a rolling keyed hash over (role, content as the client saw it), so that a
 * client that re-sends its whole history is matched to the stored ids: the longest known history wins; only what follows is templated and
 * tokenised. Keyed with the principal's key, so hashes say nothing to others.
 *     h[0] = HMAC(key, "tandem-history" ‖ u8 template kind)
 *     h[i] = HMAC(key, h[i-1] ‖ u32le role size ‖ role ‖ u32le content size ‖ content)                                       */
#ifndef TANDEM_STORE_CONVERSATION_H
#define TANDEM_STORE_CONVERSATION_H
#include "store/store.h"

#define CONV_MESSAGES_MAX 4096
#define CONV_TITLE_MAX    128
#define CONV_KEY_MAX      64 /* characters of last_request_key */
#define CONV_ID_DIGITS    24 /* hex, behind "conv-": of the ids that are made here */

struct conv_boundary { /* after message i */
    /* ids[0..ids_count) cover messages[0..i]; for an assistant reply: up to and with its last token */
    uint32_t ids_count;
    bool reply_open; /* the reply ended without an end token (length, stop string) */
    uint8_t history[TD_HASH_SIZE];
};
struct conversation {
    char id[STORE_CONV_ID_MAX + 1];
    char title[CONV_TITLE_MAX + 1]; /* first words of the first user message, as filtered */
    uint8_t tokenizer_id[TD_HASH_SIZE];
    uint8_t fingerprint[TD_HASH_SIZE];
    uint64_t created_us, updated_us;
    int32_t *ids;
    uint32_t ids_count;
    struct conv_boundary *boundaries;
    uint32_t boundary_count;
    uint8_t *vault; /* edge: placeholder map, opaque; cloud: none */
    uint32_t vault_size;
    /* Idempotency-Key (hashed, hex) of the turn that was appended last: a repeat appends nothing */
    char last_request_key[CONV_KEY_MAX + 1];
};
void conv_free(struct conversation *c); /* contents; wipes ids and vault */
/* Serialise (malloc'ed) / parse hostile bytes (version, all sizes checked). */
int conv_serialise(const struct conversation *c, uint8_t **out, size_t *size);
int conv_parse(const void *data, size_t size, struct conversation *out);

/* A fresh random id, of a form that conv_id_is_made knows: who asks for such an id means a conversation that was begun here. */
int conv_make_id(char out[STORE_CONV_ID_MAX + 1]);
bool conv_id_is_made(const char *id);
/* The id that a conversation has when a request under this key (hex, of CONV_ID_DIGITS at least) begins it. */
void conv_id_from_key(const char *key, char out[STORE_CONV_ID_MAX + 1]);

void conv_history_start(const uint8_t key[32], uint8_t kind, uint8_t out[TD_HASH_SIZE]);
void conv_history_next(const uint8_t key[32], const uint8_t previous[TD_HASH_SIZE], const char *role,
                       const void *content, size_t content_size, uint8_t out[TD_HASH_SIZE]);

/* The in-memory map from history hash to conversation, filled from the store when a principal is first seen. Bounded (LRU). Thread-safe. */
struct conv_index;
struct conv_index *conv_index_create(struct store *s, size_t entries_max);
void conv_index_destroy(struct conv_index *x);
/* hashes[0..count): h after each message of the request. Finds the greatest i with a boundary of that hash. 0: *conv_id, *boundary = i;
 * -TD_ERR_NOTFOUND. */
int conv_index_match(struct conv_index *x, const char *tenant, const char *principal,
                     const uint8_t (*hashes)[TD_HASH_SIZE], size_t count, char conv_id[STORE_CONV_ID_MAX + 1],
                     uint32_t *boundary);
/* Load, append, store: after a turn. `c` is the new state; expected_version from conv_load. Waits for the acknowledgement. -TD_ERR_TIMEOUT: the disk does not
 * answer; what was to be stored or deleted may be all the same, later. */
int conv_load(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id,
              uint64_t *version, struct conversation *out);
int conv_save(struct conv_index *x, const char *tenant, const char *principal, uint64_t expected_version,
              const struct conversation *c);
/* Its two halves. begin: it is queued, and found from now on; 0 with *waiter, which end takes, or what conv_save returns. Nothing but end waits for the disk. */
struct store_waiter;
int conv_save_begin(struct conv_index *x, const char *tenant, const char *principal,
                    uint64_t expected_version, const struct conversation *c, struct store_waiter **waiter);
int conv_save_end(struct conv_index *x, const char *tenant, const char *principal, uint64_t expected_version,
                  const struct conversation *c, struct store_waiter *waiter);
/* Is this version of it, or a later one, acknowledged by the disk? */
bool conv_is_durable(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id,
                     uint64_t version);
/* Its last turn, of the request with this key ("": none), which would have made it this version, could not be stored. So it is until one of that version is,
 * perhaps this very one that came late, or it is deleted, perhaps late as well, or the process ends. */
void conv_note_lost(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id,
                    uint64_t version, const char *request_key);
/* Has it lost its last turn, and was that another request's than this? */
bool conv_has_lost(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id,
                   const char *request_key);
/* The tenant has been erased. */
void conv_index_forget_tenant(struct conv_index *x, const char *tenant);
int conv_delete(struct conv_index *x, const char *tenant, const char *principal, const char *conv_id);

#endif
