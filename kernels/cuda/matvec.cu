/* matvec: products with few rows (1 to 16): the decode step's, and any batch's where no library is there.
 *
 * out[R][N] = act[R][K] * W[N][K]^T. The tensor cores do it with the weights as A: a tile is 16 rows of W by 16 columns, and the
 * R rows of act are the 8 (or 16) columns of B. Each lane loads 16 bytes of a row of W at a time, straight from memory to
 * registers; which k a register stands for does not matter to a sum, so the same k is loaded for B and nothing is shuffled.
 *
 * grid: a block for each 16 rows of W (with CUDA_SWIGLU16, 16 of gate and 16 of up); its 8 warps share K.
 * bytes: all of W once (+ R * K * 2 of act, from L2), flops 2 * R * N * K: memory-bound, 0.25 of a tensor-core instruction a
 * 16-byte load for bf16. Predicted: the read rate of the card for matrices over 30 MB; small ones pay for their start. */
#include "early.cuh"
#include "matvec.cuh"

/* PARTS = 2: warps 0 to 3 take the gate's tile, 4 to 7 the one of up. */
template <cuda_form F, bool BF16, int NT, int PARTS>
__global__ void __launch_bounds__(MATVEC_THREADS, 2) matvec_kernel(cuda_product p)
{
    constexpr int SHARERS = MATVEC_WARPS / PARTS, COLUMNS = 8 * NT, units = stage<F>::units;
    __shared__ float sums[MATVEC_WARPS][COLUMNS][17];
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, part = warp / SHARERS,
             sharer = warp % SHARERS, rows = p.m.rows / PARTS, tile = blockIdx.x * 16;
    lane_rows lr;
    lr.columns = p.m.columns, lr.q = lane % 4;
    for (int i = 0; i < 2; i++) {
        uint64_t n = min(tile + g + 8 * i, rows - 1) +
                     (uint64_t)part * rows; /* rows behind the last are not written */
        lr.w[i] = (const uint8_t *)p.m.values + n * ((uint64_t)p.m.columns * 16 / form_of<F>::values);
        constexpr int group = form_of<F>::group ? form_of<F>::group : 1;
        lr.scales[i] = (const uint8_t *)p.m.scales +
                       (form_of<F>::group ? n * (p.m.columns / group) * form_of<F>::scale : 0);
    }
    uint32_t spans = (p.m.columns + SPAN - 1) / SPAN, step = SHARERS * units, span = sharer * units;
    stage<F> now, next;
    early_start();
    load_stage<F>(now, lr, span);
    early_wait();
    const uint16_t *act[NT];
#pragma unroll
    for (int t = 0; t < NT; t++)
        act[t] =
            g + 8 * t < p.rows ? (const uint16_t *)p.act + (uint64_t)(g + 8 * t) * p.act_stride : nullptr;
    float acc[NT][4] = {};
    for (; span < spans; span += 2 * step) {
        load_stage<F>(next, lr, span + step);
        use_stage<F, BF16, NT>(acc, now, lr, span, act);
        load_stage<F>(now, lr, span + 2 * step);
        use_stage<F, BF16, NT>(acc, next, lr, span + step, act);
    }
#pragma unroll
    for (int t = 0; t < NT; t++)
        for (int i = 0; i < 4; i++)
            sums[warp][8 * t + 2 * lr.q + i % 2][g + 8 * (i / 2)] = acc[t][i];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 16 * p.rows; i += MATVEC_THREADS) {
        uint32_t n = i % 16, r = i / 16;
        float total[2] = {0.0f, 0.0f};
        for (int w = 0; w < MATVEC_WARPS; w++)
            total[w / SHARERS] += sums[w][r][n];
        if (tile + n < rows)
            write_out<BF16>(p, r, tile + n, total[0], total[1]);
    }
}

/* --- launching -------------------------------------------------------------------------------- */

template <cuda_form F, bool BF16> static void launch_form(cudaStream_t s, const cuda_product &p)
{
    bool pair = p.epilogue == CUDA_SWIGLU16, wide = p.rows > 8;
    uint32_t rows = pair ? p.m.rows / 2 : p.m.rows;
    void (*kernel)(cuda_product) = pair   ? wide ? matvec_kernel<F, BF16, 2, 2> : matvec_kernel<F, BF16, 1, 2>
                                     : wide ? matvec_kernel<F, BF16, 2, 1>
                                          : matvec_kernel<F, BF16, 1, 1>;
    launch_early(kernel, dim3((rows + 15) / 16), dim3(MATVEC_THREADS), 0, s, 1, p);
}

void cuda_matvec(cudaStream_t s, const struct cuda_product *p)
{
    switch (p->m.form) {
    case CUDA_F32:
        launch_form<CUDA_F32, false>(s, *p);
        break;
    case CUDA_F16:
        launch_form<CUDA_F16, false>(s, *p);
        break;
    case CUDA_BF16:
        if (p->act_bf16)
            launch_form<CUDA_BF16, true>(s, *p);
        else
            launch_form<CUDA_BF16, false>(s, *p);
        break;
    case CUDA_W4:
        launch_form<CUDA_W4, false>(s, *p);
        break;
    case CUDA_W8:
        launch_form<CUDA_W8, false>(s, *p);
        break;
    case CUDA_W8D:
        launch_form<CUDA_W8D, false>(s, *p);
        break;
    case CUDA_W8G16:
        launch_form<CUDA_W8G16, false>(s, *p);
        break;
    }
}
