/* sample: the next token of each row from its logits, on the device: kernels/sampler.h says what a draw is. One block a row.
 *
 * Candidates have the sampler's strict order (logit descending, id ascending), which is the order of one 64-bit number: the logit's bits
 * made to compare like integers, then the id's complement. Top-k, top-p and the draw all ask for the first candidate at which
 * a sum of counts or weights, best first, reaches a goal: `find` finds its number two bits at a time, each time with sums over all
 * candidates. Weights are integers in units of 2^-40 of the best one's, so sums do not depend on their order.
 *
 * bytes: a row of 128,256 logits is 0.5 MB from L2, about 5 us a pass of one block that loads 16 bytes a thread, several at a time, as the
 * first one does, in which the best is found and what is not finite: that is all of a greedy draw. A temperature takes 2 more of
 * 4 bytes, top-k or top-p up to 20; rows run side by side, so this is the time for a whole step. */
#include "device.cuh"
#include "kernels.h"
#include <math_constants.h>

#define THREADS  1024
#define WARPS    (THREADS / 32)
#define LIST_MAX 4096             /* candidates that fit into shared memory */
#define UNIT     1099511627776.0f /* 2^40: the best candidate's weight */
#define LOG2_E   1.4426950408889634f

struct candidates { /* all of a row that are not worse than `bound`, or those of a list */
    const float *logits;
    const uint64_t *list; /* shared, or NULL */
    uint32_t count;       /* of the list, or of the vocabulary */
    uint64_t bound;
    float max, inverse; /* 1 / temperature */
};

struct sample_shared {
    uint64_t sums[WARPS][5];
    float floats[WARPS];
    uint64_t list[LIST_MAX];
    uint32_t list_count, bad;
    float raw[SAMPLE_ADJUST_MAX]; /* logits before they were adjusted */
};

/* --- order and weight ------------------------------------------------------------------------- */

__device__ __forceinline__ uint64_t number_of(float logit, uint32_t id)
{
    uint32_t u = __float_as_uint(logit + 0.0f); /* no -0 */
    u = u & 0x80000000u ? ~u : u | 0x80000000u;
    return (uint64_t)u << 32 | ~id;
}
__device__ __forceinline__ float logit_of(uint64_t number)
{
    uint32_t u = (uint32_t)(number >> 32);
    return __uint_as_float(u & 0x80000000u ? u & 0x7fffffffu : ~u);
}
__device__ __forceinline__ uint32_t id_of(uint64_t number)
{
    return ~(uint32_t)number;
}
__device__ __forceinline__ uint64_t weight_of(const candidates &c, float logit)
{
    return (uint64_t)(expf((logit - c.max) * c.inverse) * UNIT);
}
/* The i-th candidate; 0: it is worse than the bound. */
__device__ __forceinline__ uint64_t candidate(const candidates &c, uint32_t i)
{
    uint64_t n = c.list ? c.list[i] : number_of(c.logits[i], i);
    return n >= c.bound ? n : 0;
}

/* --- over the block --------------------------------------------------------------------------- */

__device__ uint64_t block_add(sample_shared &sh, uint64_t x)
{
    for (int i = 16; i > 0; i /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, i);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        sh.sums[threadIdx.x / 32][0] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < WARPS; w++)
        x += sh.sums[w][0];
    return x;
}

__device__ uint64_t block_max(sample_shared &sh, uint64_t x)
{
    for (int i = 16; i > 0; i /= 2) {
        uint64_t y = __shfl_xor_sync(0xffffffffu, x, i);
        x = x > y ? x : y;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        sh.sums[threadIdx.x / 32][0] = x;
    __syncthreads();
    for (int w = 0; w < WARPS; w++)
        x = x > sh.sums[w][0] ? x : sh.sums[w][0];
    return x;
}

#define NOT_FINITE (~(uint64_t)0) /* no candidate's number */
#define AT_ONCE    8              /* loads of a thread on their way */

/* The best number of a whole row, or NOT_FINITE. */
__device__ uint64_t look_through(sample_shared &sh, const float *logits, uint32_t vocab)
{
    uint32_t whole = vocab % 4 ? 0 : vocab / 4, id = 0;
    float best = -CUDART_INF_F;
    bool bad = false;
    for (uint32_t first = threadIdx.x; first < whole; first += AT_ONCE * THREADS) {
        float4 v[AT_ONCE];
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++)
            v[k] = first + k * THREADS < whole ? __ldcg((const float4 *)logits + first + k * THREADS)
                                               : make_float4(best, best, best, best);
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; k++) {
            float x[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                bad = bad || (first + k * THREADS < whole && !(fabsf(x[i]) <= CUDART_MAX_NORMAL_F));
                if (x[i] > best) /* of equal ones the first */
                    best = x[i], id = 4 * (first + k * THREADS) + i;
            }
        }
    }
    for (uint32_t i = 4 * whole + threadIdx.x; i < vocab; i += THREADS) {
        float x = logits[i];
        bad = bad || !(fabsf(x) <= CUDART_MAX_NORMAL_F);
        if (x > best)
            best = x, id = i;
    }
    return block_max(sh, bad ? NOT_FINITE : best > -CUDART_INF_F ? number_of(best, id) : 0);
}

__device__ uint64_t total_weight(sample_shared &sh, const candidates &c)
{
    uint64_t sum = 0;
    for (uint32_t i = threadIdx.x; i < c.count; i += THREADS) {
        uint64_t n = candidate(c, i);
        sum += n ? weight_of(c, logit_of(n)) : 0;
    }
    return block_add(sh, sum);
}

/* --- finding ---------------------------------------------------------------------------------- */

struct quarters {
    uint64_t sums[4]; /* weight */
    uint32_t counts[4];
};

/* Of the candidates whose number, from bit `shift` on, is prefix * 4 + 0 to 3. */
__device__ quarters sum_quarters(sample_shared &sh, const candidates &c, uint64_t prefix, int shift)
{
    uint64_t sums[4] = {0, 0, 0, 0},
             counts = 0; /* four counts of 16 bits: a warp has fewer than 2^16 candidates */
    for (uint32_t i = threadIdx.x; i < c.count; i += THREADS) {
        uint64_t n = candidate(c, i);
        if (n == 0 || (shift < 62 && n >> (shift + 2) != prefix))
            continue;
        uint64_t w = weight_of(c, logit_of(n));
#pragma unroll
        for (int k = 0; k < 4; k++)
            sums[k] += (n >> shift & 3) == k ? w : 0;
        counts += (uint64_t)1 << (n >> shift & 3) * 16;
    }
    for (int i = 16; i > 0; i /= 2) {
        counts += __shfl_xor_sync(0xffffffffu, counts, i);
#pragma unroll
        for (int k = 0; k < 4; k++)
            sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], i);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        sh.sums[threadIdx.x / 32][4] = counts;
#pragma unroll
        for (int k = 0; k < 4; k++)
            sh.sums[threadIdx.x / 32][k] = sums[k];
    }
    __syncthreads();
    quarters q = {};
    for (int w = 0; w < WARPS; w++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            q.sums[k] += sh.sums[w][k];
            q.counts[k] += (uint32_t)(sh.sums[w][4] >> 16 * k & 0xffff);
        }
    return q;
}

/* The first candidate, best first, at which the sum of weights (or the count) reaches goal: 1 to the sum of all. */
__device__ uint64_t find(sample_shared &sh, const candidates &c, uint64_t goal, bool counts)
{
    uint64_t prefix = 0;
    for (int shift = 62; shift >= 0; shift -= 2) {
        quarters q = sum_quarters(sh, c, prefix, shift);
        uint32_t only = 0;
        int chosen = -1;
#pragma unroll
        for (int k = 3; k >= 0; k--) {
            uint64_t sum = counts ? q.counts[k] : q.sums[k];
            if (chosen < 0 && (k == 0 || sum >= goal))
                chosen = k, only = q.counts[k];
            goal -= chosen < 0 ? sum : 0;
        }
        prefix = prefix << 2 | (uint64_t)chosen;
        if (only == 1) { /* it is the only one there */
            uint64_t found = 0;
            for (uint32_t i = threadIdx.x; i < c.count; i += THREADS) {
                uint64_t n = candidate(c, i);
                found = n && n >> shift == prefix ? n : found;
            }
            return block_max(sh, found);
        }
    }
    return prefix;
}

/* The candidates not worse than bound; into the list, if they are few. */
__device__ void cut(sample_shared &sh, candidates &c, uint64_t bound)
{
    c.bound = c.bound > bound ? c.bound : bound;
    if (c.list)
        return;
    __syncthreads();
    if (threadIdx.x == 0)
        sh.list_count = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < c.count; i += THREADS) {
        uint64_t n = candidate(c, i);
        if (n) {
            uint32_t at = atomicAdd(&sh.list_count, 1);
            if (at < LIST_MAX)
                sh.list[at] = n;
        }
    }
    __syncthreads();
    if (sh.list_count <= LIST_MAX)
        c.list = sh.list, c.count = sh.list_count;
}

/* The first id, in the order of ids, at which the sum of weights reaches goal: candidates of the whole row. */
__device__ uint64_t find_by_id(sample_shared &sh, const candidates &c, uint64_t goal)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = (c.count + THREADS - 1) / THREADS * 32,
             begin = min(warp * part, c.count), end = min(begin + part, c.count);
    uint64_t sum = 0, before = 0;
    for (uint32_t i = begin + lane; i < end; i += 32) {
        uint64_t n = candidate(c, i);
        sum += n ? weight_of(c, logit_of(n)) : 0;
    }
    for (int i = 16; i > 0; i /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, i);
    __syncthreads();
    if (lane == 0)
        sh.sums[warp][0] = sum, sh.sums[warp][1] = 0;
    __syncthreads();
    for (uint32_t w = 0; w < warp; w++)
        before += sh.sums[w][0];
    if (before < goal && before + sum >= goal) /* one warp alone */
        for (uint32_t at = begin; at < end; at += 32) {
            uint64_t n = at + lane < end ? candidate(c, at + lane) : 0, x = n ? weight_of(c, logit_of(n)) : 0;
            for (int i = 1; i < 32; i *= 2) {
                uint64_t y = __shfl_up_sync(0xffffffffu, x, i);
                x += lane >= (uint32_t)i ? y : 0;
            }
            uint32_t reached = __ballot_sync(0xffffffffu, before + x >= goal);
            if (reached) {
                uint64_t found = __shfl_sync(0xffffffffu, n, __ffs((int)reached) - 1);
                if (lane == 0)
                    sh.sums[0][1] = found;
                break;
            }
            before += __shfl_sync(0xffffffffu, x, 31);
        }
    __syncthreads();
    return sh.sums[0][1];
}

/* --- the draw --------------------------------------------------------------------------------- */

/* Bias, repetition, presence and frequency; what was there before is kept in sh.raw. */
__device__ void adjust(sample_shared &sh, const cuda_sample &s, float *logits)
{
    for (uint32_t i = threadIdx.x; i < s.adjust_count; i += THREADS) {
        sample_adjust a = s.adjust[i];
        float x = logits[a.id];
        sh.raw[i] = x;
        x += a.bias;
        if (a.repeated)
            x = x > 0.0f ? x / s.repetition_penalty : x * s.repetition_penalty;
        x -= a.minus;
        if (!(fabsf(x) <= CUDART_MAX_NORMAL_F))
            sh.bad = 1;
        logits[a.id] = x;
    }
    __syncthreads();
}

/* best: of the row as it is now. */
__device__ uint64_t draw(sample_shared &sh, const cuda_sample &s, const float *logits, uint32_t vocab,
                         uint64_t best)
{
    candidates c = {logits, nullptr, vocab, 1, 0.0f, s.inverse};
    if (s.inverse == 0.0f) /* greedy */
        return best;
    c.max = logit_of(best);
    bool listed = s.top_k > 0 && s.top_k < vocab;
    if (listed)
        cut(sh, c, find(sh, c, s.top_k, true));
    uint64_t total = total_weight(sh, c);
    if (s.top_p < 1.0f) {
        double goal = ceil((double)s.top_p * (double)total);
        cut(sh, c, find(sh, c, max((uint64_t)goal, (uint64_t)1), false));
        listed = true, total = total_weight(sh, c);
    }
    if (s.min_p > 0.0f) { /* by weight alone: the worst number of the least logit that is heavy enough */
        uint64_t least = ~(uint64_t)0;
        for (uint32_t i = threadIdx.x; i < c.count; i += THREADS) {
            uint64_t n = candidate(c, i);
            if (n && expf((logit_of(n) - c.max) * c.inverse) >= s.min_p)
                least = least < n ? least : n;
        }
        c.bound = max(c.bound, ~block_max(sh, ~least));
        total = total_weight(sh, c);
    }
    uint64_t goal = min((uint64_t)(s.uniform * (double)total), total - 1) + 1;
    return listed ? find(sh, c, goal, false) : find_by_id(sh, c, goal);
}

/* --- logprobs --------------------------------------------------------------------------------- */

/* Of the row as it came: log of the sum of exponentials, and the best. */
__device__ float report(sample_shared &sh, const cuda_sample &s, const float *logits, uint32_t vocab,
                        uint64_t best_number, cuda_sampled &out)
{
    candidates c = {logits, nullptr, vocab, 1, logit_of(best_number), 1.0f};
    double log_sum = log((double)total_weight(sh, c) / (double)UNIT) + (double)c.max;
    uint64_t before = ~(uint64_t)0;
    for (uint32_t i = 0; i < s.top_count; i++) { /* 20 at most */
        uint64_t best = 0;
        for (uint32_t k = threadIdx.x; k < vocab; k += THREADS) {
            uint64_t n = number_of(logits[k], k);
            best = n < before && n > best ? n : best;
        }
        before = block_max(sh, best);
        if (threadIdx.x == 0) {
            out.top_id[i] = (int32_t)id_of(before);
            out.top_logprob[i] = (float)((double)logit_of(before) - log_sum);
        }
    }
    return (float)log_sum;
}

__device__ float raw_logit(const sample_shared &sh, const cuda_sample &s, const float *logits, uint32_t id)
{
    for (uint32_t i = 0; i < s.adjust_count; i++)
        if ((uint32_t)s.adjust[i].id == id)
            return sh.raw[i];
    return logits[id];
}

__global__ void __launch_bounds__(THREADS) sample_kernel(const cuda_sample *samples, const uint8_t *lists,
                                                         float *logits, uint32_t vocab, cuda_sampled *out)
{
    extern __shared__ __align__(16) uint8_t memory[];
    sample_shared &sh = *reinterpret_cast<sample_shared *>(memory);
    cuda_sample s = samples[blockIdx.x];
    float *row = logits + (uint64_t)blockIdx.x * vocab, log_sum = 0.0f;
    cuda_sampled &o = out[blockIdx.x];
    s.adjust = (const sample_adjust *)(lists + s.adjust_at);
    if (!s.wanted)
        return;
    uint64_t best = look_through(sh, row, vocab);
    bool bad = best == NOT_FINITE;
    if (threadIdx.x == 0)
        sh.bad = bad;
    __syncthreads();
    if (!bad && s.wants_logprob)
        log_sum = report(sh, s, row, vocab, best, o);
    if (!bad && s.adjust_count > 0) {
        adjust(sh, s, row);
        best = look_through(sh, row, vocab);
    }
    if (bad || sh.bad) {
        if (threadIdx.x == 0)
            o.id = -1;
        return;
    }
    uint64_t chosen = draw(sh, s, row, vocab, best);
    if (threadIdx.x == 0) {
        o.id = (int32_t)id_of(chosen);
        o.logprob = s.wants_logprob ? raw_logit(sh, s, row, id_of(chosen)) - log_sum : 0.0f;
    }
}

void cuda_sample_rows(cudaStream_t s, const struct cuda_sample *samples, const void *lists, float *logits,
                      uint32_t rows, uint32_t vocab, struct cuda_sampled *out)
{
    cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)sizeof(sample_shared));
    launch(sample_kernel, dim3(rows), dim3(THREADS), sizeof(sample_shared), s, samples,
           (const uint8_t *)lists, logits, vocab, out);
}
