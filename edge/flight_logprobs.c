/* flight_logprobs: log probabilities of a reply whose client may come back for it under its Idempotency-Key: who takes the reply over hears it from the
 * first token, and hears of each token what the one before heard. Kept only for requests with a key that asked for them.
 *
 * Invariant: what is kept belongs to the receiver's first `count` tokens. Where something is missing (a token came without, or there was no memory),
 * nothing behind it is kept. Bounded by twice the reply's tokens, 8 bytes each and 8 for each alternative that was asked for. */
#include "edge/agent_internal.h"
#include "shared/crypto.h"
#include <stdlib.h>

#define LOGPROBS_AT_ONCE 32u /* tokens handed to the sink at once */

/* One token's: its own, then how many alternatives follow, then each one's id and logprob. */
static size_t entry_size(const struct kept_logprobs *k)
{
    return sizeof(struct kept_logprob) + k->top_max * sizeof(struct sampler_logprob);
}

static struct kept_logprob *entry(const struct kept_logprobs *k, uint32_t index)
{
    return (struct kept_logprob *)(k->entries + index * entry_size(k));
}

static bool reserve(struct kept_logprobs *k, uint32_t count)
{
    if (count <= k->capacity)
        return true;
    uint32_t capacity = TD_MAX(count, 2 * k->capacity);
    uint8_t *grown = malloc(capacity * entry_size(k)); /* not realloc: what is left behind is wiped */
    if (!grown)
        return false;
    if (k->count)
        memcpy(grown, k->entries, k->count * entry_size(k));
    logprobs_free(k);
    k->entries = grown;
    k->capacity = capacity;
    return true;
}

void logprobs_keep(struct flight *f, const int32_t *ids, uint32_t count,
                   const struct api_logprob_in *logprobs)
{
    struct kept_logprobs *k = &f->kept;
    if (!f->key[0] || !f->sampling.want_logprobs || !logprobs || ids != f->receiver.ids + k->count)
        return;
    if (k->count == 0)
        k->top_max = TD_MIN(f->sampling.logprob_count, (uint32_t)SAMPLER_LOGPROBS_MAX);
    if (!reserve(k, k->count + count))
        return;
    for (uint32_t i = 0; i < count; i++) {
        struct kept_logprob *e = entry(k, k->count++);
        e->logprob = logprobs[i].logprob;
        e->top_count = TD_MIN(logprobs[i].top_count, k->top_max);
        for (uint32_t j = 0; j < e->top_count; j++)
            e->top[j] = (struct sampler_logprob){logprobs[i].top_ids[j], logprobs[i].top_logprobs[j]};
    }
}

struct unpacked {
    struct api_logprob_in in[LOGPROBS_AT_ONCE];
    int32_t ids[LOGPROBS_AT_ONCE][SAMPLER_LOGPROBS_MAX];
    float values[LOGPROBS_AT_ONCE][SAMPLER_LOGPROBS_MAX];
};

static void unpack(const struct kept_logprobs *k, uint32_t first, uint32_t count, struct unpacked *out)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct kept_logprob *e = entry(k, first + i);
        for (uint32_t j = 0; j < e->top_count; j++) {
            out->ids[i][j] = e->top[j].id;
            out->values[i][j] = e->top[j].logprob;
        }
        out->in[i] = (struct api_logprob_in){e->logprob, e->top_count, out->ids[i], out->values[i]};
    }
}

bool logprobs_deliver_held(struct flight *f)
{
    uint32_t kept = TD_MIN(f->kept.count, f->receiver.count), held = f->receiver.count;
    struct unpacked u;
    for (uint32_t at = 0, count; at < kept; at += count) {
        count = TD_MIN(LOGPROBS_AT_ONCE, kept - at);
        unpack(&f->kept, at, count, &u);
        if (!flight_deliver(f, f->receiver.ids + at, count, u.in))
            return false;
    }
    return held == kept || flight_deliver(f, f->receiver.ids + kept, held - kept, NULL);
}

void logprobs_free(struct kept_logprobs *k)
{
    if (k->entries)
        crypto_wipe(k->entries, k->count * entry_size(k));
    free(k->entries);
    k->entries = NULL;
    k->capacity = 0;
}
