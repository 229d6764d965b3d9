/* sim_planner: the world of the planner's simulation; see sim_planner.c. */
#ifndef TANDEM_TESTS_SIM_PLANNER_H
#define TANDEM_TESTS_SIM_PLANNER_H
#include "cloud/sequence.h"
#include "edge/estimates.h"
#include "edge/planner.h"

#define LAYERS     6u
#define BLOCKS_MAX 16u
#define TOKENS_MAX (BLOCKS_MAX * KV_BLOCK_TOKENS)
#define REPLY      20u
#define MS         UINT64_C(1000)
#define SECOND     UINT64_C(1000000)
#define END_US     (600 * SECOND) /* virtual: then it hangs */
#define QUEUE_MAX  4096u
#define STALL_US   (60 * SECOND) /* pieces are waited for: only breaks may change who computes what */
#define CHUNK      64u
#define NEVER      UINT64_MAX
#define LEAD                                                                                                 \
    8u /* reply tokens that the device is ahead of the cloud at most; the agent has more, and longer replies */
#define AWAY_US (500 * MS)

enum kind { PLAN_FRAME, ROWS, PIECE, OPEN_FRAME };
struct message {
    enum kind kind;
    uint32_t epoch, first, count, layer, block, rows_patience_us, kv_patience_us;
    uint8_t codec, is_value;
    bool resumes;
    double size;
    uint64_t arrives_us;
    struct plan_range ranges[LIMIT_RANGES];
};
struct queue_of {
    struct message *items[QUEUE_MAX];
    uint32_t head, count;
};
struct answer { /* INGESTED, or OPEN_ACK */
    uint64_t arrives_us;
    uint32_t stream;
    bool opened, plan_wanted;
    uint32_t epoch, hidden, kv, run, plan_begin, refill_begin, refill_end, left_begin, left_end, range_count;
    struct plan_range ranges[LIMIT_RANGES];
};

struct form { /* how a token's KV came to be */
    uint8_t layers, codec;
};

struct sim {
    uint64_t seed, random, now_us;
    /* the world */
    /* bytes a microsecond; nanoseconds a token and layer */
    double rate, edge_ns, cloud_ns, row_size, kv_size;
    uint64_t delay_us, change_us, break_us, link_free_us, link_back_us;
    bool up, dead; /* dead: the cloud has just lost everything */
    /* edge */
    struct estimates estimates;
    struct plan plan;
    struct plan_range record[LIMIT_RANGES], before[LIMIT_RANGES];
    uint32_t record_count, before_count, epoch, position, kv_next, rows_begin, prompt, held, chunk_end;
    bool merged, sending, acked, planned, left;
    bool given_up; /* the rest is the cloud's, but may be taken up again */
    struct plan left_plan;
    uint32_t resumed_epoch; /* older news of the cloud is of no account */
    struct answer last;
    /* path: on its way; inbox: there, while a step runs */
    struct queue_of control, rows, pieces, path, inbox;
    struct answer *answers[QUEUE_MAX];
    uint32_t answer_head, answer_count;
    uint64_t chunk_us, tick_us, sent_size, acked_size, arrived_size;
    /* cloud */
    struct sequence *sequence;
    struct seq_job job;
    uint64_t job_us;
    bool has[TOKENS_MAX + REPLY + 1][LAYERS];
    struct form forms[TOKENS_MAX], settled[TOKENS_MAX];
    /* disturbed: the cloud gave up waiting, or lost its prompt before the second token */
    bool is_settled, disturbed;
    uint32_t leaves, breaks, impatient, resumed, refused;

    /* the reply: sim_planner_reply.c */
    enum planner_local local;
    bool continues,
        others; /* the device goes on without the cloud; draws now and then what the cloud would not */
    int32_t reply[REPLY]; /* [held]: what the client has */
    bool by_device[REPLY];
    uint32_t confirmed; /* of these, that the cloud has said, or was given */
    uint32_t made;      /* that the device has drawn: it sends no rows any more */
    uint32_t stream;    /* counts openings */
    bool listens;       /* the cloud has taken the last of them: its tokens come to the client */
    bool over;          /* nobody wants what the cloud still says */
    bool runs, offline; /* the device; without the cloud, which has not said anything since */
    uint32_t run_position, run_end, run_known;
    uint64_t run_us, away_us;
    uint32_t made_offline, handed_back, replaced, conflicts;
};

/* ---- sim_planner.c ---- */
void fail(const struct sim *s, const char *what);
uint64_t pick(struct sim *s, uint64_t count);

/* ---- sim_planner_reply.c ---- */
int32_t reply_token(const int32_t *before, uint32_t count); /* what the cloud says behind these */
/* The cloud's list as it is now. False: it says another token than the client has from the device. */
bool reply_receive(struct sim *s, const int32_t *ids, uint32_t count);
void reply_check(const struct sim *s); /* each token once, in order, whoever made it */
void run_begin(struct sim *s);
void run_stop(struct sim *s);
void run_step(struct sim *s); /* what is due */

#endif
