/* cuda_sample: the device draws the token that the sampler draws, for every parameter and kind of row; and reports the same
 * logprobs. Skipped where no GPU is. */
#include "kernels/sampler.h"
#include "tests/unit/kernels/on_gpu.h"

#ifdef TANDEM_HAS_CUDA
enum { ROWS = 6, IDS = 300, PROMPT = 200 };

static double draw(void) /* 0 to 1 */
{
    return (double)(random64() >> 11) * 0x1p-53;
}

/* Rows of different kinds: flat, peaked, with many equal logits, all equal. */
static void fill_row(float *row, uint32_t vocab, uint32_t kind)
{
    for (uint32_t i = 0; i < vocab; i++) {
        double x = draw() + draw() + draw() - 1.5;
        row[i] = kind == 0   ? (float)x
                 : kind == 1 ? (float)(8 * x)
                 : kind == 2 ? (float)round(4 * x)
                 : kind == 3 ? 0.5f
                             : (float)(30 * x);
    }
}

static struct cuda_sample made_ready(const struct sampler_params *p, uint64_t index, size_t adjust_at,
                                     int count)
{
    return (struct cuda_sample){.wanted = true,
                                .wants_logprob = p->want_logprobs,
                                .inverse = p->temperature == 0 ? 0 : 1 / p->temperature,
                                .top_k = (uint32_t)p->top_k,
                                .top_count = p->logprob_count,
                                .top_p = p->top_p,
                                .min_p = p->min_p,
                                .repetition_penalty = p->repetition_penalty,
                                .uniform = sampler_uniform(p->seed, index),
                                .adjust_at = adjust_at,
                                .adjust_count = (uint32_t)count};
}

static void compare(const struct sampled *want, const struct cuda_sampled *got,
                    const struct sampler_params *p, uint32_t vocab, uint32_t row)
{
    if (got->id != want->id)
        fail_msg("vocabulary %u, row %u, temperature %g, top_k %d, top_p %g, min_p %g: token %d, the "
                 "sampler's is %d",
                 vocab, row, (double)p->temperature, p->top_k, (double)p->top_p, (double)p->min_p, got->id,
                 want->id);
    if (!p->want_logprobs)
        return;
    assert_true(fabs((double)got->logprob - (double)want->logprob) < 1e-4);
    for (uint32_t i = 0; i < want->top_count; i++) {
        assert_int_equal(got->top_id[i], want->top[i].id);
        assert_true(fabs((double)got->top_logprob[i] - (double)want->top[i].logprob) < 1e-4);
    }
}

static void draw_rows(uint32_t vocab, const struct sampler_params *p)
{
    size_t row_size = sizeof(float) * vocab, list_size = sizeof(struct sample_adjust) * SAMPLE_ADJUST_MAX;
    float *logits = malloc(row_size * ROWS);
    struct sampler_scratch *scratch = sampler_scratch_create(vocab);
    struct sample_adjust *lists = calloc(ROWS, list_size);
    struct cuda_sample samples[ROWS] = {{0}};
    struct cuda_sampled got[ROWS];
    struct sampled want[ROWS];
    int32_t ids[IDS];
    for (uint32_t i = 0; i < IDS; i++)
        ids[i] = (int32_t)(draw() * draw() * vocab);
    for (uint32_t r = 0; r < ROWS - 1; r++) { /* the last is not wanted */
        float *row = logits + (size_t)r * vocab;
        fill_row(row, vocab, r);
        size_t count = IDS - r;
        assert_int_equal(sampler_draw(p, row, vocab, ids, count, PROMPT, scratch, &want[r]), 0);
        int adjusted = sampler_adjust(p, ids, count, PROMPT, scratch, lists + (size_t)r * SAMPLE_ADJUST_MAX);
        assert_true(adjusted >= 0);
        samples[r] = made_ready(p, count - PROMPT, r * list_size, adjusted);
    }
    fill_row(logits + (size_t)(ROWS - 1) * vocab, vocab, 0);
    float *device, *after = malloc(row_size);
    void *device_lists;
    struct cuda_sample *device_samples;
    struct cuda_sampled *device_got;
    assert_int_equal(cudaMalloc((void **)&device, row_size * ROWS), cudaSuccess);
    assert_int_equal(cudaMalloc(&device_lists, list_size * ROWS), cudaSuccess);
    assert_int_equal(cudaMalloc((void **)&device_samples, sizeof samples), cudaSuccess);
    assert_int_equal(cudaMalloc((void **)&device_got, sizeof got), cudaSuccess);
    cudaMemcpy(device, logits, row_size * ROWS, cudaMemcpyHostToDevice);
    cudaMemcpy(device_lists, lists, list_size * ROWS, cudaMemcpyHostToDevice);
    cudaMemcpy(device_samples, samples, sizeof samples, cudaMemcpyHostToDevice);
    cudaMemset(device_got, 0xff, sizeof got);
    cuda_sample_rows(0, device_samples, device_lists, device, ROWS, vocab, device_got);
    assert_int_equal(cudaMemcpy(got, device_got, sizeof got, cudaMemcpyDeviceToHost), cudaSuccess);
    cudaMemcpy(after, device + (size_t)(ROWS - 1) * vocab, row_size, cudaMemcpyDeviceToHost);
    for (uint32_t r = 0; r < ROWS - 1; r++)
        compare(&want[r], &got[r], p, vocab, r);
    assert_memory_equal(after, logits + (size_t)(ROWS - 1) * vocab, row_size);
    cudaFree(device), cudaFree(device_lists), cudaFree(device_samples), cudaFree(device_got);
    free(logits), free(lists), free(after), sampler_scratch_destroy(scratch);
}

static void the_samplers_tokens(void **state)
{
    (void)state;
    static const uint32_t vocabs[] = {1000, 1, 33, 5000, 128256};
    static const struct {
        float temperature, top_p, min_p;
        int32_t top_k;
    } kinds[] = {{0, 1, 0, 0},
                 {1, 1, 0, 0},
                 {0.7f, 0.9f, 0, 0},
                 {1, 1, 0, 40},
                 {1.5f, 0.95f, 0, 50},
                 {1, 1, 0.05f, 0},
                 {1, 0.5f, 0.1f, 7},
                 {1, 0.999f, 0, 0},
                 {1e-6f, 0.9f, 0, 0},
                 {2, 1, 0.3f, 4500},
                 {1, 1e-9f, 0, 0},
                 {1, 1, 1, 0},
                 {100, 0.99f, 0, 100000},
                 {0.9f, 0.8f, 0, 3000},
                 {1, 1, 0, 1}};
    for (size_t v = 0; v < small_or(1, TD_COUNT(vocabs)); v++)
        for (size_t k = 0; k < small_or(3, TD_COUNT(kinds)); k++) {
            struct sampler_params p;
            sampler_defaults(&p);
            p.temperature = kinds[k].temperature, p.top_p = kinds[k].top_p, p.min_p = kinds[k].min_p;
            p.top_k = kinds[k].top_k, p.seed = 1000 * v + k;
            draw_rows(vocabs[v], &p);
            p.want_logprobs = true, p.logprob_count = k % 2 && vocabs[v] > 20 ? 20 : 0;
            p.repetition_penalty = 1.2f, p.repetition_window = 100;
            p.presence_penalty = 0.3f, p.frequency_penalty = 0.2f;
            p.bias_count = 2, p.bias[0].id = 0, p.bias[0].bias = 3.0f;
            p.bias[1].id = (int32_t)vocabs[v] - 1, p.bias[1].bias = -100.0f;
            draw_rows(vocabs[v], &p);
        }
}

static void what_is_not_finite(void **state)
{
    (void)state;
    float row[64] = {0}, *device;
    struct cuda_sample sample = {.wanted = true, .inverse = 1, .top_p = 1, .repetition_penalty = 1}, *samples;
    struct cuda_sampled got, *out;
    row[63] = NAN;
    cudaMalloc((void **)&device, sizeof row), cudaMalloc((void **)&samples, sizeof sample);
    cudaMalloc((void **)&out, sizeof got);
    cudaMemset(out, 0, sizeof got);
    cudaMemcpy(device, row, sizeof row, cudaMemcpyHostToDevice);
    cudaMemcpy(samples, &sample, sizeof sample, cudaMemcpyHostToDevice);
    cuda_sample_rows(0, samples, samples, device, 1, 64, out);
    assert_int_equal(cudaMemcpy(&got, out, sizeof got, cudaMemcpyDeviceToHost), cudaSuccess);
    assert_int_equal(got.id, -1);
    cudaFree(device), cudaFree(samples), cudaFree(out);
}

int main(void)
{
    if (!gpu_is_here())
        return 0;
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_samplers_tokens),
                                       cmocka_unit_test(what_is_not_finite)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
int main(void)
{
    gpu_is_here();
    return 0;
}
#endif
