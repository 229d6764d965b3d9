/* sampler: Philox against its authors' known answers, every step against a naive twin that sorts and sums in binary64. */
#include "kernels/philox.h"
#include "kernels/sampler.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

#define VOCAB 1000

/* Random123, kat_vectors: philox4x32 10. */
static void philox_known_answers(void **state)
{
    (void)state;
    static const uint32_t known[][10] = {/* counter[4], key[2], result[4] */
                                         {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                         {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff,
                                          0xffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                                         {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822,
                                          0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
    for (size_t i = 0; i < TD_COUNT(known); i++) {
        uint32_t out[4];
        philox_4x32_10(known[i] + 4, known[i], out);
        assert_memory_equal(out, known[i] + 6, sizeof out);
    }
}

/* --- the twin -------------------------------------------------------------------------------------------------- */

struct candidate {
    int32_t id;
    float logit;
    double weight;
};

static int by_logit(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return x->logit != y->logit ? (x->logit < y->logit ? 1 : -1) : (x->id > y->id) - (x->id < y->id);
}

static int by_id(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

static double twin_uniform(uint64_t seed, uint64_t index)
{
    uint32_t out[4];
    philox_4x32_10((uint32_t[]){(uint32_t)seed, (uint32_t)(seed >> 32)},
                   (uint32_t[]){(uint32_t)index, (uint32_t)(index >> 32), 0, 0}, out);
    return (double)(((uint64_t)out[0] << 32 | out[1]) >> 11) / 9007199254740992.0;
}

/* The id that p draws at `index`; *edge: how far the draw was from the next id's border, in probability. */
static int32_t twin_draw(const struct sampler_params *p, const float *logits, uint64_t index, double *edge)
{
    struct candidate c[VOCAB];
    for (int i = 0; i < VOCAB; i++)
        c[i] = (struct candidate){i, logits[i], 0};
    qsort(c, VOCAB, sizeof *c, by_logit);
    *edge = 1;
    if (p->temperature == 0)
        return c[0].id;
    size_t count = p->top_k > 0 && p->top_k < VOCAB ? (size_t)p->top_k : VOCAB;
    double total = 0, sum = 0;
    for (size_t i = 0; i < count; i++)
        total += c[i].weight = exp(((double)c[i].logit - (double)c[0].logit) / (double)p->temperature);
    if (p->top_p < 1)
        for (size_t i = 0; i < count; i++) {
            sum += c[i].weight;
            *edge = fmin(*edge, fabs(sum - (double)p->top_p * total) / total);
            if (sum >= (double)p->top_p * total) {
                count = i + 1;
                break;
            }
        }
    size_t kept = count;
    for (size_t i = 0; p->min_p > 0 && i < count; i++) {
        *edge = fmin(*edge, fabs(c[i].weight - (double)p->min_p));
        if (c[i].weight < (double)p->min_p && kept == count)
            kept = i;
    }
    if (p->top_p >= 1 && (p->top_k == 0 || p->top_k >= VOCAB))
        qsort(c, kept, sizeof *c, by_id);
    total = sum = 0;
    for (size_t i = 0; i < kept; i++)
        total += c[i].weight;
    double target = twin_uniform(p->seed, index) * total;
    for (size_t i = 0; i < kept; i++) {
        sum += c[i].weight;
        *edge = fmin(*edge, fabs(sum - target) / total);
        if (sum > target)
            return c[i].id;
    }
    return -1;
}

static void random_logits(float *logits, uint32_t seed)
{
    for (int i = 0; i < VOCAB; i++) {
        seed = seed * 1664525u + 1013904223u;
        uint32_t other = seed * 22695477u + 1;
        logits[i] = ((float)(seed >> 8) * 0x1p-24f + (float)(other >> 8) * 0x1p-24f - 1.0f) * 6.0f;
        logits[i] = roundf(logits[i] * 64) / 64; /* makes ties */
    }
}

static int32_t draw_one(const struct sampler_params *p, const float *logits, const int32_t *ids, size_t count,
                        size_t prompt_count, struct sampler_scratch *scratch)
{
    struct sampled out;
    assert_int_equal(sampler_check(p, NULL), 0);
    assert_int_equal(sampler_draw(p, logits, VOCAB, ids, count, prompt_count, scratch, &out), 0);
    return out.id;
}

static void every_cut_draws_what_the_twin_draws(void **state)
{
    (void)state;
    static const struct {
        float temperature;
        int32_t top_k;
        float top_p, min_p;
    } settings[] = {{0, 0, 1, 0},        {1, 0, 1, 0},         {0.7f, 1, 1, 0},   {1, 40, 1, 0},
                    {1, 0, 0.9f, 0},     {1.5f, 0, 0.5f, 0},   {1, 0, 0.999f, 0}, {1, 0, 1, 0.05f},
                    {2, 50, 0.8f, 0.1f}, {0.01f, 0, 0.95f, 0}, {5, 999, 1, 0},    {1, 0, 0, 0},
                    {1, 2000, 1, 0.2f},  {0.6f, 20, 0.95f, 0}};
    struct sampler_scratch *scratch = sampler_scratch_create(VOCAB);
    int32_t ids[200] = {0};
    int compared = 0;
    for (uint32_t n = 0; n < 40; n++) {
        float logits[VOCAB];
        random_logits(logits, n + 1);
        for (size_t i = 0; i < TD_COUNT(settings); i++) {
            struct sampler_params p;
            sampler_defaults(&p);
            p.temperature = settings[i].temperature, p.top_k = settings[i].top_k;
            p.top_p = settings[i].top_p, p.min_p = settings[i].min_p;
            p.seed = 0x123456789abcdef0u + n;
            double edge;
            int32_t want = twin_draw(&p, logits, n, &edge);
            int32_t got = draw_one(&p, logits, ids, 100 + n, 100, scratch);
            if (edge < 1e-6)
                continue; /* exp in 24 bits may fall on the other side */
            compared++;
            if (got != want)
                fail_msg("setting %zu, logits %u: %d, twin %d", i, n, got, want);
        }
    }
    assert_true(compared > 500);
    sampler_scratch_destroy(scratch);
}

static void draws_follow_the_distribution(void **state)
{
    (void)state;
    struct sampler_scratch *scratch = sampler_scratch_create(VOCAB);
    float logits[VOCAB];
    for (int i = 0; i < VOCAB; i++)
        logits[i] = i < 8 ? logf((float)(i + 1)) : -80.0f; /* id i: (i + 1) / 36 */
    struct sampler_params p;
    sampler_defaults(&p);
    p.seed = 99;
    enum { DRAWS = 20000 };
    static int32_t ids[DRAWS];
    int seen[8] = {0};
    for (int i = 0; i < DRAWS; i++)
        seen[draw_one(&p, logits, ids, (size_t)i, 0, scratch)]++;
    double chi2 = 0;
    for (int i = 0; i < 8; i++) {
        double want = DRAWS * (i + 1) / 36.0;
        chi2 += (seen[i] - want) * (seen[i] - want) / want;
    }
    assert_true(chi2 < 24.3); /* 7 degrees of freedom, p = 0.001 */
    sampler_scratch_destroy(scratch);
}

static void nothing_but_the_arguments_matters(void **state)
{
    (void)state;
    struct sampler_scratch *used = sampler_scratch_create(VOCAB), *fresh = sampler_scratch_create(VOCAB);
    float logits[VOCAB], other[VOCAB];
    random_logits(logits, 5), random_logits(other, 6);
    int32_t ids[] = {3, 1, 4, 1, 5, 9, 2, 6};
    struct sampler_params p;
    sampler_defaults(&p);
    p.repetition_penalty = 1.3f, p.repetition_window = -1, p.frequency_penalty = 0.5f, p.top_p = 0.8f;
    for (uint64_t seed = 0; seed < 50; seed++) {
        p.seed = seed;
        draw_one(&p, other, ids, 5, 1, used); /* leaves no trace */
        assert_int_equal(draw_one(&p, logits, ids, 8, 3, used), draw_one(&p, logits, ids, 8, 3, fresh));
    }
    sampler_scratch_destroy(used), sampler_scratch_destroy(fresh);
}

static void greedy_takes_the_lowest_of_equals(void **state)
{
    (void)state;
    struct sampler_scratch *scratch = sampler_scratch_create(VOCAB);
    float logits[VOCAB] = {0};
    logits[700] = logits[30] = logits[500] = 2.0f;
    struct sampler_params p;
    sampler_defaults(&p);
    p.temperature = 0;
    assert_int_equal(draw_one(&p, logits, NULL, 0, 0, scratch), 30);
    sampler_scratch_destroy(scratch);
}

/* Which id wins shows what was added to which. */
static void bias_and_penalties(void **state)
{
    (void)state;
    struct sampler_scratch *scratch = sampler_scratch_create(VOCAB);
    float logits[VOCAB] = {0};
    const int32_t ids[] = {10, 10, 11, /* generated: */ 12, 12, 13};
    struct sampler_params p, plain;
    sampler_defaults(&plain);
    plain.temperature = 0;

    logits[1] = 1.0f, logits[2] = 0.5f;
    p = plain, p.bias_count = 1, p.bias[0] = (struct sampler_bias){2, 0.75f};
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 2);
    p.bias[0].bias = 0.25f;
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 1);

    memset(logits, 0, sizeof logits); /* repetition: prompt too, once an id, divided above zero */
    logits[10] = 3.0f, logits[20] = 1.6f;
    p = plain, p.repetition_penalty = 2.0f, p.repetition_window = -1;
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 20);
    logits[20] = 1.4f;
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 10); /* 3 / 2 = 1.5, not 3 / 4 */
    logits[20] = 1.6f, p.repetition_window = 4;
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 10); /* out of the window */
    for (int i = 0; i < VOCAB; i++)
        logits[i] = -5.0f;
    logits[13] = -2.0f, logits[20] = -3.0f, p.repetition_window = 1; /* multiplied below zero */
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 20);

    memset(logits, 0, sizeof logits); /* presence and frequency: generated only */
    logits[10] = 2.0f, logits[12] = 2.9f;
    p = plain, p.presence_penalty = 0.8f;
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 12);
    p.presence_penalty = 1.0f;
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 10);
    p = plain, p.frequency_penalty = 0.44f;
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 12); /* 2.9 - 2 * 0.44 = 2.02 */
    p.frequency_penalty = 0.46f;
    assert_int_equal(draw_one(&p, logits, ids, 6, 3, scratch), 10); /* 1.98 */
    sampler_scratch_destroy(scratch);
}

/* The list for engines that draw: logits changed by it, then drawn from without bias and penalties. */
static void adjustments_as_a_list(void **state)
{
    (void)state;
    enum { COUNT = 400, PROMPT = 150 };
    struct sampler_scratch *scratch = sampler_scratch_create(VOCAB);
    struct sample_adjust list[SAMPLE_ADJUST_MAX];
    float logits[VOCAB], changed[VOCAB];
    int32_t ids[COUNT];
    for (uint32_t round = 0; round < 40; round++) {
        struct sampler_params p, plain;
        struct sampled want, got;
        sampler_defaults(&p);
        p.seed = round, plain = p;
        p.repetition_penalty = 1.5f, p.repetition_window = round % 3 ? 70 : -1;
        p.presence_penalty = 0.5f, p.frequency_penalty = -0.25f;
        p.bias_count = 2, p.bias[0].id = 5, p.bias[0].bias = 2.0f, p.bias[1].id = 999, p.bias[1].bias = -3.0f;
        random_logits(logits, round);
        for (uint32_t i = 0; i < COUNT; i++)
            ids[i] = (int32_t)((i * 2654435761u >> 9) % (i % 2 ? 10 : VOCAB));
        assert_int_equal(sampler_draw(&p, logits, VOCAB, ids, COUNT, PROMPT, scratch, &want), 0);
        int count = sampler_adjust(&p, ids, COUNT, PROMPT, scratch, list);
        assert_true(count > 0);
        memcpy(changed, logits, sizeof logits);
        for (int i = 0; i < count; i++) {
            float *x = &changed[list[i].id];
            *x += list[i].bias;
            if (list[i].repeated)
                *x = *x > 0 ? *x / p.repetition_penalty : *x * p.repetition_penalty;
            *x -= list[i].minus;
        }
        assert_int_equal(sampler_draw(&plain, changed, VOCAB, ids, COUNT, PROMPT, scratch, &got), 0);
        assert_int_equal(got.id, want.id);
    }
    sampler_scratch_destroy(scratch);
    int32_t many[SAMPLE_ADJUST_MAX + 1];
    struct sampler_params p;
    sampler_defaults(&p);
    p.repetition_penalty = 2.0f, p.repetition_window = -1;
    for (int32_t i = 0; i <= SAMPLE_ADJUST_MAX; i++)
        many[i] = i;
    scratch = sampler_scratch_create(SAMPLE_ADJUST_MAX + 1);
    assert_int_equal(sampler_adjust(&p, many, SAMPLE_ADJUST_MAX, 0, scratch, list), SAMPLE_ADJUST_MAX);
    assert_int_equal(sampler_adjust(&p, many, SAMPLE_ADJUST_MAX + 1, 0, scratch, list), -TD_ERR_LIMIT);
    many[7] = -1;
    assert_int_equal(sampler_adjust(&p, many, 20, 0, scratch, list), -TD_ERR_ARG);
    many[7] = 7; /* and nothing was left behind */
    assert_int_equal(sampler_adjust(&p, many, 20, 0, scratch, list), 20);
    sampler_scratch_destroy(scratch);
}

static void logprobs_are_those_of_the_raw_logits(void **state)
{
    (void)state;
    struct sampler_scratch *scratch = sampler_scratch_create(VOCAB);
    float logits[VOCAB];
    random_logits(logits, 77);
    double sum = 0;
    struct candidate c[VOCAB];
    for (int i = 0; i < VOCAB; i++) {
        sum += exp((double)logits[i]);
        c[i] = (struct candidate){i, logits[i], 0};
    }
    qsort(c, VOCAB, sizeof *c, by_logit);
    struct sampler_params p;
    sampler_defaults(&p);
    p.temperature = 0.3f, p.top_k = 3, p.want_logprobs = true, p.logprob_count = SAMPLER_LOGPROBS_MAX;
    p.bias_count = 1, p.bias[0] = (struct sampler_bias){c[0].id, -50.0f}; /* must not show */
    struct sampled out;
    assert_int_equal(sampler_draw(&p, logits, VOCAB, NULL, 0, 0, scratch, &out), 0);
    assert_true(fabs((double)out.logprob - ((double)logits[out.id] - log(sum))) < 1e-5);
    assert_true(out.id != c[0].id);
    assert_int_equal(out.top_count, SAMPLER_LOGPROBS_MAX);
    for (int i = 0; i < SAMPLER_LOGPROBS_MAX; i++) {
        assert_int_equal(out.top[i].id, c[i].id);
        assert_true(fabs((double)out.top[i].logprob - ((double)c[i].logit - log(sum))) < 1e-5);
    }
    sampler_scratch_destroy(scratch);
}

static void bad_input_is_a_code(void **state)
{
    (void)state;
    struct sampler_scratch *scratch = sampler_scratch_create(VOCAB);
    float logits[VOCAB] = {0};
    struct sampler_params p;
    struct sampled out;
    sampler_defaults(&p);
    logits[999] = NAN;
    assert_int_equal(sampler_draw(&p, logits, VOCAB, NULL, 0, 0, scratch, &out), -TD_ERR_FORMAT);
    logits[999] = INFINITY;
    assert_int_equal(sampler_draw(&p, logits, VOCAB, NULL, 0, 0, scratch, &out), -TD_ERR_FORMAT);
    logits[999] = 0;
    assert_int_equal(sampler_draw(&p, logits, VOCAB, (int32_t[]){VOCAB}, 1, 0, scratch, &out), -TD_ERR_ARG);
    assert_int_equal(sampler_draw(&p, logits, VOCAB, (int32_t[]){-1}, 1, 0, scratch, &out), -TD_ERR_ARG);
    p.bias_count = 1, p.bias[0].id = VOCAB;
    assert_int_equal(sampler_draw(&p, logits, VOCAB, NULL, 0, 0, scratch, &out), -TD_ERR_ARG);
    sampler_scratch_destroy(scratch);
    assert_null(sampler_scratch_create(0));
}

static void check_refused(const struct sampler_params *p, const char *field)
{
    struct td_error err = {0};
    assert_int_equal(sampler_check(p, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, field));
}

static void check_names_the_field(void **state)
{
    (void)state;
    struct sampler_params good, p;
    sampler_defaults(&good);
    assert_int_equal(sampler_check(&good, NULL), 0);
    p = good, p.temperature = -0.1f, check_refused(&p, "temperature");
    p = good, p.temperature = NAN, check_refused(&p, "temperature");
    p = good, p.top_p = 1.01f, check_refused(&p, "top_p");
    p = good, p.min_p = -0.01f, check_refused(&p, "min_p");
    p = good, p.top_k = -1, check_refused(&p, "top_k");
    p = good, p.repetition_penalty = 0.0f, check_refused(&p, "repetition_penalty");
    p = good, p.repetition_window = -2, check_refused(&p, "repetition_window");
    p = good, p.presence_penalty = 2.1f, check_refused(&p, "presence_penalty");
    p = good, p.frequency_penalty = -2.1f, check_refused(&p, "frequency_penalty");
    p = good, p.logprob_count = SAMPLER_LOGPROBS_MAX + 1, check_refused(&p, "top_logprobs");
    p = good, p.bias_count = SAMPLER_BIAS_MAX + 1, check_refused(&p, "logit_bias");
    p = good, p.bias_count = 1, p.bias[0].bias = 101.0f, check_refused(&p, "logit_bias");
    p = good, p.bias_count = 1, p.bias[0].id = -1, check_refused(&p, "logit_bias");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(every_cut_draws_what_the_twin_draws),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(nothing_but_the_arguments_matters),
        cmocka_unit_test(greedy_takes_the_lowest_of_equals),
        cmocka_unit_test(bias_and_penalties),
        cmocka_unit_test(adjustments_as_a_list),
        cmocka_unit_test(logprobs_are_those_of_the_raw_logits),
        cmocka_unit_test(bad_input_is_a_code),
        cmocka_unit_test(check_names_the_field),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
