/* estimates: what the planner goes by, measured: the device's and the cloud's cost of a token and layer, the uplink's rate and delay, the time of a reply
 * token. Everything is told from outside, time too.
 *
 * A device that sends what it computes needs part of its cores for that, so a layer takes it longer than where it computes for itself: with one core and 128
 * tokens by a quarter. Taken for what the device alone would need, it would never be tried alone again. So what is measured without sending is kept apart: both rise
 * alike over the position, so each tells the other its slope; and a device that has hardly been tried alone is known to be unknown (plan_model.h).
 *
 * How much dearer later positions are is not known until some have been run. Until then it is what the model's shape says, from the operations of attention over those
 * of products: taken for level, a first long prompt would look half as long on the device as it is, and be left to it.
 *
 * The rate is the link's own (protocol/link_rate.c), its mean where it has one, less one deviation of its last values. While that still grows, as on a fresh connection, which begins
 * with a few packets a round trip, it can only raise what is believed: taken at its word it would condemn every link at its first chunk. And the rate is
 * no more than what is under way has shown: bytes that have been waiting for their acknowledgement for longer than a round trip bound it from above, which
 * tells a link that has just broken down seconds before a rate can.
 *
 * A rate that is believed to be low keeps the device from sending anything, and so from finding out that it was wrong: a busy machine's late acknowledgements look
 * like a slow link's, and links change. So the link is probed while it is idle and, if there is such a moment, nobody computes: at the start, when nothing is known; as soon as bulk has lowered the rate;
 * and again after ESTIMATES_PROBE_US, twice as rarely each time that the belief proves right. A probe shows a floor: it raises the belief. Where bulk
 * then comes to much less than its probe had promised (short bursts pass, long ones are held back), the next ones come as much more rarely. */
#ifndef TANDEM_EDGE_ESTIMATES_H
#define TANDEM_EDGE_ESTIMATES_H
#include "edge/plan_model.h"
#include "protocol/link.h"
#include "shared/line.h"

#define ESTIMATES_RATE_UNKNOWN 6.25     /* bytes a microsecond: 50 Mbit/s, until a link has shown its own */
#define ESTIMATES_COST_UNKNOWN 20000.0  /* nanoseconds a token and layer */
#define ESTIMATES_ALONE_TRIED  4u       /* chunks that the device must have run for itself */
#define ESTIMATES_PROBE_US     10000000 /* between probes of a link that is believed to be slow */
#define ESTIMATES_PROBE_SHIFT  6u       /* at most 2^6 times as long */
/* so many follow within seconds: what makes an answer late at first, as a machine that is starting, does not last */
#define ESTIMATES_PROBE_SOON 3u
#define ESTIMATES_SOON_US    500000
/* so many of them in a row may be later than the one that is believed, as where somebody else computes, and do not count */
#define ESTIMATES_PROBES_LATE   8u
#define ESTIMATES_PROBE_SPAN_US 20000
/* on a link below this a probe is what goes in so many microseconds, as a question may come behind it; a packet at least */
#define ESTIMATES_RATE_SLOW     0.12 /* bytes a microsecond: 1 Mbit/s */
#define ESTIMATES_PROBE_MOST_US 100000
#define ESTIMATES_PROBE_LEAST   1200u
/* an acknowledgement may be so much later than a round trip: machines stumble, packets are lost */
#define ESTIMATES_SLACK_US 200000

struct estimates {
    struct line edge, alone; /* nanoseconds over the position, with sending and without */
    uint32_t alone_count;
    double edge_rise;                   /* of both, until it is measured: model_rise */
    double edge_off;                    /* by what share of that a chunk is off, on average */
    double cloud_ns, cloud_slope_ns;    /* at 0, and a position; 0: it has not said */
    double rate, rate_deviation;        /* bytes a microsecond; 0: unknown */
    bool probed;                        /* the rate is a probe's; bulk has not said anything since */
    uint32_t probe_count;               /* of the link, as told last */
    uint32_t probes_vain, probes_wrong; /* in a row: found nothing better; promised what bulk did not keep */
    uint32_t probes_late;               /* said nothing, and were not counted */
    uint64_t probe_due_us;
    uint64_t rtt_us;
    /* of the link: as told last; since when nothing was acknowledged */
    uint64_t acked_size, unacked_size, progress_us;
    double decode_us;      /* 0: unknown; of the cloud's tokens */
    double edge_decode_us; /* of the device's own */
    uint64_t token_us;
};

/* The device ran tokens through layers, beginning at position. alone: nothing of it was to be sent. */
void estimates_edge(struct estimates *e, uint64_t took_us, uint32_t tokens, uint32_t layers,
                    uint32_t position, bool alone);
/* What OPEN_ACK and INGESTED say: nanoseconds; the slope for 1,024 positions. */
void estimates_cloud(struct estimates *e, uint32_t layer_ns, uint32_t slope_ns);
void estimates_link(struct estimates *e, const struct link_stats *stats, uint64_t now_us);
void estimates_link_lost(struct estimates *e); /* another connection counts its bytes from 0 */
/* Until it is worth asking for the next probe; 0: none will be. */
uint64_t estimates_probe_wait_us(const struct estimates *e, uint64_t now_us);
/* Should the link be probed now, if it has nothing else to do? The answer comes with estimates_link. busy: somebody computes, here or there, and makes
 * answers late: it had better wait, but for no longer than ESTIMATES_PROBE_US. */
bool estimates_wants_probe(struct estimates *e, bool busy, uint64_t now_us);
/* With how many bytes: few (0), which TCP lets go at once where it begins anew, and of a slow link fewer; unless the belief is about as high as those can show
 * (a probe's slack, link_rate.c): then what twice the believed rate carries in ESTIMATES_PROBE_SPAN_US, in the first that follow it; an idle link is not made to pay for it all day. */
size_t estimates_probe_size(const struct estimates *e);
/* Bytes a microsecond, as it is believed now. */
double estimates_rate(const struct estimates *e, uint64_t now_us);
/* How long what is under way takes at that rate. */
double estimates_backlog_us(const struct estimates *e, uint64_t now_us);
/* Believe this rate from now on: the link is started anew because it has come to this. */
void estimates_set_rate(struct estimates *e, double rate);
/* The device made a token in so long. */
void estimates_edge_token(struct estimates *e, uint64_t took_us);
/* A reply token of the cloud's, at now_us; fresh: the first of its reply. */
void estimates_token(struct estimates *e, bool fresh, uint64_t now_us);
/* Everything that is measured, into a model; layer_count, sizes and queue are the caller's. */
void estimates_fill(const struct estimates *e, uint64_t now_us, struct plan_model *m);

#endif
