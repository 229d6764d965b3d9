/* link: one tandem.v1 connection without its socket and without a clock: the caller brings bytes and `now_us`.
 *
 * In:  frames are checked (order, limits, rate, windows), bulk messages are put together from their frames, then handed on whole.
 * Out: four classes, always the most urgent first: control > tokens > HIDDEN > KV_BLOCK. Bulk leaves in frames of about 20 ms of the
 *      measured rate, only while the peer's credit and the unacknowledged-bytes cap allow; so a CANCEL never waits behind more than one.
 *      Voided pieces are dropped before they are sent. Rate and min RTT come from INGESTED.bulk_size and PING.
 *
 *   edge:  START --HELLO sent--> GREETING --WELCOME--> READY --> CLOSED        cloud:  START --HELLO--> GREETING --WELCOME sent--> READY --> CLOSED
 *
 * The link itself sends and consumes CREDIT and PING, and INGESTED on stream 0, whose bulk_size is its clock. All other frames are the owner's,
 * INGESTED on a stream too (its bulk_size advances the clock as well). protocol/WIRE.md has the rules. */
#ifndef TANDEM_PROTOCOL_LINK_H
#define TANDEM_PROTOCOL_LINK_H
#include "protocol/wire.h"

enum link_role { LINK_EDGE, LINK_CLOUD };
enum link_state { LINK_START, LINK_GREETING, LINK_READY, LINK_CLOSED };

struct link;
struct link_config {
    enum link_role role;
    /* A whole, checked frame; valid during the call only. Non-zero: the peer broke the rules, the link fails with that code. */
    int (*on_frame)(void *ctx, const struct wire_frame *frame);
    void *ctx;
    uint32_t connection_window, stream_window; /* bulk bytes that we are ready to hold; 0: LIMIT_… */
    uint64_t rate_hint_bytes_per_s;            /* the uplink as an earlier connection found it; 0: unknown */
};

struct link *link_create(const struct link_config *config, uint64_t now_us);
void link_destroy(struct link *l);
enum link_state link_state(const struct link *l);

/* One received WebSocket message. Negative: the peer is at fault; an ERROR frame is queued; flush link_next, then close.
 * on_frame is called from here; it may call anything but link_receive and link_destroy. */
int link_receive(struct link *l, const void *data, size_t size, uint64_t now_us);
/* Something has come of a message that is not whole yet: the peer is not silent, however slow the path. */
void link_heard(struct link *l, uint64_t now_us);
/* Queue a control or token frame (copied). -TD_ERR_CLOSED: the link is, or the stream has ended; -TD_ERR_NOMEM; -TD_ERR_FULL: too much is
 * unsent, or for OPEN: the peer takes no further stream now; -TD_ERR_AGAIN: only HELLO, WELCOME and ERROR go before READY; -TD_ERR_ARG,
 * or what wire_check says: the peer would refuse it. The link fills the windows of HELLO and WELCOME and the bulk_size of INGESTED; an
 * INGESTED replaces an unsent one of its stream. An OPEN opens `stream`, as does a FETCH on a new one: odd, above all earlier ones. The edge's CANCEL, the cloud's DONE,
 * ERROR, CANCEL or OPEN_ACK with need_ids end it (after the edge's CANCEL a DONE may still come). ERROR on stream 0 is link_fail. */
int link_send(struct link *l, unsigned type, uint32_t stream, const ProtobufCMessage *header,
              const void *payload, size_t payload_size);
/* Queue a HIDDEN or KV_BLOCK message; header's offset and total are filled by the link. Takes `payload` (malloc'ed) on success. -TD_ERR_FULL beyond
 * LIMIT_SEND_QUEUE_SIZE: try again after link_next has made room. -TD_ERR_LIMIT: larger than link_message_max. -TD_ERR_CLOSED as link_send. */
int link_send_bulk(struct link *l, unsigned type, uint32_t stream, const ProtobufCMessage *header,
                   uint32_t epoch, uint8_t *payload, size_t payload_size);
/* The largest message that the peer can take: its stream window, at most LIMIT_PIECE_SIZE. 0 before READY. */
size_t link_message_max(const struct link *l);
/* Drop queued bulk of `stream` with an epoch below `epoch` (UINT32_MAX: all). A message half sent is abandoned too: the peer discards what it has of it when the next one starts. */
void link_void(struct link *l, uint32_t stream, uint32_t epoch);
/* The stream is over: queued bulk is dropped, late frames of it are ignored. If the peer does not know yet, it is told: CANCEL from an edge,
 * ERROR (cancelled) from a cloud. */
void link_close_stream(struct link *l, uint32_t stream);
/* Cloud: bulk bytes of `stream` (0 if it is gone) were consumed: grant credit again. Called by the ingest when a message has left the staging area.
 * Every whole message must be consumed some day without waiting for bytes that are not there yet. At an edge the link does it itself after
 * on_frame. */
void link_consumed(struct link *l, uint32_t stream, size_t payload_size);
/* Queue an ERROR on stream 0 and close. */
void link_fail(struct link *l, int code, const char *text);
/* Why the link was closed by this side: one line, "" if it was not. Borrowed until link_destroy. */
const char *link_error_text(const struct link *l);

/* Next frame for the socket, most urgent first: its size, 0: nothing may be sent now, negative: closed and drained.
 * capacity: LIMIT_FRAME_SIZE always suffices; -TD_ERR_NOSPACE: less than the next control frame needs. */
int64_t link_next(struct link *l, uint8_t *dst, size_t capacity, uint64_t now_us);
/* Find out what an idle link carries at least, with about so many bytes of padded PINGs (0: 12,000), once nothing is on the way and the minimum round trip is
 * known. What it can show is what carries them in RATE_PROBE_SLACK_US (link_rate.c) at most: 12,000 bytes 32 Mbit/s. */
void link_probe(struct link *l, size_t size);
/* Somebody waits for the peer, and no longer than this: it is asked (PING) after half of that without a sound, and gone half of it after that; or after
 * four round trips if that is more. An end that slept itself asks first. 0: nobody does; LIMIT_PEER_SILENCE_MS. */
void link_set_patience(struct link *l, uint64_t patience_us, uint64_t now_us);
/* Microseconds until link_next or link_tick has something to do (pacing, pings, timeouts); UINT64_MAX: only after new input. */
uint64_t link_wait_us(const struct link *l, uint64_t now_us);
/* Timeouts: 0, or -TD_ERR_TIMEOUT (HELLO late, peer silent): close. Call when link_wait_us has passed. */
int link_tick(struct link *l, uint64_t now_us);

struct link_stats {
    uint64_t rate_bytes_per_s; /* measured uplink, its best of late; 0: unknown yet */
    /* what it delivered of late while it was full; 0: it was not for long enough */
    uint64_t mean_bytes_per_s;
    /* the link has not shown its limit yet, and nothing queues: it carries at least that rate */
    bool rate_grows;
    uint32_t probe_count;       /* link_probe's that were answered */
    uint64_t probe_bytes_per_s; /* what the last one showed: at least this; 50 Mbit/s and more look alike */
    uint64_t min_rtt_us, rtt_us;
    uint64_t bulk_sent_size, bulk_acked_size, bulk_queued_size;
    uint64_t bytes_in, bytes_out;
};
void link_stats(const struct link *l, struct link_stats *out);

#endif
