/* generation: exactly-once replies, without sockets, clock or threads. The receiver's token list is the authority.
 *
 * Edge: gen_receiver holds the tokens of one reply. After a lost link it is re-opened with (request id, higher attempt, tokens held, their hash).
 * Cloud: gen_table knows every generation of a principal by request id: running, detached (its socket is gone: decode at most LIMIT_DETACHED_TOKENS
 * more, then park), parked, finished. A re-open of a known one goes on from the tokens that the edge holds; of an unknown one takes prompt + held
 * tokens as its prompt (same seed, same counter: same text), and so does one of a known one that never made these tokens: an edge may make some itself
 * and be ahead, or have drawn others. A higher attempt fences earlier ones. Finished and parked ones are forgotten after LIMIT_PARK_MS.
 *
 *      RUNNING --socket lost--> DETACHED --64 tokens--> PARKED --re-open--> RUNNING;   any --finish--> FINISHED;   any --cancel--> gone */
#ifndef TANDEM_PROTOCOL_GENERATION_H
#define TANDEM_PROTOCOL_GENERATION_H
#include "protocol/wire.h"

#define GEN_REQUEST_ID_SIZE 16

/* SHA-256 over u32le ids. */
void ids_hash(const int32_t *ids, size_t count, uint8_t out[TD_HASH_SIZE]);

/* ---- edge ---- */
struct gen_receiver {
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
    uint64_t attempt;
    int32_t *ids; /* [capacity], the caller's arena or malloc; held tokens */
    uint32_t count, capacity;
    /* tokens below came from the cloud, or were given to it; the others this device has made and the cloud has not said them yet */
    uint32_t confirmed;
    bool done;
};
/* A TOKEN frame: returns how many of its ids are new (they are appended; 0 for repeats and for other attempts), -TD_ERR_CONFLICT for an id that differs
 * from one that this device has made, -TD_ERR_PROTOCOL for a gap, for one that differs from the cloud's own, or too many. */
int gen_receive_tokens(struct gen_receiver *g, uint64_t attempt, uint32_t index, struct span ids_le);
/* A token that this device has made: 1 if it is new (it is appended), 0 if it is held already, -TD_ERR_CONFLICT if another one is, -TD_ERR_LIMIT for a gap or
 * one too many. */
int gen_make_token(struct gen_receiver *g, uint32_t index, int32_t id);
/* Start another attempt: attempt = max(attempt + 1, wall_us). */
void gen_reopen(struct gen_receiver *g, uint64_t wall_us);

/* ---- cloud ---- */
enum gen_state { GEN_RUNNING, GEN_DETACHED, GEN_PARKED, GEN_FINISHED };
enum gen_verdict {
    GEN_NEW, /* not known, nothing held: prefill the prompt */
    GEN_ADOPT, /* not known, the edge holds tokens: they extend the prompt for prefill; token indices go on after them */
    GEN_CONTINUE, /* known: resend what the edge lacks from *generation, go on */
    GEN_STALE,    /* attempt is not higher than one seen: refuse */
    GEN_MISMATCH, /* known, but the prompt differs: refuse */
    GEN_FULL,     /* not known, and no place: gen_table_expire, which makes one, and open again */
    GEN_REPLACE, /* known, but the held tokens are others than ours, or more: *generation is the old one; forget it and open again, which is ADOPT */
};
struct generation {
    char tenant[LIMIT_NAME_SIZE + 1], principal[LIMIT_NAME_SIZE + 1];
    uint8_t request_id[GEN_REQUEST_ID_SIZE];
    uint64_t attempt;
    enum gen_state state;
    uint8_t prompt_hash[TD_HASH_SIZE];
    int32_t *reply; /* [reply_capacity] */
    uint32_t reply_count, reply_capacity;
    uint32_t detached_count; /* tokens decoded since the socket was lost */
    uint32_t finish;
    uint64_t expires_us;
    void *owner; /* the scheduler's sequence; NULL once it has gone */
};
struct gen_table;
struct gen_table *gen_table_create(size_t capacity);
void gen_table_destroy(struct gen_table *t);
/* *out: NULL when STALE, FULL or MISMATCH. Without memory, beyond a limit, and where all places are of generations that run: STALE. */
enum gen_verdict gen_open(struct gen_table *t, const char *tenant, const char *principal,
                          const uint8_t request_id[GEN_REQUEST_ID_SIZE], uint64_t attempt,
                          const uint8_t prompt_hash[TD_HASH_SIZE], const int32_t *held, uint32_t held_count,
                          uint32_t reply_capacity, struct generation **out);
int gen_append(struct generation *g, int32_t id); /* -TD_ERR_LIMIT: capacity */
/* May one more token be decoded now? False once parked: the scheduler then swaps the sequence out or drops its pages. */
bool gen_may_decode(struct generation *g);
void gen_detach(struct generation *g, uint64_t now_us);
void gen_finish(struct generation *g, uint32_t finish, uint64_t now_us);
void gen_forget(struct gen_table *t, struct generation *g);
/* The next gen_table_expire forgets all of the tenant, whatever their state. */
void gen_table_drop_tenant(struct gen_table *t, const char *tenant);
/* Forget what has expired; calls `gone` for each before it is freed (owner may be non-NULL: drop the sequence). */
void gen_table_expire(struct gen_table *t, uint64_t now_us, void (*gone)(void *ctx, struct generation *g),
                      void *ctx);

/* request id and seed of a request that carries an Idempotency-Key: equal on every node and after every restart. */
void gen_id_from_key(const uint8_t principal_key[32], const char *idempotency_key,
                     uint8_t request_id[GEN_REQUEST_ID_SIZE], uint64_t *seed);

#endif
