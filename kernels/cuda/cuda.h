/* cuda: the engine on an NVIDIA GPU, behind the interface of kernels/backend.h.
 *
 * Numbers: cuda-fast, or cuda-det-v2 where config->deterministic asks for it (det_product.cu). Products take 16-bit
 * operands and add in f32: bf16 where a weight is BF16, f16 otherwise; the residual stream, norms, softmax and logits are f32; K and V are f16 as in the page, or what its 8 bits
 * stand for (kernels/kv_dtype.h), with numerics of their own. Libraries choose their
 * own order of sums, so results of cuda-fast may differ in the last bits between batch sizes; and with 3 to 64 rows of 16-bit weights, where
 * several blocks add to one value as they come (product_hopper.cu), between runs.
 *
 * In a build without CUDA, and on a machine without a GPU or its driver, all functions are still there and say why
 * nothing can be made. The library for large products (cuBLASLt) is opened when the first engine is made; without
 * it the engine works through its own products and is slower with many rows.
 *
 * Ownership and threads: as backend.h says; an engine's thread must be the one that uses it. */
#ifndef TANDEM_KERNELS_CUDA_CUDA_H
#define TANDEM_KERNELS_CUDA_CUDA_H
#include "kernels/backend.h"

/* Is there a GPU that the engine runs on? Otherwise `why` holds one line. */
bool cuda_available(char *why, size_t size);

/* device: "cuda" or "cuda:N". Everything is allocated here: weights, pages and working memory; an error says how much of it would
 * fit. config->page_count 0: as many pages as fit. config->threads: of copies on the host, at most 8; config->isa is not used. */
int cuda_backend_create(const struct model *m, const struct backend_config *config, const char *device,
                        struct backend **out, struct td_error *err);

/* What the driver says of a GPU now; false where it says nothing, or not all (what is not known is 0). Any thread. */
struct cuda_gpu {
    double busy, memory_busy; /* share of the last moments with a kernel, with memory traffic */
    uint64_t memory_used, memory_total;
    double power_watts;
    uint32_t sm_mhz, memory_mhz, celsius;
};
bool cuda_gpu_read(int device, struct cuda_gpu *out);
/* Where the time of steps goes, in seconds since the engine was made. Idle: no step is on its way. Parts are of the passes that were
 * looked at, one in 256, which are longer than others. backend: one of cuda_backend_create. Any thread. */
enum cuda_part {
    CUDA_PART_LAYERS, /* all layers in one kernel: few rows are not told apart */
    CUDA_PART_PRODUCTS,
    CUDA_PART_ATTENTION,
    CUDA_PART_OTHER, /* embedding, norms, RoPE and the KV write, SwiGLU where it is alone */
    CUDA_PART_SAMPLING,
    CUDA_PART_COPIES,
    CUDA_PARTS
};
struct cuda_profile {
    uint64_t steps, looked_at;
    double busy_s, idle_s, part_s[CUDA_PARTS];
};
void cuda_profile_read(const struct backend *backend, struct cuda_profile *out);
/* Look at every pass from here on, or at one in 256 again. The engine's thread. */
void cuda_profile_every(struct backend *backend, bool every);
/* The last step, a recorded one, `count` times with nothing of the host in between: the milliseconds of one; 0 where it is not recorded. A
 * recorded step of another shape would take what the last one left for its lists. The engine's thread. */
double cuda_replay_ms(struct backend *backend, uint32_t count);
int cuda_device_number(const char *name); /* of "cuda" and "cuda:N"; -1: something else */

/* What the device can do at best, measured now: medians of a few runs. A rate that could not be measured is 0. */
struct cuda_ceilings {
    double read_gb_s, copy_gb_s; /* 8 GiB; a copy's bytes count twice */
    double matmul_tflop_s;       /* bf16, 8192^3, random values, through cuBLASLt */
    double to_device_gb_s;       /* 256 MiB from pinned memory */
};
int cuda_measure_ceilings(const char *device, struct cuda_ceilings *out, struct td_error *err);

#endif
