/* sampler: from a row of logits to the next token.
 *
 * Every step is a pure function with one possible result: candidates are ordered by (logit descending, id
 * ascending), a strict order, so the chosen set does not depend on how it is found. Sums run in binary64, in
 * that order when top-k or top-p made a list, in the order of ids otherwise; so a draw is the same on every
 * machine. Selections are partial: nobody sorts a vocabulary. */
#include "kernels/sampler.h"
#include "kernels/cpu/ops.h"
#include "kernels/philox.h"
#include <assert.h>
#include <math.h>
#include <stdlib.h>

#define TEMPERATURE_MAX 100.0f
#define PENALTY_MAX     100.0f
#define BIAS_LIMIT      100.0f
#define INVERSE_MAX     1e30f /* of a temperature close to 0: keeps 0 * inverse finite */

struct sampler_scratch {
    uint32_t vocab_count;
    const struct cpu_ops *ops; /* for exp */
    float *logits;             /* [vocab] after bias and penalties */
    float *weights;            /* [vocab] exp((logit - max) / temperature) */
    uint32_t *counts;          /* [vocab] zero between calls */
    uint32_t *list;            /* [vocab] candidate ids */
};

/* --- checks ----------------------------------------------------------------------------------- */

static int check_range(const char *name, float value, float low, float high, struct td_error *err)
{
    if (value >= low && value <= high) /* false for a NaN */
        return 0;
    return td_fail(err, -TD_ERR_ARG, "%s is %g; it must be between %g and %g", name, (double)value,
                   (double)low, (double)high);
}

static int check_bias(const struct sampler_params *p, struct td_error *err)
{
    if (p->bias_count > SAMPLER_BIAS_MAX)
        return td_fail(err, -TD_ERR_ARG, "logit_bias has %u entries; at most %d are allowed", p->bias_count,
                       SAMPLER_BIAS_MAX);
    for (uint32_t i = 0; i < p->bias_count; i++) {
        int rc = check_range("logit_bias", p->bias[i].bias, -BIAS_LIMIT, BIAS_LIMIT, err);
        if (rc)
            return rc;
        if (p->bias[i].id < 0)
            return td_fail(err, -TD_ERR_ARG, "logit_bias names a negative token id");
    }
    return 0;
}

int sampler_check(const struct sampler_params *p, struct td_error *err)
{
    const struct {
        const char *name;
        float value, low, high;
    } ranges[] = {
        {"temperature", p->temperature, 0.0f, TEMPERATURE_MAX},
        {"top_p", p->top_p, 0.0f, 1.0f},
        {"min_p", p->min_p, 0.0f, 1.0f},
        {"repetition_penalty", p->repetition_penalty, 1.0f / PENALTY_MAX, PENALTY_MAX},
        {"presence_penalty", p->presence_penalty, -2.0f, 2.0f},
        {"frequency_penalty", p->frequency_penalty, -2.0f, 2.0f},
    };
    for (size_t i = 0; i < TD_COUNT(ranges); i++) {
        int rc = check_range(ranges[i].name, ranges[i].value, ranges[i].low, ranges[i].high, err);
        if (rc)
            return rc;
    }
    if (p->top_k < 0)
        return td_fail(err, -TD_ERR_ARG, "top_k is %d; it must be 0 (off) or more", p->top_k);
    if (p->repetition_window < -1)
        return td_fail(err, -TD_ERR_ARG, "repetition_window is %d; it must be -1 (all), 0 (none) or more",
                       p->repetition_window);
    if (p->logprob_count > SAMPLER_LOGPROBS_MAX)
        return td_fail(err, -TD_ERR_ARG, "top_logprobs is %u; at most %d are allowed", p->logprob_count,
                       SAMPLER_LOGPROBS_MAX);
    return check_bias(p, err);
}

/* --- scratch ---------------------------------------------------------------------------------- */

struct sampler_scratch *sampler_scratch_create(uint32_t vocab_count)
{
    struct sampler_scratch *s = calloc(1, sizeof *s);
    if (!s || vocab_count == 0)
        goto fail;
    s->vocab_count = vocab_count;
    s->ops = cpu_ops_find(NULL);
    s->logits = calloc(vocab_count, sizeof *s->logits);
    s->weights = calloc(vocab_count, sizeof *s->weights);
    s->counts = calloc(vocab_count, sizeof *s->counts);
    s->list = calloc(vocab_count, sizeof *s->list);
    if (s->logits && s->weights && s->counts && s->list)
        return s;
fail:
    sampler_scratch_destroy(s);
    return NULL;
}

void sampler_scratch_destroy(struct sampler_scratch *s)
{
    if (!s)
        return;
    free(s->logits);
    free(s->weights);
    free(s->counts);
    free(s->list);
    free(s);
}

/* --- order and selection ---------------------------------------------------------------------- */

static bool better(const float *logits, uint32_t a, uint32_t b)
{
    float x = logits[a], y = logits[b];
    return x > y || (x == y && a < b);
}

/* A binary heap of ids. best_on_top: root is the best, else the worst. */
static void sift_down(const float *logits, uint32_t *heap, size_t count, size_t at, bool best_on_top)
{
    uint32_t id = heap[at];
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && better(logits, heap[child + 1], heap[child]) == best_on_top)
            child++;
        if (better(logits, heap[child], id) != best_on_top)
            break;
        heap[at] = heap[child];
    }
    heap[at] = id;
}

static void make_heap(const float *logits, uint32_t *heap, size_t count, bool best_on_top)
{
    for (size_t i = count / 2; i-- > 0;)
        sift_down(logits, heap, count, i, best_on_top);
}

/* The `wanted` best of all ids, best first, into list: a heap of the best so far, its worst on top, that most
 * ids do not enter. */
static size_t select_best(const float *logits, uint32_t vocab_count, size_t wanted, uint32_t *list)
{
    size_t count = TD_MIN(wanted, (size_t)vocab_count);
    if (count == 0)
        return 0;
    for (size_t i = 0; i < count; i++)
        list[i] = (uint32_t)i;
    make_heap(logits, list, count, false);
    for (uint32_t id = (uint32_t)count; id < vocab_count; id++)
        if (better(logits, id, list[0])) {
            list[0] = id;
            sift_down(logits, list, count, 0, false);
        }
    for (size_t left = count; left > 1; left--) { /* heap sort: the worst goes to the end */
        uint32_t worst = list[0];
        list[0] = list[left - 1];
        list[left - 1] = worst;
        sift_down(logits, list, left - 1, 0, false);
    }
    return count;
}

static uint32_t best_of(const float *logits, uint32_t count)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* --- bias and penalties ----------------------------------------------------------------------- */

static bool all_finite(const float *x, uint32_t count)
{
    uint32_t bad = 0;
    for (uint32_t i = 0; i < count; i++)
        bad |= (float_bits(x[i]) & 0x7f800000u) == 0x7f800000u;
    return !bad;
}

static void penalise_repetition(const struct sampler_params *p, const int32_t *ids, size_t count,
                                struct sampler_scratch *s)
{
    size_t window = p->repetition_window < 0 ? count : TD_MIN(count, (size_t)p->repetition_window);
    if (p->repetition_penalty == 1.0f)
        return;
    const int32_t *recent = ids + (count - window);
    for (size_t i = 0; i < window; i++) {
        float *logit = &s->logits[recent[i]];
        if (s->counts[recent[i]]++ == 0) /* each id once */
            *logit = *logit > 0.0f ? *logit / p->repetition_penalty : *logit * p->repetition_penalty;
    }
    for (size_t i = 0; i < window; i++)
        s->counts[recent[i]] = 0;
}

static void penalise_generated(const struct sampler_params *p, const int32_t *ids, size_t count,
                               struct sampler_scratch *s)
{
    if (p->presence_penalty == 0.0f && p->frequency_penalty == 0.0f)
        return;
    for (size_t i = 0; i < count; i++)
        s->counts[ids[i]]++;
    for (size_t i = 0; i < count; i++) {
        uint32_t *times = &s->counts[ids[i]];
        if (*times > 0)
            s->logits[ids[i]] -= p->presence_penalty + p->frequency_penalty * (float)*times;
        *times = 0;
    }
}

static int adjust_logits(const struct sampler_params *p, const float *logits, const int32_t *ids,
                         size_t count, size_t prompt_count, struct sampler_scratch *s)
{
    for (size_t i = 0; i < count; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= s->vocab_count)
            return -TD_ERR_ARG;
    memcpy(s->logits, logits, sizeof *logits * s->vocab_count);
    for (uint32_t i = 0; i < p->bias_count; i++) {
        if (p->bias[i].id < 0 || (uint32_t)p->bias[i].id >= s->vocab_count)
            return -TD_ERR_ARG;
        s->logits[p->bias[i].id] += p->bias[i].bias;
    }
    penalise_repetition(p, ids, count, s);
    penalise_generated(p, ids + prompt_count, count - prompt_count, s);
    return all_finite(s->logits, s->vocab_count) ? 0 : -TD_ERR_FORMAT;
}

/* --- drawing ---------------------------------------------------------------------------------- */

/* In [0, 1), 53 bits. */
double sampler_uniform(uint64_t seed, uint64_t index)
{
    uint32_t words[4];
    philox_4x32_10((const uint32_t[2]){(uint32_t)seed, (uint32_t)(seed >> 32)},
                   (const uint32_t[4]){(uint32_t)index, (uint32_t)(index >> 32), 0, 0}, words);
    return (double)(((uint64_t)words[0] << 32 | words[1]) >> 11) * 0x1p-53;
}

static double sum_weights(const struct sampler_scratch *s, size_t count, bool listed)
{
    double sum = 0.0;
    for (size_t i = 0; i < count; i++)
        sum += (double)s->weights[listed ? s->list[i] : i];
    return sum;
}

/* Cut the list to the smallest set of best ids that holds top_p of the weight; the list ends up best first.
 */
static size_t cut_top_p(struct sampler_scratch *s, size_t count, bool listed, double top_p)
{
    double total = sum_weights(s, count, listed);
    if (!listed) {
        /* All ids lighter than (1 - p) / n of the total weigh less than 1 - p together: the cut comes before
         * them. Half of that leaves room for rounding. */
        double light = 0.5 * (1.0 - top_p) / (double)count * total;
        size_t kept = 0;
        for (uint32_t id = 0; id < count; id++)
            if ((double)s->weights[id] >= light)
                s->list[kept++] = id;
        count = kept;
    }
    make_heap(s->logits, s->list, count, true);
    /* Popped ids gather at the end of the array, the best last. */
    double sum = 0.0;
    size_t left = count;
    while (left > 0) {
        uint32_t best = s->list[0];
        s->list[0] = s->list[--left];
        if (left > 0)
            sift_down(s->logits, s->list, left, 0, true);
        s->list[left] = best;
        sum += (double)s->weights[best];
        if (sum >= top_p * total)
            break;
    }
    size_t kept = count - left;
    for (size_t i = 0; i < kept / 2; i++) {
        uint32_t swap = s->list[left + i];
        s->list[left + i] = s->list[count - 1 - i];
        s->list[count - 1 - i] = swap;
    }
    memmove(s->list, s->list + left, sizeof *s->list * kept);
    return kept;
}

static size_t cut_min_p(struct sampler_scratch *s, size_t count, bool listed, float min_p)
{
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t id = listed ? s->list[i] : (uint32_t)i;
        if (s->weights[id] >= min_p) /* the best weighs 1 */
            s->list[kept++] = id;
    }
    return kept;
}

static uint32_t draw(const struct sampler_params *p, uint64_t index, struct sampler_scratch *s)
{
    uint32_t best = best_of(s->logits, s->vocab_count);
    if (p->temperature == 0.0f)
        return best;
    float inverse = TD_MIN(1.0f / p->temperature, INVERSE_MAX);
    size_t count = s->vocab_count;
    bool listed = p->top_k > 0 && (uint32_t)p->top_k < s->vocab_count;
    if (listed)
        count = select_best(s->logits, s->vocab_count, (size_t)p->top_k, s->list);
    s->ops->exp_scaled(s->logits, s->logits[best], inverse, s->vocab_count, s->weights);
    if (p->top_p < 1.0f) {
        count = cut_top_p(s, count, listed, (double)p->top_p);
        listed = true;
    }
    if (p->min_p > 0.0f) {
        count = cut_min_p(s, count, listed, p->min_p);
        listed = true;
    }
    double target = sampler_uniform(p->seed, index) * sum_weights(s, count, listed), sum = 0.0;
    for (size_t i = 0; i < count; i++) {
        uint32_t id = listed ? s->list[i] : (uint32_t)i;
        sum += (double)s->weights[id];
        if (sum > target)
            return id;
    }
    return best; /* not reached: target < the same sum */
}

static void report_logprobs(const struct sampler_params *p, const float *logits, struct sampler_scratch *s,
                            struct sampled *out)
{
    float max = logits[best_of(logits, s->vocab_count)];
    s->ops->exp_scaled(logits, max, 1.0f, s->vocab_count, s->weights);
    double log_sum = numerics_log(sum_weights(s, s->vocab_count, false));
    out->logprob = (float)((double)logits[out->id] - (double)max - log_sum);
    out->top_count = (uint32_t)select_best(logits, s->vocab_count, p->logprob_count, s->list);
    for (uint32_t i = 0; i < out->top_count; i++)
        out->top[i] = (struct sampler_logprob){(int32_t)s->list[i],
                                               (float)((double)logits[s->list[i]] - (double)max - log_sum)};
}

int sampler_draw(const struct sampler_params *p, const float *logits, uint32_t vocab_count,
                 const int32_t *ids, size_t count, size_t prompt_count, struct sampler_scratch *scratch,
                 struct sampled *out)
{
    assert(vocab_count == scratch->vocab_count && prompt_count <= count &&
           p->logprob_count <= SAMPLER_LOGPROBS_MAX);
    memset(out, 0, sizeof *out);
    if (!all_finite(logits, vocab_count))
        return -TD_ERR_FORMAT;
    int rc = adjust_logits(p, logits, ids, count, prompt_count, scratch);
    if (rc)
        return rc;
    out->id = (int32_t)draw(p, count - prompt_count, scratch);
    if (p->want_logprobs)
        report_logprobs(p, logits, scratch, out);
    return 0;
}

/* --- adjustments as a list -------------------------------------------------------------------- */

struct adjusting {
    uint32_t *slot; /* [vocab]: where an id is in the list, plus 1; zero between calls */
    struct sample_adjust *out;
    uint32_t count, vocab_count;
    int status;
};

/* The list's entry of an id; NULL, with the status set, if there can be none. */
static struct sample_adjust *entry_of(struct adjusting *a, int32_t id)
{
    if (id < 0 || (uint32_t)id >= a->vocab_count) {
        a->status = -TD_ERR_ARG;
        return NULL;
    }
    if (a->slot[id])
        return &a->out[a->slot[id] - 1];
    if (a->count == SAMPLE_ADJUST_MAX) {
        a->status = -TD_ERR_LIMIT;
        return NULL;
    }
    a->out[a->count] = (struct sample_adjust){.id = id};
    a->slot[id] = ++a->count;
    return &a->out[a->count - 1];
}

static void list_repeated(const struct sampler_params *p, const int32_t *ids, size_t count,
                          struct adjusting *a)
{
    size_t window = p->repetition_window < 0 ? count : TD_MIN(count, (size_t)p->repetition_window);
    if (p->repetition_penalty == 1.0f)
        return;
    for (size_t i = count - window; i < count && !a->status; i++) {
        struct sample_adjust *x = entry_of(a, ids[i]);
        if (x)
            x->repeated = 1;
    }
}

static void list_generated(const struct sampler_params *p, const int32_t *ids, size_t count,
                           struct adjusting *a)
{
    if (p->presence_penalty == 0.0f && p->frequency_penalty == 0.0f)
        return;
    for (size_t i = 0; i < count && !a->status; i++) {
        struct sample_adjust *x = entry_of(a, ids[i]);
        if (x)
            x->minus += 1.0f; /* times, until the end */
    }
    for (uint32_t i = 0; i < a->count; i++)
        if (a->out[i].minus > 0.0f)
            a->out[i].minus = p->presence_penalty + p->frequency_penalty * a->out[i].minus;
}

int sampler_adjust(const struct sampler_params *p, const int32_t *ids, size_t count, size_t prompt_count,
                   struct sampler_scratch *scratch, struct sample_adjust out[SAMPLE_ADJUST_MAX])
{
    struct adjusting a = {scratch->counts, out, 0, scratch->vocab_count, 0};
    for (uint32_t i = 0; i < p->bias_count && !a.status; i++) {
        struct sample_adjust *x = entry_of(&a, p->bias[i].id);
        if (x)
            x->bias += p->bias[i].bias;
    }
    list_repeated(p, ids, count, &a);
    list_generated(p, ids + prompt_count, count - prompt_count, &a);
    for (uint32_t i = 0; i < a.count; i++)
        a.slot[out[i].id] = 0;
    return a.status ? a.status : (int)a.count;
}
