/* backend: makes and unmakes the CUDA backend: the device chosen, memory planned and taken once, weights copied. */
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/det_kernels.h"
#include "kernels/cpu/numerics.h"
#include "shared/log.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MIB            ((uint64_t)1 << 20)
#define RESERVE        (512 * MIB) /* for the driver, the library's workspace and the loading buffer */
#define MEMORY_SHARE   0.9
#define PAGES_MAX      ((uint64_t)1 << 24)
#define SCRATCH_MAX    (256 * MIB)
#define COPY_THREADS   8u
#define CAPABILITY     80    /* the oldest device that the kernels are built for */
#define WIDTH_MAX      16384 /* of a normed row: norm_kernel keeps it in registers */
#define MATVEC_ROWS_16 8     /* with more, cuBLASLt is faster on 16-bit weights, */
/* and with more than these a stream of them (product_hopper.cu), where there is one */
#define STREAM_ROWS_16 2

/* --- the device ------------------------------------------------------------------------------- */

int cuda_failed(struct cuda_backend *b, int code, const char *what, const char *why)
{
    int before = 0;
    cudaError_t launch =
        cuda_launch_error(); /* what failed in front of this is why: a recording is void behind it */
    if (launch)
        what = "launching kernels", why = cudaGetErrorString(launch);
    if (!__atomic_compare_exchange_n(&b->failed, &before, code, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return before;
    log_error("cuda", "%s on cuda:%d failed: %s", what, b->device, why);
    return code;
}

int cuda_note(struct cuda_backend *b, cudaError_t rc, const char *what)
{
    int code = rc == cudaErrorMemoryAllocation ? -TD_ERR_NOMEM : -TD_ERR_INTERNAL;
    return rc ? cuda_failed(b, code, what, cudaGetErrorString(rc)) : 0;
}

/* Nobody may be computing when the device is lost: it is asked, by a stream that is never being recorded. */
static int cuda_state(const struct backend *base)
{
    struct cuda_backend *b = (struct cuda_backend *)(uintptr_t)base;
    cudaError_t rc = cuda_code(b) ? cudaSuccess : cudaSetDevice(b->device);
    if (!rc && !cuda_code(b))
        rc = cuda_swaps_query(b);
    if (rc && rc != cudaErrorNotReady)
        cuda_note(b, rc, "looking at the device");
    return cuda_code(b);
}

static bool device_fits(int device, char *why, size_t size)
{
    int major = 0, minor = 0;
    cudaError_t rc = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (!rc)
        rc = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (rc)
        snprintf(why, size, "cuda:%d does not answer: %s", device, cudaGetErrorString(rc));
    else if (major * 10 + minor < CAPABILITY)
        snprintf(why, size, "cuda:%d has compute capability %d.%d; %d.%d is needed", device, major, minor,
                 CAPABILITY / 10, CAPABILITY % 10);
    return !rc && major * 10 + minor >= CAPABILITY;
}

/* The runtime calls no driver one that is too old. */
static bool has_driver(void)
{
    int version = 0;
    return cudaDriverGetVersion(&version) != cudaSuccess || version != 0;
}

static int device_total(char *why, size_t size)
{
    int count = 0;
    cudaError_t rc = cudaGetDeviceCount(&count);
    if (rc || count == 0)
        snprintf(why, size, "no GPU: %s",
                 !has_driver() ? "no NVIDIA driver on this machine"
                 : rc          ? cudaGetErrorString(rc)
                               : "no device was found");
    return rc ? 0 : count;
}

bool cuda_available(char *why, size_t size)
{
    return device_total(why, size) > 0 && device_fits(0, why, size);
}

int cuda_device_number(const char *name)
{
    char *end;
    if (strcmp(name, "cuda") == 0)
        return 0;
    if (strncmp(name, "cuda:", 5) != 0 || name[5] < '0' || name[5] > '9')
        return -1;
    errno = 0;
    long n = strtol(name + 5, &end, 10);
    return errno || *end || n > 1023 ? -1 : (int)n;
}

static int open_device(struct cuda_backend *b, const char *name, struct td_error *err)
{
    char why[160];
    int count = device_total(why, sizeof why);
    b->device = cuda_device_number(name);
    if (b->device < 0)
        return td_fail(err, -TD_ERR_ARG, "cannot start an engine on '%s': write cuda or cuda:N", name);
    if (count > 0 && b->device >= count)
        return td_fail(err, -TD_ERR_NOTFOUND,
                       "cannot start the engine on %s: this machine has %d GPUs, from cuda:0", name, count);
    if (count == 0 || !device_fits(b->device, why, sizeof why))
        return td_fail(err, -TD_ERR_UNSUPPORTED,
                       "cannot start the engine on %s: %s; use the CPU (--device cpu)", name, why);
    cudaError_t rc = cudaSetDevice(b->device);
    if (!rc)
        rc = cudaDeviceGetAttribute(&b->sm_count, cudaDevAttrMultiProcessorCount, b->device);
    if (!rc)
        rc = cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking);
    int shared = 0;
    if (!rc)
        rc = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, b->device);
    if (rc)
        return td_fail(err, -TD_ERR_INTERNAL, "cannot start the engine on %s: %s", name,
                       cudaGetErrorString(rc));
    if (b->deterministic && shared < CUDA_DET_SHARED)
        return td_fail(
            err, -TD_ERR_UNSUPPORTED,
            "cannot start the engine on %s: --deterministic takes %d KiB of shared memory a block, this "
            "device has %d; start without it",
            name, CUDA_DET_SHARED / 1024, shared / 1024);
    return 0;
}

/* --- memory ----------------------------------------------------------------------------------- */

/* Zeroed once. */
static uint64_t counters_size(const struct cuda_backend *b)
{
    const struct model_params *p = &b->base.model->params;
    struct cuda_attention a = {.head_count = p->head_count, .kv_head_count = p->kv_head_count};
    return cuda_counters_size(&a, b->rows_max);
}

/* 8-bit pages are opened for prompts: so many of one layer as the longest sequence has. Decided when the number of pages is. */
static uint64_t opened_of(const struct cuda_backend *b, uint64_t pages)
{
    const struct model_params *p = &b->base.model->params;
    return cuda_is_8bit(b) ? TD_MIN(pages, (uint64_t)p->context_max / KV_BLOCK_TOKENS + 1) : 0;
}

static uint64_t opened_size(const struct cuda_backend *b) /* of one */
{
    return (uint64_t)4 * cuda_kv_size(&b->base.model->params) * KV_BLOCK_TOKENS;
}

static void carve_work(struct cuda_backend *b, struct cuda_carver *c, uint64_t scratch_size)
{
    const struct model_params *p = &b->base.model->params;
    uint64_t rows = b->rows_max, embd = p->embd_size, q = cuda_q_size(p), qkv = q + 2 * cuda_kv_size(p),
             ffn = p->ffn_size;
    struct cuda_attention a = {
        .head_count = p->head_count, .kv_head_count = p->kv_head_count, .head_dim = p->head_dim};
    b->x = cuda_carve(c, 4 * rows * embd);
    b->x_kept = cuda_carve(c, 4 * rows * embd);
    b->cos_sin = cuda_carve(c, 4 * rows * p->rope_dim);
    b->act = cuda_carve(c, 2 * rows * TD_MAX(TD_MAX(embd, q), ffn));
    b->wide = cuda_carve(c, 2 * rows * TD_MAX(qkv, 2 * ffn));
    b->q = cuda_carve(c, 2 * rows * q);
    b->logits = cuda_carve(c, b->has_head ? 4 * TD_MIN(rows, (uint64_t)LOGIT_ROWS) * p->vocab_count : 0);
    b->partial = cuda_carve(c, cuda_partial_size(&a, cuda_splits_max(b)));
    b->counters = cuda_carve(c, counters_size(b));
    struct cuda_step step = {
        .rows = TD_MIN(b->rows_max, (uint32_t)CUDA_STEP_ROWS),
        .embd = p->embd_size,
        .ffn = p->ffn_size,
        .rope = {.head_count = p->head_count, .kv_head_count = p->kv_head_count, .head_dim = p->head_dim},
        .split_grid = STEP_SPLITS};
    b->letters_size = cuda_step_letters(&step);
    b->letters = cuda_carve(c, b->letters_size);
    b->step_layers = cuda_carve(c, sizeof *b->step_layers * b->base.layers_paged);
    b->frequencies = cuda_carve(c, sizeof(double) * p->rope_dim / 2);
    b->stage_device = cuda_carve(c, b->stage_size);
    b->det_act =
        b->deterministic
            ? cuda_carve(c, cuda_det_act_size((uint32_t)rows, (uint32_t)TD_MAX(TD_MAX(embd, q), ffn)))
            : NULL;
    b->opened = cuda_carve(c, b->opened_max * opened_size(b));
    b->scratch = cuda_carve(c, scratch_size);
    b->scratch_rows_size = scratch_size;
}

struct plan { /* bytes on the device */
    uint64_t weights, work, scratch, page;
};

/* Bytes that may still be taken: so much of the device's memory is in use in the end, what others hold included. */
static int memory_left(const struct cuda_backend *b, uint64_t *left, struct td_error *err)
{
    size_t available = 0, total = 0;
    if (cudaMemGetInfo(&available, &total))
        return td_fail(err, -TD_ERR_INTERNAL,
                       "cannot start the engine on cuda:%d: its memory cannot be asked for", b->device);
    double share = b->config->memory_share > 0 ? b->config->memory_share : MEMORY_SHARE;
    uint64_t limit = (uint64_t)((double)total * share), used = total - available;
    *left = limit > used ? TD_MIN(limit - used, (uint64_t)available) : 0;
    return 0;
}

/* Pages that so many bytes hold, with room to open them. */
static uint64_t pages_in(const struct cuda_backend *b, const struct plan *plan, uint64_t size)
{
    uint64_t most = opened_of(b, PAGES_MAX), each = plan->page + opened_size(b);
    return TD_MIN(size > most * each ? (size - most * opened_size(b)) / plan->page : size / each, PAGES_MAX);
}

static int choose_pages(struct cuda_backend *b, const struct plan *plan, struct td_error *err)
{
    uint64_t left = 0, fixed = plan->weights + plan->work + RESERVE;
    int rc = memory_left(b, &left, err);
    if (rc)
        return rc;
    uint64_t fits = left > fixed ? pages_in(b, plan, left - fixed) : 0;
    if (fits == 0)
        return td_fail(
            err, -TD_ERR_NOMEM,
            "cannot start the engine on cuda:%d: weights (%llu MiB) and working memory (%llu MiB for "
            "steps of %u rows) leave no room for KV pages in the %llu MiB that may be used; it takes %llu "
            "MiB: "
            "use a smaller model, smaller steps (--token-budget) or more of the memory "
            "(--gpu-memory-utilization)",
            b->device, (unsigned long long)(plan->weights / MIB), (unsigned long long)(plan->work / MIB),
            b->rows_max, (unsigned long long)(left / MIB),
            (unsigned long long)((fixed + plan->page) / MIB + 1));
    if (b->base.page_count > fits)
        return td_fail(err, -TD_ERR_NOMEM,
                       "cannot start the engine on cuda:%d: %u KV pages of %llu KiB do not fit beside the "
                       "weights in the %llu MiB that may be used; at most %llu pages do, take fewer",
                       b->device, b->base.page_count, (unsigned long long)(plan->page / 1024),
                       (unsigned long long)(left / MIB), (unsigned long long)fits);
    if (b->base.page_count == 0)
        b->base.page_count = (uint32_t)fits;
    return 0;
}

static int plan_memory(struct cuda_backend *b, struct plan *plan, struct td_error *err)
{
    struct cuda_carver c = {NULL, 0};
    int rc = cuda_place_weights(b, &c, 0, &plan->scratch, err);
    if (rc)
        return rc;
    plan->weights = c.used;
    plan->scratch = b->deterministic ? SCRATCH_MAX : TD_MIN(plan->scratch, SCRATCH_MAX);
    b->stage_size = cuda_stage_size(b);
    c = (struct cuda_carver){NULL, 0};
    carve_work(b, &c, plan->scratch);
    plan->work = c.used;
    plan->page = b->base.layers_paged * cuda_layer_size(b);
    b->page_values = cuda_is_8bit(b) ? plan->page : plan->page / 2;
    if ((rc = choose_pages(b, plan, err)))
        return rc;
    b->opened_max = (uint32_t)opened_of(b, b->base.page_count);
    c = (struct cuda_carver){NULL, 0};
    carve_work(b, &c, plan->scratch);
    plan->work = c.used;
    return 0;
}

/* Radians a position: base^(-2i / rope_dim), divided by the linear scale and by the file's factor. */
static cudaError_t fill_frequencies(struct cuda_backend *b)
{
    const struct model *m = b->base.model;
    const struct model_params *p = &m->params;
    double f[WIDTH_MAX / 2], log_base = numerics_log((double)p->rope_base);
    for (uint32_t i = 0; i < p->rope_dim / 2; i++) {
        float factor = 1.0f;
        if (p->has_rope_factors)
            memcpy(&factor, (const uint8_t *)m->rope_factors.data + sizeof factor * i, sizeof factor);
        f[i] = numerics_exp64(-(2.0 * i / p->rope_dim) * log_base) / (double)p->rope_scale / (double)factor;
    }
    return cudaMemcpy(b->frequencies, f, sizeof(double) * p->rope_dim / 2, cudaMemcpyHostToDevice);
}

static int take_memory(struct cuda_backend *b, const struct plan *plan, struct td_error *err)
{
    const struct model_params *p = &b->base.model->params;
    uint64_t rows = b->rows_max, pages_size = plan->page * b->base.page_count;
    b->io_size = 4 * TD_MAX(rows * p->embd_size,
                            b->has_head ? TD_MIN(rows, (uint64_t)LOGIT_ROWS) * p->vocab_count : 0);
    cudaError_t rc = cudaMalloc((void **)&b->weights, plan->weights);
    if (!rc)
        rc = cudaMalloc((void **)&b->work, plan->work);
    if (!rc)
        rc = cudaMalloc((void **)&b->pages, pages_size);
    if (!rc)
        rc = cudaMemset(b->pages, 0, pages_size);
    if (!rc)
        rc = cudaMallocHost((void **)&b->stage, b->stage_size);
    if (!rc)
        rc = cudaMallocHost((void **)&b->io, b->io_size);
    if (!rc)
        rc = cudaMallocHost((void **)&b->sampled, sizeof *b->sampled * LOGIT_ROWS);
    if (!rc) {
        struct cuda_carver c = {b->work, 0};
        carve_work(b, &c, plan->scratch);
        rc = cudaMemset(b->counters, 0, counters_size(b));
    }
    if (!rc)
        rc = fill_frequencies(b);
    if (rc)
        return td_fail(err, rc == cudaErrorMemoryAllocation ? -TD_ERR_NOMEM : -TD_ERR_INTERNAL,
                       "cannot start the engine on cuda:%d: %llu MiB of device memory: %s", b->device,
                       (unsigned long long)((plan->weights + plan->work + pages_size) / MIB),
                       cudaGetErrorString(rc));
    return 0;
}

/* --- life ------------------------------------------------------------------------------------- */

static void cuda_destroy(struct backend *base)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    if (b->stream) {
        cudaSetDevice(b->device);
        cudaStreamSynchronize(b->stream);
    }
    for (struct cuda_graph *g = b->graphs; g < b->graphs + GRAPHS; g++)
        if (g->exec)
            cudaGraphExecDestroy(g->exec);
    cuda_paging_destroy(b);
    cuda_profiler_destroy(b->profiler);
    blas_destroy(b->blas);
    workers_destroy(b->workers);
    if (b->io)
        cudaFreeHost(b->io);
    if (b->sampled)
        cudaFreeHost(b->sampled);
    if (b->stage)
        cudaFreeHost(b->stage);
    if (b->pages)
        cudaFree(b->pages);
    if (b->work)
        cudaFree(b->work);
    if (b->weights)
        cudaFree(b->weights);
    if (b->stream)
        cudaStreamDestroy(b->stream);
    free(b->layers);
    free(b);
}

/* numerics: by device and options. */
static const struct backend_ops cuda_ops = {.name = "cuda",
                                            .samples = true,
                                            .forward = cuda_forward,
                                            .page_read = cuda_page_read,
                                            .page_write = cuda_page_write,
                                            .page_copy = cuda_page_copy,
                                            .pieces_write = cuda_pieces_write,
                                            .swap_start = cuda_swap_start,
                                            .swap_done = cuda_swap_done,
                                            .state = cuda_state,
                                            .host_take = cuda_host_take,
                                            .host_give = cuda_host_give,
                                            .destroy = cuda_destroy};

/* Elsewhere than where det_attention.cuh's rule is kept sums have another order, and tensor cores may add in another way. */
static enum kv_numerics numerics_of(const struct cuda_backend *b)
{
    static const enum kv_numerics fast[] = {KV_NUMERICS_CUDA_FAST, KV_NUMERICS_CUDA_FAST_FP8,
                                            KV_NUMERICS_CUDA_FAST_INT8};
    const struct model_params *p = &b->base.model->params;
    int major = 0, minor = 0;
    if (!b->deterministic || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, b->device) ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, b->device))
        return fast[b->base.kv_dtype];
    return kv_numerics_cuda_det(cuda_det_attention_has(p->head_dim, p->head_count / p->kv_head_count),
                                (uint32_t)(10 * major + minor), b->base.kv_dtype);
}

static int check_config(const struct model *m, const struct backend_config *c, struct td_error *err)
{
    const struct model_params *p = &m->params;
    if (c->layers_paged == 0 || c->layers_paged > m->layers_held)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot start the CUDA engine: %u layers wanted, the model file holds %u of %u",
                       c->layers_paged, m->layers_held, p->layer_count);
    if (c->rows_max == 0 || c->rows_max > BATCH_ROWS_MAX)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot start the CUDA engine: it takes steps of 1 to %d rows, not of %u",
                       BATCH_ROWS_MAX, c->rows_max);
    if (!cuda_attention_has(p->head_dim) || cuda_tile_rows(p->head_count, p->kv_head_count) == 0)
        return td_fail(err, -TD_ERR_UNSUPPORTED,
                       "cannot start the CUDA engine: heads of %u values (%u to one KV head) are not "
                       "supported; 32, 64, 80, 96, "
                       "128 and 256 are; use the CPU (--device cpu)",
                       p->head_dim, p->head_count / p->kv_head_count);
    if (p->embd_size > WIDTH_MAX || p->embd_size % 32 || p->ffn_size % 32 || cuda_q_size(p) % 32)
        return td_fail(err, -TD_ERR_UNSUPPORTED,
                       "cannot start the CUDA engine: widths %u and %u are not supported: multiples of 32 up "
                       "to %d are; use the "
                       "CPU (--device cpu)",
                       p->embd_size, p->ffn_size, WIDTH_MAX);
    return 0;
}

static unsigned copy_threads(unsigned wanted)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned most = wanted ? wanted : (unsigned)TD_MAX(cores, 1L);
    return TD_MIN(most, COPY_THREADS);
}

static int prepare_steps(struct cuda_backend *b, struct td_error *err)
{
    struct cuda_step_layer *host = calloc(b->base.layers_paged, sizeof *host);
    if (!host)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the CUDA engine: out of memory");
    for (uint32_t i = 0; i < b->base.layers_paged; i++) {
        const struct cuda_layer *l = &b->layers[i];
        host[i] = (struct cuda_step_layer){l->qkv.m[0],  l->o.m[0],   l->gate_up.m[0], l->down.m[0],
                                           l->attn_norm, l->ffn_norm, l->q_bias,       l->k_bias,
                                           l->v_bias,    l->q_norm,   l->k_norm};
    }
    cudaError_t rc =
        cudaMemcpy(b->step_layers, host, sizeof *host * b->base.layers_paged, cudaMemcpyHostToDevice);
    free(host);
    if (b->deterministic || !cuda_step_possible(b))
        b->step_layers = NULL;
    b->step_rows = CUDA_STEP_ROWS, b->matvec_rows_16 = MATVEC_ROWS_16;
    enum cuda_form form = b->layers[0].qkv.m[0].form;
    if (b->step_layers && (form == CUDA_F16 || form == CUDA_BF16)) /* and so a device of sm_90a */
        b->step_rows = b->matvec_rows_16 = STREAM_ROWS_16;
    if (cuda_is_8bit(b)) /* whose ring holds f16 */
        b->step_layers = NULL;
    return rc ? td_fail(err, -TD_ERR_INTERNAL, "cannot start the engine on cuda:%d: %s", b->device,
                        cudaGetErrorString(rc))
              : 0;
}

static int build(struct cuda_backend *b, const char *device, unsigned threads, struct td_error *err)
{
    struct plan plan;
    char why[160];
    uint64_t scratch;
    int rc;
    b->layers = calloc(b->base.layers_paged, sizeof *b->layers);
    b->workers = workers_create(copy_threads(threads));
    b->profiler = cuda_profiler_create();
    if (!b->layers || !b->workers || !b->profiler)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the CUDA engine: out of memory");
    if ((rc = open_device(b, device, err)))
        return rc;
    b->ops.numerics = numerics_of(b);
    if ((rc = plan_memory(b, &plan, err)) || (rc = take_memory(b, &plan, err)))
        return rc;
    struct cuda_carver c = {b->weights, 0};
    if ((rc = cuda_place_weights(b, &c, plan.weights, &scratch, err)))
        return rc;
    if ((rc = prepare_steps(b, err)) || (rc = cuda_paging_create(b, err)))
        return rc;
    b->blas = b->deterministic ? NULL : blas_create(b->stream, why, sizeof why);
    if (!b->blas && !b->deterministic)
        log_warn("cuda", "%s: steps with many rows will be slow; install the CUDA 13 libraries", why);
    rc = b->config->warm ? cuda_warm_up(b) : 0;
    return rc ? td_fail(err, rc, "cannot start the engine on %s: its first steps failed", device) : 0;
}

int cuda_backend_create(const struct model *m, const struct backend_config *config, const char *device,
                        struct backend **out, struct td_error *err)
{
    *out = NULL;
    int rc = check_config(m, config, err);
    if (rc)
        return rc;
    struct cuda_backend *b = calloc(1, sizeof *b);
    if (!b)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the CUDA engine: out of memory");
    b->deterministic = config->deterministic;
    b->base = (struct backend){&b->ops, m, config->page_count, config->layers_paged, config->kv_dtype};
    b->ops = cuda_ops;
    b->rows_max = config->rows_max;
    b->config = config;
    rc = build(b, device, config->threads, err);
    b->config = NULL;
    if (rc) {
        cuda_destroy(&b->base);
        return rc;
    }
    *out = &b->base;
    return 0;
}
