/* link_internal: the parts of one link, for link*.c alone.
 *
 *   link.c          creation, the state machine, what the owner calls, timers
 *   link_receive.c  frames that come in: order, limits, windows, messages put together
 *   link_send.c     frames that go out: queues by urgency, bulk by rate and credit, grants and acknowledgements
 *   link_rate.c     the sender's clock: delivery rate, round trip, how much may be on the way
 *   link_queue.c    encoded frames that wait
 *
 * Flow control, at the receiver, for the connection and for each stream alike:
 *     open (the peer may still send) + held (parts of unfinished messages) + unconsumed (whole messages at the owner)
 *     + ungranted (consumed, not yet told the peer) == window                                                        */
#ifndef TANDEM_PROTOCOL_LINK_INTERNAL_H
#define TANDEM_PROTOCOL_LINK_INTERNAL_H
#include "protocol/link.h"
#include "protocol/wire_schema.h"

/* counted streams, and cancelled ones that may still see a last frame */
#define LINK_SLOTS            (2 * LIMIT_STREAMS)
#define LINK_ACK_INTERVAL_US  5000u  /* acknowledgements of bulk are at least so far apart */
#define LINK_GRANT_DELAY_US   20000u /* small grants of an idle window are held back for so long */
#define LINK_OWN_FRAMES_PER_S 400u   /* CREDIT, INGESTED and PING of an edge's link: far below the limit */
#define LINK_BULK_OVERHEAD    64u    /* head and header of a bulk frame, at most */
#define LINK_ARENA_KEEP       (256u << 10) /* a warm arena above this is given back */
#define LINK_RATE_SAMPLES     256u
#define LINK_PROBE_SIZE       12000u   /* goes out at once: TCP begins with ten packets of 1,448 bytes */
#define LINK_PROBE_FRAMES_MAX 21u      /* of that size; of a probe */
#define LINK_FAST             6250000u /* bytes/s: a padded ping takes 2 ms */

/* ---- frames that wait, in order: u32le size, bytes ---- */
struct frame_queue {
    uint8_t *data;
    size_t head, tail, capacity;
};
int frame_queue_push(struct frame_queue *q, unsigned type, uint32_t stream, const ProtobufCMessage *header,
                     const void *payload, size_t payload_size);
size_t frame_queue_first_size(const struct frame_queue *q); /* 0: empty */
size_t frame_queue_pop(struct frame_queue *q, uint8_t *dst);
void frame_queue_clear(struct frame_queue *q);
void frame_queue_free(struct frame_queue *q);

/* ---- a leaky bucket: `per_s` events a second, a second's worth at once ---- */
struct bucket {
    uint64_t level_us, at_us; /* each event pours in 1e6 / per_s; the bucket holds 1e6 */
};
bool bucket_take(struct bucket *b, uint32_t per_s, uint64_t now_us);
uint64_t bucket_wait_us(const struct bucket *b, uint32_t per_s, uint64_t now_us);

/* ---- the sender's clock ---- */
struct rate_sample {
    uint64_t end_size;               /* bytes sent up to and with this frame */
    uint64_t sent_us, first_sent_us; /* when; when the first frame of its flight was */
    uint64_t acked_size, acked_us;   /* state of acknowledgement when it was sent */
    bool limited; /* the link was not kept busy around it: the sample may only raise the estimate */
    bool
        windowed; /* more waited to be sent than our window allowed, though nothing queued: no limit of the link */
};
struct rate {
    uint64_t sent_size, acked_size;
    uint64_t acked_us, first_sent_us;
    /* acknowledgements up to here belong to a flight that did not fill the link */
    uint64_t limited_until_size, windowed_until_size;
    struct rate_sample samples[LINK_RATE_SAMPLES];
    uint32_t sample_head, sample_count;
    uint64_t best, best_before;     /* bytes/s: maxima of this and of the previous interval of busy time */
    uint64_t busy_us, last_busy_us; /* busy time in this interval */
    uint64_t mean_size, mean_us;    /* acknowledged of late by a full link, and in what time */
    bool flight_acked;              /* this flight's first acknowledgement has come */
    uint64_t woken_size;            /* acknowledged when the link was idle last */
    uint64_t hint;                  /* bytes/s, from an earlier connection */
    uint64_t rtt_us, min_rtt_us, min_rtt_at_us;
    uint64_t span_us, quick_rtt_us, pause_us; /* when it began; its quickest answer; its longest pause */
    uint64_t queue_us;                        /* by how much the last span's quickest was late */
    uint64_t late_rtt_us;                     /* of an empty path since the minimum is old; 0: none */
    bool startup;                             /* still looking for the link's rate: more may be on the way */
    uint64_t search_size;                     /* acknowledged when that began */
    uint64_t round_end_size, round_rate;
    uint32_t flat_rounds;
    bool draining; /* bulk pauses so that a ping sees the empty path */
    uint64_t drain_since_us;
    uint32_t probe_count;
    uint64_t probe_rate;           /* bytes/s, of the last probe */
    uint64_t paced_size, paced_us; /* sent and not yet let through by the pace; as of when */
    uint64_t pace_rate;            /* bytes/s: the best, forgotten more slowly than for the window */
};
void rate_init(struct rate *r, uint64_t hint_bytes_per_s);
uint64_t rate_estimate(const struct rate *r); /* bytes/s, 0: unknown */
uint64_t rate_mean(const struct rate *r);     /* the same: what a full link did deliver */
bool rate_grows(const struct rate *r);        /* the estimate is a beginning, and no limit of the link */
/* Before bulk is sent: was the link idle for so long that TCP begins with a small window again? */
void rate_wake(struct rate *r, uint64_t now_us);
size_t rate_frame_size(const struct rate *r);
uint64_t rate_window(const struct rate *r); /* bytes that may be unacknowledged */
bool rate_allows(const struct rate *r, size_t size);
/* Until the pace lets the next frame go; 0: it does. */
uint64_t rate_pace_wait_us(const struct rate *r, uint64_t now_us);
void rate_sent(struct rate *r, size_t size, uint64_t now_us);
void rate_acked(struct rate *r, uint64_t acked_size, uint64_t now_us);
void rate_limited(struct rate *r);  /* there is nothing to send, or no credit */
void rate_windowed(struct rate *r); /* there is something to send, and rate_allows says no */
/* A ping came back. clean: nothing was on the way when it left. */
void rate_ping(struct rate *r, uint64_t rtt_us, bool clean, uint64_t now_us);
/* A ping with `size` bytes of padding came back, which had the path for itself. */
void rate_probed(struct rate *r, size_t size, uint64_t rtt_us, uint64_t now_us);
/* Should a ping go now so as to see the empty path? Starts draining when the minimum is old; true once the path is empty. */
bool rate_wants_ping(struct rate *r, uint64_t now_us);
/* The path is empty now, and the minimum would soon be old. */
bool rate_wants_confirming(const struct rate *r, uint64_t now_us);
/* until rate_wants_ping has something to do */
uint64_t rate_ping_wait_us(const struct rate *r, uint64_t now_us);

/* ---- streams ---- */
enum bulk_class { BULK_HIDDEN, BULK_KV, BULK_CLASSES };
static inline enum bulk_class bulk_class_of(unsigned type)
{
    return type == FRAME_HIDDEN ? BULK_HIDDEN : BULK_KV;
}

struct window_in {
    uint32_t window, open, unconsumed, ungranted;
    uint64_t granted_us; /* the last grant */
    bool grant_now;
};
struct window_out {
    uint64_t credit, reserved; /* reserved: what messages that have begun still need */
};

struct bulk_id { /* what all frames of one message have in common */
    uint32_t field[5];
    uint32_t total;
};
struct partial { /* a message that is being put together; total == 0: none */
    struct bulk_id id;
    uint8_t *data; /* NULL with skip */
    uint32_t have, capacity;
    bool skip; /* given up: its frames are counted and dropped */
};

struct bulk_message {
    struct bulk_message *next;
    uint32_t epoch, size, sent;
    bool backed; /* all its credit was there when it began */
    uint8_t *payload;
    union {
        ProtobufCMessage base;
        Tandem__Hidden hidden;
        Tandem__KvBlock kv_block;
    } header;
};
struct bulk_queue {
    struct bulk_message *first, *last;
    /* bytes of a message that was begun and voided: the peer frees them when the next begins */
    uint32_t abandoned;
};

struct stream {
    uint32_t id;    /* 0: the slot is free */
    bool cancelled; /* no longer counted; a last frame may come */
    bool ended;     /* the wire has seen its end */
    struct window_in in;
    struct window_out out;
    struct partial partials[BULK_CLASSES];
    struct bulk_queue queues[BULK_CLASSES];
    bool ingested_due;
    Tandem__Ingested ingested;
};

struct link {
    struct link_config config;
    enum link_state state;
    int error;
    char error_text[160];
    uint64_t created_us, heard_us;
    uint64_t patience_us, waits_us; /* 0: nobody waits; since when somebody does */
    uint64_t asked_us;              /* the peer was, or would have been had the socket had room */
    struct arena arena;
    struct bucket control_in, own_out;
    uint64_t bytes_in, bytes_out;

    struct stream *streams; /* [LINK_SLOTS] once READY */
    uint32_t slot_count;    /* slots from here on were never used */
    uint32_t stream_last;   /* the highest id opened */
    uint32_t stream_open_count, stream_count_max;

    struct window_in in; /* the connection's */
    struct window_out out;
    uint32_t peer_stream_window, peer_connection_window;
    uint64_t bulk_received;
    uint64_t bulk_heard_us;
    bool ack_due;
    uint64_t ack_us; /* the last acknowledgement */
    uint32_t partial_count;

    struct frame_queue control, tokens;
    size_t bulk_queued_size;
    uint32_t turn[BULK_CLASSES]; /* the slot served last */
    struct rate rate;

    uint64_t ping_id, ping_us; /* the last one sent */
    bool ping_open, ping_clean, ping_padded, probe_wanted;
    uint32_t probe_frames_wanted, probe_padding_wanted;
    uint32_t probe_frames, probe_left; /* of the probe at hand: all, and those that are still to go */
    uint32_t probe_padding;            /* of each */
    uint64_t probe_us;                 /* when its first went */
    /* a stream has been opened: the minimum round trip should be of now before bulk goes */
    bool confirm_wanted;
    uint64_t probe_sent_size; /* bulk when the padded ping left: it must have the path for itself */
    bool pong_due;
    uint64_t pong_id;
};

/* OPEN does; FETCH on a stream that there never was. */
static inline bool opens_stream(const struct link *l, unsigned type, uint32_t stream)
{
    return type == FRAME_OPEN || (type == FRAME_FETCH && stream > l->stream_last);
}
struct stream *stream_find(const struct link *l, uint32_t id);
int stream_open(struct link *l, uint32_t id);
void stream_free(struct link *l, struct stream *s);
void stream_end(struct link *l, struct stream *s); /* the wire has seen its end: no longer counted */
void stream_drop_bulk(struct link *l, struct stream *s, uint32_t epoch);
void partial_drop(struct link *l, struct stream *s, struct partial *p);
int link_ready(struct link *l, uint32_t peer_connection_window, uint32_t peer_stream_window,
               uint32_t stream_count_max);
/* What the link itself wants to say: -1: nothing now; else microseconds until it does (0: now). */
uint64_t link_own_wait_us(const struct link *l, uint64_t now_us);
uint64_t link_bulk_wait_us(const struct link *l, uint64_t now_us); /* UINT64_MAX: none may go */
/* When a peer that somebody waits for is asked whether it is still there; UINT64_MAX: it need not be, or was. */
uint64_t link_ask_us(const struct link *l);
/* Fail with a reason of at most a line; returns code. */
int link_fault(struct link *l, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
