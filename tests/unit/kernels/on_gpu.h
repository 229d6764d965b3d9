/* on_gpu: what the tests of CUDA kernels share: is a GPU here; random values; memory on the device; attention's splits, and what it comes to in
 * double precision. DEVICE_SLACK, where a test defines it: bytes behind each piece of memory that kernels may read. */
#ifndef TANDEM_TESTS_KERNELS_ON_GPU_H
#define TANDEM_TESTS_KERNELS_ON_GPU_H
#include "kernels/cpu/blocks.h"
#include "kernels/cuda/cuda.h"
#include "tests/unit/kernels/small.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

static inline bool gpu_is_here(void) /* or why it is not, which tests/gpu/run.sh reads */
{
    char why[200];
    bool here = cuda_available(why, sizeof why);
    if (!here)
        printf("skipped: %s\n", why);
    return here;
}

/* --- random values ---------------------------------------------------------------------------- */

static uint64_t seed = 88172645463325252u;

/* Other values in each run, or those of TANDEM_SEED. */
static inline void seed_anew(void)
{
    const char *again = getenv("TANDEM_SEED");
    seed = again ? strtoull(again, NULL, 10) : clock_wall_us() | 1;
    printf("TANDEM_SEED=%llu\n", (unsigned long long)seed);
}

static inline uint64_t random64(void)
{
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return seed;
}

static inline uint32_t random32(void)
{
    return (uint32_t)(random64() >> 16);
}

static inline float uniform(void) /* -1 to 1 */
{
    return (float)((double)(random64() >> 11) * 0x1p-52 - 1.0);
}

static inline uint16_t to16(float x, bool bf16)
{
    uint32_t u = float_bits(x);
    return bf16 ? (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16) : f32_to_f16(x);
}

static inline float from16(uint16_t x, bool bf16)
{
    return bf16 ? float_from_bits((uint32_t)x << 16) : f16_to_f32(x);
}

#ifdef TANDEM_HAS_CUDA
#include "kernels/cuda/kernels.h"

/* --- memory ----------------------------------------------------------------------------------- */

#ifndef DEVICE_SLACK
#define DEVICE_SLACK 0
#endif

static inline void *device_filled(int byte, size_t size)
{
    void *p;
    assert_int_equal(cudaMalloc(&p, size + DEVICE_SLACK), cudaSuccess);
    assert_int_equal(cudaMemset(p, byte, size + DEVICE_SLACK), cudaSuccess);
    return p;
}

static inline void *device_copy(const void *host, size_t size)
{
    void *p = device_filled(0xff, size);
    assert_int_equal(cudaMemcpy(p, host, size, cudaMemcpyHostToDevice), cudaSuccess);
    return p;
}

static inline void *device_floats(size_t count)
{
    float *x = malloc(sizeof *x * count);
    for (size_t i = 0; i < count; i++)
        x[i] = uniform();
    void *p = device_copy(x, sizeof *x * count);
    free(x);
    return p;
}

static inline void *device_16(size_t count, bool bf16, float scale)
{
    uint16_t *x = malloc(sizeof *x * count);
    for (size_t i = 0; i < count; i++)
        x[i] = to16(uniform() * scale, bf16);
    void *p = device_copy(x, sizeof *x * count);
    free(x);
    return p;
}

static inline void fetch(void *host, const void *device, size_t size)
{
    assert_int_equal(cuda_launch_error(), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    assert_int_equal(cudaMemcpy(host, device, size, cudaMemcpyDeviceToHost), cudaSuccess);
}

/* --- attention -------------------------------------------------------------------------------- */

/* Those of a row that sees `tokens`, at most so many pages each, behind `at` others in the list. Returns how many there are then. */
static inline uint32_t add_splits(struct cuda_split *list, uint32_t at, uint32_t row, uint32_t table,
                                  uint32_t tokens, uint32_t pages)
{
    uint32_t all = (tokens + 63) / 64, count = (all + pages - 1) / pages;
    for (uint32_t i = 0; i < count; i++)
        list[at + i] = (struct cuda_split){.row = row,
                                           .table = table,
                                           .page_begin = i * pages,
                                           .page_count = TD_MIN(pages, all - i * pages),
                                           .token_count = tokens - i * pages * 64,
                                           .first_split = at,
                                           .split_count = count};
    return at + count;
}

#define REFERENCE_TOKENS 512

struct reference { /* pages: f16 [page][K|V][kv_heads][64][head_dim] */
    const uint16_t *pages;
    const uint32_t *table;
    uint32_t kv_heads, head_dim;
};

/* One query head over the first `tokens`, in double precision. */
static inline void reference_head(const struct reference *r, const uint16_t *q, uint32_t tokens,
                                  uint32_t kv_head, double *out)
{
    size_t head = (size_t)64 * r->head_dim, page = 2 * r->kv_heads * head;
    double p[REFERENCE_TOKENS], max = -1e300, sum = 0;
    assert_true(tokens <= REFERENCE_TOKENS);
    for (uint32_t t = 0; t < tokens; t++) {
        const uint16_t *k = r->pages + r->table[t / 64] * page + kv_head * head + t % 64 * r->head_dim;
        p[t] = 0;
        for (uint32_t i = 0; i < r->head_dim; i++)
            p[t] += (double)f16_to_f32(q[i]) * (double)f16_to_f32(k[i]);
        max = fmax(max, p[t]);
    }
    for (uint32_t t = 0; t < tokens; t++)
        sum += p[t] = exp2(p[t] - max);
    memset(out, 0, sizeof *out * r->head_dim);
    for (uint32_t t = 0; t < tokens; t++) {
        const uint16_t *v =
            r->pages + r->table[t / 64] * page + (r->kv_heads + kv_head) * head + t % 64 * r->head_dim;
        for (uint32_t i = 0; i < r->head_dim; i++)
            out[i] += p[t] / sum * (double)f16_to_f32(v[i]);
    }
}
#endif
#endif
