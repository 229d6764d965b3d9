/* uplink: the one connection of this device to its cloud: WebSocket, tandem.v1 link, streams and who owns them, and coming back when it is lost.
 *
 *     DOWN --connected, HELLO--> GREETING --WELCOME--> READY --GOAWAY--> DRAINING
 *      ^                            |                     |                 |
 *      +------- back-off -----------+------- lost --------+-----------------+
 *
 * READY takes new streams; DRAINING only goes on with those that are open, and ends when the last is done. When the connection is lost every stream
 * is gone: `lost` says so once, and owners open theirs again after the next `ready`. Attempts to connect follow each other after 100 ms, doubled up
 * to 5 s, with jitter, for ever; from 100 ms again once a connection was READY for UPLINK_SOUND_US. A cloud that refuses this device (credentials, model, version) is asked again at the slowest pace, and
 * uplink_refused tells that waiting does not help.
 *
 * Threads: the net loop's only. */
#ifndef TANDEM_EDGE_UPLINK_H
#define TANDEM_EDGE_UPLINK_H
#include "protocol/link.h"
#include "protocol/net.h"

#define UPLINK_BACKOFF_MIN_US 100000u
#define UPLINK_BACKOFF_MAX_US 5000000u
#define UPLINK_SOUND_US       1000000u /* a connection that lasted so long was none in vain */
#define UPLINK_RENEW_US       5000000u /* of BBR's 10 s (protocol/tcp.h); the rest is the prompt's */
#define UPLINK_WHY_SIZE       400

enum uplink_state { UPLINK_DOWN, UPLINK_GREETING, UPLINK_READY, UPLINK_DRAINING };

struct uplink_events {
    void (*ready)(void *ctx, const Tandem__Welcome *welcome);
    void (*lost)(void *ctx); /* after ready: all streams are gone */
    /* A frame of the stream that `owner` opened; the stream is closed already when the frame ends it. Non-zero: the cloud broke the rules. */
    int (*frame)(void *ctx, void *owner, const struct wire_frame *f);
    void (*room)(void *ctx); /* something left: what was FULL may be tried again */
};

struct uplink_config { /* strings are borrowed for the uplink's life */
    struct net_loop *loop;
    const char *host;
    uint16_t port;
    const char *ca_path, *cert_path, *key_path; /* NULL: none */
    bool tls;
    const char *token;
    uint8_t fingerprint[TD_HASH_SIZE], layout_hash[TD_HASH_SIZE];
    uint32_t numerics; /* enum kv_numerics */
    uint32_t layer_count, layers_held, codec_mask, hidden_mask;
    const struct uplink_events *events;
    void *ctx;
};

struct uplink;
/* NULL without memory; connects on uplink_start */
struct uplink *uplink_create(const struct uplink_config *config);
/* After net_loop_destroy, or never started. */
void uplink_destroy(struct uplink *u);
void uplink_start(struct uplink *u);
/* Close for good once what is queued has left: no more attempts. */
void uplink_stop(struct uplink *u);

enum uplink_state uplink_state(const struct uplink *u);
/* The cloud said no, and will again until somebody changes something. */
bool uplink_refused(const struct uplink *u);
/* What the link has measured; false: there is none. */
bool uplink_stats(const struct uplink *u, struct link_stats *out);
/* Why the link is not there: one line, "" while it is. */
const char *uplink_why(const struct uplink *u);

/* All sends: 0, or what link_send says; -TD_ERR_CLOSED when there is no such stream (any more). */
int uplink_open(struct uplink *u, void *owner, const Tandem__Open *open, const void *ids, size_t size,
                uint32_t *stream);
/* The same with FETCH. */
int uplink_fetch(struct uplink *u, void *owner, const Tandem__Fetch *fetch, const void *ids, size_t size,
                 uint32_t *stream);
int uplink_send(struct uplink *u, uint32_t stream, unsigned type, const ProtobufCMessage *header,
                const void *payload, size_t size);
/* Takes payload on success. */
int uplink_send_bulk(struct uplink *u, uint32_t stream, unsigned type, const ProtobufCMessage *header,
                     uint32_t epoch, uint8_t *payload, size_t size);
void uplink_void(struct uplink *u, uint32_t stream, uint32_t epoch);
/* Everything that is under way has become too slow to wait for: throw it away and connect anew, at once. `lost` and `ready` follow. The rate is what the link
 * is believed to do now. */
void uplink_restart(struct uplink *u, uint64_t rate_bytes_per_s);
/* Find out what the idle link carries: link_probe. */
void uplink_probe(struct uplink *u, size_t size);
/* Somebody waits for the cloud, and has something better to do after so much silence; 0: nobody does. For the connection at hand: link_set_patience. */
void uplink_set_patience(struct uplink *u, uint64_t patience_us);
void uplink_set_owner(struct uplink *u, uint32_t stream, void *owner);
/* The owner does not want to hear of it any more; the cloud is told to stop. */
void uplink_close(struct uplink *u, uint32_t stream);

/* The pause before attempt number `failures` + 1, jittered by `random`: between half of and the whole of 100 ms x 2^failures, capped. */
uint64_t uplink_backoff_us(unsigned failures, uint32_t random);
/* Does a prompt that begins now begin with a path that is new to TCP (protocol/tcp.h)? Not in the middle of another one. */
bool uplink_renews(const struct link_stats *link, uint64_t renewed_us, uint64_t now_us);

#endif
