/* sim: an edge, a path and a cloud in one process on a virtual clock, all chance from one seed.
 *
 * Real: both ends' link, gen_receiver, gen_table. Toy: the engine (a token is a hash of the seed and all ids before it), the edge's
 * prefill (HIDDEN and KV whose bytes follow from their names, so the cloud can check each of them), the ingest (takes whole
 * messages, consumes them after a while), the path (rate, delay, socket buffer; never loses or reorders, but can be cut).
 *
 *   sim_path.c   random numbers, pipes, connections
 *   sim_text.c   what every id, row and piece must be
 *   sim_edge.c   requests, their uploads, what a client sees
 *   sim_cloud.c  sequences, ingest, decoding, generations
 *   sim_protocol.c  runs, faults, checks
 *
 * A finding prints the seed: `sim_protocol --seed N` repeats it exactly. */
#ifndef TANDEM_TESTS_SIM_H
#define TANDEM_TESTS_SIM_H
#include "protocol/generation.h"
#include "protocol/link_internal.h"

#define MS     UINT64_C(1000)
#define SECOND UINT64_C(1000000)
#define NEVER  UINT64_MAX

#define SIM_REQUESTS 80
#define SIM_REPLY    400 /* tokens */
#define SIM_BLOCK    64  /* tokens of a KV block, and of a HIDDEN message at most */
#define SIM_LEAD     64  /* tokens that a device makes ahead of the cloud */
/* a link that was lost is waited for so long, where the device can go on by itself */
#define SIM_AWAY_US      (500 * MS)
#define SIM_PATIENCE_US  (3 * SECOND) /* and a silent one */
#define SIM_LOWAT_SIZE   (16u << 10)
#define SIM_STAGED_COUNT 4096

struct rng {
    uint64_t state;
};
uint64_t rng_next(struct rng *r);
uint64_t rng_below(struct rng *r, uint64_t bound); /* [0, bound) */
uint64_t rng_between(struct rng *r, uint64_t low, uint64_t high);
bool rng_chance(struct rng *r, unsigned percent);

/* ---- the path ---- */

struct flight {
    struct flight *next;
    uint64_t arrives_us;
    size_t size;
    uint8_t bytes[];
};
struct pipe {
    uint64_t rate, delay_us, socket_size;
    uint64_t free_us; /* the bottleneck is busy until then */
    struct flight *first, **last;
    bool cut; /* what goes in never comes out */
};

struct connection {
    struct connection *next;
    struct sim *sim;
    struct link *edge, *cloud; /* NULL: that side has closed its socket */
    struct pipe up, down;
    uint64_t edge_notices_us, cloud_notices_us; /* when each side sees that the other is gone */
    uint32_t stream_next;                       /* edge */
    uint64_t cloud_staged_size, cloud_staged_max;
};

bool pipe_writable(const struct pipe *p, uint64_t now_us);
uint64_t pipe_writable_us(const struct pipe *p); /* when it will be */
void pipe_put(struct pipe *p, const void *bytes, size_t size, uint64_t now_us);
struct flight *pipe_take(struct pipe *p, uint64_t now_us); /* the caller frees it */
void pipe_delay(struct pipe *p, uint64_t by_us);           /* what is in it now comes later */
void pipe_drop(struct pipe *p);

/* ---- what everything must be ---- */

uint64_t text_mix(uint64_t a, uint64_t b);
uint64_t text_begin(uint64_t seed, const int32_t *prompt, uint32_t count);
uint64_t text_fold(uint64_t state, int32_t id);
int32_t text_next(uint64_t state);
int32_t text_other(int32_t next); /* what a device of other arithmetic may draw instead */
bool text_ends(int32_t id);
void content_fill(uint8_t *bytes, size_t size, uint64_t name);
bool content_is(const uint8_t *bytes, size_t size, uint64_t name);
uint64_t content_hidden(const int32_t *prompt, uint32_t first_token);
uint64_t content_piece(const int32_t *prompt, uint32_t block, uint32_t layer, bool is_value);

/* ---- the edge ---- */

struct request {
    char key[32]; /* Idempotency-Key */
    uint64_t seed, start_us, cancel_us;
    int32_t *prompt, *expected;
    uint32_t prompt_count, expected_count, token_count_max;
    bool name_conversation; /* open by conversation first: the cloud does not know it */
    bool wants_block;       /* FETCHes one */
    uint32_t edge_tokens;   /* of the prompt, in its first plan */
    /* state of the edge, lost when it crashes */
    struct gen_receiver receiver;
    int32_t held[SIM_REPLY];
    uint64_t make_us; /* when this device has made the next token itself; NEVER: it makes none (any more) */
    uint32_t made;    /* tokens that it has made: the cloud computes the whole prompt then, from ids */
    bool offline;     /* it makes them without the cloud, which has not said anything since */
    bool opened;      /* the cloud may know the generation */
    bool trails;      /* its client has all of it from this device; the cloud comes behind */
    bool leaves;      /* nobody waits for it, and the cloud, which may have it, is to be told */
    uint32_t stream;  /* 0: none */
    uint32_t epoch, edge_planned, hidden_next, piece_next;
    bool sends_data;
    uint64_t produce_us, retry_us;
    /* the client */
    bool done, cancelled;
    uint64_t cancel_sent_us, cancel_due_us;
    struct connection *cancel_connection;
    uint32_t cancel_stream;
    uint64_t attempt_accepted; /* by the cloud, while it knows the generation */
    uint64_t not_before_us;    /* the cloud wants no OPEN before, on this connection */
    struct connection *busy_there;
    struct connection *told; /* it was told there that nobody waits */
};

struct edge {
    struct connection *connection; /* the one in use */
    uint64_t connect_us;           /* when to connect again */
    uint64_t away_us;              /* since when there has been no cloud; NEVER: there is one */
    struct request requests[SIM_REQUESTS];
    uint32_t request_count;
};

void edge_connect(struct sim *s);
void edge_lost(struct sim *s, uint64_t back_us); /* its connection is gone */
void edge_crash(struct sim *s, uint64_t back_us);
int edge_on_frame(void *ctx, const struct wire_frame *f);
void edge_act(struct sim *s);
uint64_t edge_next_us(const struct sim *s);

/* ---- the cloud ---- */

struct sequence {
    struct sequence *next;
    struct generation *generation;
    struct connection *connection; /* NULL: detached */
    uint32_t stream;
    int32_t *prompt;
    uint32_t prompt_count, token_count_max;
    uint64_t seed, state, step_us;
    bool generates, decoding, abandoned_data; /* abandoned_data: what the edge did not send is recomputed */
    uint32_t epoch, edge_tokens, hidden_tokens, kv_piece;
    bool needs; /* NEED was sent */
};
struct staged { /* a whole message in the staging area */
    struct connection *connection;
    uint32_t stream;
    size_t size;
    uint64_t leaves_us;
};
struct cloud {
    struct gen_table *table;
    struct sequence *sequences;
    struct staged staged[SIM_STAGED_COUNT];
    uint32_t staged_count;
};

void cloud_start(struct sim *s);
void cloud_crash(struct sim *s);
void cloud_lost(struct sim *s, struct connection *c); /* a connection is gone */
int cloud_on_frame(void *ctx, const struct wire_frame *f);
void cloud_act(struct sim *s);
uint64_t cloud_next_us(const struct sim *s);
uint32_t cloud_sequence_count(const struct sim *s);
bool cloud_knows(struct sim *s, const struct request *r); /* the generation, also a finished one */
bool cloud_works_for(const struct sim *s, const struct request *r);

/* ---- all ---- */

struct sim_config {
    uint64_t rate, delay_us, socket_size;
    uint32_t connection_window, stream_window;
    uint32_t row_size, piece_row_size, layers;
    /* edge prefill of a chunk; a decode step; longest stay in the staging area */
    uint64_t chunk_us, step_us, stage_us;
    unsigned damage_percent, replan_percent;
    /* requests whose device makes tokens too; of those, that the cloud would not have drawn */
    unsigned makes_percent, others_percent;
    uint64_t make_step_us;
    bool continues; /* devices go on without the cloud */
    unsigned busy_percent;
};
struct sim {
    uint64_t seed, now_us;
    struct rng rng;
    struct sim_config config;
    bool is_short;                    /* a life of few frames, without faults but one: */
    uint64_t life_frames, cut_before; /* sent by either side; cut before this one, 0: never */
    unsigned cut_way;
    struct connection *connections;
    struct edge edge;
    struct cloud cloud;
    struct { /* what happened, over all runs */
        uint64_t runs, requests, cancelled, tokens, tokens_ignored, frames, bulk_size;
        uint64_t connections, cuts, each_frame, cloud_crashes, edge_crashes, goaways;
        uint64_t verdicts[GEN_REPLACE + 1], made, made_offline, handed_back, whole_here, told, busy,
            conflicts, cancels_sent, cancels_delivered, parked, expired, needs, voids, fetched;
    } count;
};
void sim_fail(struct sim *s, const char *format, ...) __attribute__((format(printf, 2, 3), noreturn));
struct connection *sim_connect(struct sim *s);
#define SIM_CHECK(s, condition, ...)                                                                         \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            sim_fail((s), __VA_ARGS__);                                                                      \
    } while (0)

#endif
