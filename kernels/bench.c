/* bench: see bench.h. Each run starts with an empty context, so runs are alike; medians keep a busy neighbour
 * out. */
#include "kernels/bench.h"
#include "kernels/bench_cpu.h"
#include "kernels/bench_model.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cuda/cuda.h"
#include "kernels/sampler.h"
#include "kernels/kv_layout.h"
#include <stdio.h>
#include <stdlib.h>

#define CHUNK_TOKENS_DEFAULT 512
#define REPEATS_MAX          100

struct bench {
    const struct bench_engine_options *options;
    struct gguf *file;
    struct bench_model *random; /* the model's, when it has no file */
    struct model *model;
    struct backend *backend;
    int32_t *ids;
    float *logits;                  /* [seq_count][vocab]; NULL where the engine draws tokens itself */
    struct sample_request *samples; /* [seq_count]; greedy */
    struct sampled *sampled;
    struct sampler_params sampling;
    uint32_t *pages; /* [seq_count][pages_per_seq] */
    uint32_t total_tokens, chunk_tokens, repeats, seq_count, pages_per_seq;
    uint64_t done_tokens, work_tokens; /* of all runs */
    struct cuda_ceilings ceilings;
    struct bench_cpu cpu; /* of the CPU engine: ceilings and where time goes */
    double prefill_s[REPEATS_MAX], decode_s[REPEATS_MAX], out_s[REPEATS_MAX], in_s[REPEATS_MAX];
    double *step_s; /* of each decode step of all runs */
};

static double seconds_since(uint64_t start_us)
{
    return (double)(clock_mono_us() - start_us) * 1e-6;
}

static const char *dtype_of(const struct bench_engine_options *o)
{
    return o->dtype ? o->dtype : "bf16";
}

static bool on_gpu(const struct bench *b)
{
    return b->options->device && strcmp(b->options->device, "cpu") != 0;
}

/* "cpu", "cuda" or "cuda:N"? */
static bool is_device(const char *name)
{
    if (strncmp(name, "cuda:", 5) != 0)
        return strcmp(name, "cpu") == 0 || strcmp(name, "cuda") == 0;
    return name[5] && name[5 + strspn(name + 5, "0123456789")] == '\0';
}

/* Before anything large is taken. */
static int check_names(const struct bench *b, struct td_error *err)
{
    const struct bench_engine_options *o = b->options;
    enum kv_dtype kv;
    if (o->device && !is_device(o->device))
        return td_fail(err, -TD_ERR_ARG, "--device %s: want cpu, cuda or cuda:N", o->device);
    if (!on_gpu(b) && !cpu_ops_find(o->isa))
        return td_fail(err, -TD_ERR_ARG,
                       "--isa %s: this CPU does not run such an instruction set; its best is %s", o->isa,
                       cpu_backend_isa());
    if (o->kv_dtype && !kv_dtype_find(o->kv_dtype, &kv))
        return td_fail(err, -TD_ERR_ARG, "--kv-dtype %s: want f16, fp8 or int8", o->kv_dtype);
    return o->shape ? bench_model_check(o->shape, dtype_of(o), err) : 0;
}

static int bench_check(struct bench *b, struct td_error *err)
{
    const struct bench_engine_options *o = b->options;
    uint64_t total = (uint64_t)o->prompt_tokens + o->gen_tokens;
    b->chunk_tokens = o->chunk_tokens ? o->chunk_tokens : CHUNK_TOKENS_DEFAULT;
    b->repeats = TD_MAX(1u, o->repeat_count);
    b->seq_count = TD_MAX(1u, o->batch_count);
    if (o->prompt_tokens == 0 || b->chunk_tokens > BATCH_ROWS_MAX || b->repeats > REPEATS_MAX ||
        b->seq_count > BATCH_SEQS_MAX)
        return td_fail(
            err, -TD_ERR_ARG,
            "cannot run the benchmark: it takes a prompt of 1 token or more, chunks of at most %d, "
            "%d runs and %d sequences",
            BATCH_ROWS_MAX, REPEATS_MAX, BATCH_SEQS_MAX);
    if (total > b->model->params.context_max)
        return td_fail(err, -TD_ERR_CONTEXT,
                       "cannot run the benchmark: %llu tokens wanted, the model's context holds %u",
                       (unsigned long long)total, b->model->params.context_max);
    if (b->model->layers_held < b->model->params.layer_count)
        return td_fail(err, -TD_ERR_UNSUPPORTED,
                       "cannot run the benchmark: %s is a slice; use the whole model", o->model_path);
    b->total_tokens = (uint32_t)total;
    b->work_tokens = total * b->seq_count * b->repeats;
    return 0;
}

static void tell(const struct bench *b, const char *what, uint64_t done, uint64_t total)
{
    if (b->options->progress)
        b->options->progress((void *)(uintptr_t)what, done, total);
}

/* A run's tokens, and no others', are told of. */
static void tell_tokens(struct bench *b, uint32_t count)
{
    if (b->done_tokens == b->work_tokens)
        return;
    b->done_tokens += count;
    tell(b, "measuring", b->done_tokens, b->work_tokens);
}

static int bench_open(struct bench *b, struct td_error *err)
{
    const struct bench_engine_options *o = b->options;
    int rc = check_names(b, err);
    if (rc)
        return rc;
    if (o->shape) {
        tell(b, "making random weights", 0, 1);
        rc = bench_model_create(o->shape, dtype_of(o), &b->random, err);
        b->model = rc ? NULL : bench_model_get(b->random);
        tell(b, "making random weights", 1, 1);
    } else if ((rc = gguf_open(o->model_path, &b->file, err)) == 0) {
        rc = model_load(b->file, &b->model, err);
    }
    return rc ? rc : bench_check(b, err);
}

static uint32_t swap_pages(const struct bench *b)
{
    return (b->options->swap_tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
}

static int bench_start_engine(struct bench *b, struct td_error *err)
{
    const struct bench_engine_options *o = b->options;
    struct backend_config config = {.page_count = TD_MAX(b->pages_per_seq * b->seq_count, swap_pages(b)),
                                    .layers_paged = b->model->params.layer_count,
                                    .threads = o->threads,
                                    .rows_max =
                                        TD_MAX(TD_MIN(b->chunk_tokens, o->prompt_tokens), b->seq_count),
                                    .isa = o->isa,
                                    .deterministic = o->deterministic};
    if (o->kv_dtype)
        kv_dtype_find(o->kv_dtype, &config.kv_dtype);
    if (!on_gpu(b))
        return cpu_backend_create(b->model, &config, &b->backend, err);
    int rc = cuda_measure_ceilings(o->device, &b->ceilings, err);
    return rc ? rc : cuda_backend_create(b->model, &config, o->device, &b->backend, err);
}

static int bench_prepare(struct bench *b, struct td_error *err)
{
    int rc = bench_open(b, err);
    if (rc)
        return rc;
    const struct model_params *p = &b->model->params;
    b->pages_per_seq = (b->total_tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    size_t page_count = (size_t)b->pages_per_seq * b->seq_count;
    if ((rc = bench_start_engine(b, err)))
        return rc;
    b->ids = calloc(b->total_tokens, sizeof *b->ids);
    if (!b->backend->ops->samples)
        b->logits = calloc((size_t)b->seq_count * p->vocab_count, sizeof *b->logits);
    b->step_s = calloc((size_t)b->repeats * b->options->gen_tokens + 1, sizeof *b->step_s);
    b->samples = calloc(b->seq_count, sizeof *b->samples);
    b->sampled = calloc(b->seq_count, sizeof *b->sampled);
    b->pages = calloc(page_count, sizeof *b->pages);
    if (!b->ids || (!b->logits && !b->backend->ops->samples) || !b->samples || !b->sampled || !b->pages ||
        !b->step_s)
        return td_fail(err, -TD_ERR_NOMEM, "cannot run the benchmark: out of memory");
    sampler_defaults(&b->sampling);
    b->sampling.temperature = 0.0f;
    for (uint32_t i = 0; i < b->seq_count; i++)
        b->samples[i] = (struct sample_request){.params = &b->sampling, .out = &b->sampled[i]};
    for (uint32_t i = 0; i < b->total_tokens; i++)
        b->ids[i] = (int32_t)((i * 2654435761u >> 8) % p->vocab_count);
    for (size_t i = 0; i < page_count; i++)
        b->pages[i] = (uint32_t)i;
    return 0;
}

static struct batch_seq rows_of(const struct bench *b, uint32_t seq, uint32_t position, uint32_t count,
                                bool wants_token)
{
    const struct model_params *p = &b->model->params;
    return (struct batch_seq){.layer_end = p->layer_count,
                              .position = position,
                              .row_count = count,
                              .ids = b->ids + position,
                              .logits =
                                  wants_token && b->logits ? b->logits + (size_t)seq * p->vocab_count : NULL,
                              .sample = wants_token && !b->logits ? &b->samples[seq] : NULL,
                              .logit_count = wants_token,
                              .pages = b->pages + (size_t)seq * b->pages_per_seq};
}

static int step(struct bench *b, const struct batch_seq *seqs, uint32_t count, struct td_error *err)
{
    int rc = b->backend->ops->forward(b->backend, &(struct batch){seqs, count});
    return rc ? td_fail(err, rc, "the benchmark's step at token %u failed: %s", seqs[0].position,
                        td_status_text(rc))
              : 0;
}

static int prefill(struct bench *b, uint32_t seq, struct td_error *err)
{
    uint32_t prompt = b->options->prompt_tokens;
    for (uint32_t at = 0; at < prompt;) {
        uint32_t count = TD_MIN(b->chunk_tokens, prompt - at);
        struct batch_seq rows = rows_of(b, seq, at, count, at + count == prompt);
        int rc = step(b, &rows, 1, err);
        if (rc)
            return rc;
        at += count;
        tell_tokens(b, count);
    }
    return 0;
}

static int decode(struct bench *b, uint32_t position, struct td_error *err)
{
    struct batch_seq rows[BATCH_SEQS_MAX];
    for (uint32_t i = 0; i < b->seq_count; i++)
        rows[i] = rows_of(b, i, position, 1, true);
    return step(b, rows, b->seq_count, err);
}

static void begin_half(struct bench *b, uint32_t half)
{
    if (!on_gpu(b))
        bench_cpu_half(&b->cpu, half);
}

static int bench_run(struct bench *b, uint32_t run, struct td_error *err)
{
    int rc = 0;
    begin_half(b, 2 * run);
    uint64_t start = clock_mono_us();
    for (uint32_t i = 0; i < b->seq_count && !rc; i++)
        rc = prefill(b, i, err);
    b->prefill_s[run] = seconds_since(start);
    begin_half(b, 2 * run + 1);
    start = clock_mono_us();
    for (uint32_t i = 0; i < b->options->gen_tokens && !rc; i++) {
        uint64_t begun = clock_mono_us();
        rc = decode(b, b->options->prompt_tokens + i, err);
        b->step_s[(size_t)run * b->options->gen_tokens + i] = seconds_since(begun);
        tell_tokens(b, b->seq_count);
    }
    b->decode_s[run] = seconds_since(start);
    return rc;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *values, uint32_t count)
{
    if (count == 0)
        return 0;
    qsort(values, count, sizeof *values, compare_doubles);
    return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

static uint32_t common_factor(uint32_t a, uint32_t b)
{
    return b ? common_factor(b, a % b) : a;
}

/* The first `count` of all pages in a scattered order. */
static void scatter(uint32_t *pages, uint32_t count, uint32_t page_count)
{
    uint32_t stride = page_count / 8 * 5 | 1;
    while (common_factor(stride, page_count) != 1)
        stride += 2;
    for (uint32_t i = 0; i < count; i++)
        pages[i] = (uint32_t)((uint64_t)i * stride % page_count);
}

static int swap_once(struct bench *b, struct page_swap *swap, bool to_host, double *seconds)
{
    uint64_t start = clock_mono_us();
    swap->to_host = to_host;
    int64_t ticket = b->backend->ops->swap_start(b->backend, swap);
    int rc = ticket < 0 ? (int)ticket : b->backend->ops->swap_done(b->backend, ticket, true);
    *seconds = seconds_since(start);
    return rc < 0 ? rc : 0;
}

/* A conversation's KV out to host memory and back, once before it counts: the driver maps the memory then. */
static int bench_swap(struct bench *b, struct bench_engine_result *r, struct td_error *err)
{
    uint32_t count = swap_pages(b);
    const struct backend_ops *ops = b->backend->ops;
    if (count == 0)
        return 0;
    if (!ops->swap_start)
        return td_fail(err, -TD_ERR_UNSUPPORTED,
                       "cannot measure swapping: this engine's pages are in host memory; use --device cuda");
    struct kv_shape shape = model_kv_shape(b->model);
    size_t page_size = kv_dtype_layer_size(b->backend->kv_dtype, shape.kv_head_count, shape.head_dim) *
                       shape.layer_count,
           size = page_size * count;
    uint8_t *memory = ops->host_take(b->backend, size);
    uint32_t *pages = calloc(count, sizeof *pages);
    void **hosts = calloc(count, sizeof *hosts);
    struct page_swap swap = {
        .pages = pages, .hosts = hosts, .count = count, .layer_end = shape.layer_count, .as_kept = true};
    int rc = pages && hosts && memory ? 0 : -TD_ERR_NOMEM;
    if (!rc)
        scatter(pages, count, b->backend->page_count);
    for (uint32_t i = 0; i < count && !rc; i++)
        hosts[i] = memory + i * page_size;
    for (uint32_t run = 0; run <= b->repeats && !rc; run++) {
        uint32_t at = run ? run - 1 : 0;
        if ((rc = swap_once(b, &swap, true, &b->out_s[at])) == 0)
            rc = swap_once(b, &swap, false, &b->in_s[at]);
    }
    if (memory)
        ops->host_give(b->backend, memory);
    free(pages);
    free(hosts);
    r->swap_gib = (double)size / (1 << 30);
    r->swap_out_s = bench_median(b->out_s, b->repeats), r->swap_in_s = bench_median(b->in_s, b->repeats);
    return rc ? td_fail(err, rc, "cannot measure swapping %zu MiB: %s", size >> 20, td_status_text(rc)) : 0;
}

/* What a step must read, and a prompt compute. */
struct bench_work {
    double product_flops, attention_flops, weight_bytes, kv_bytes;
};

static struct bench_work prefill_work(const struct bench *b)
{
    const struct model_params *p = &b->model->params;
    double q = (double)p->head_count * p->head_dim, kv_size = (double)p->kv_head_count * p->head_dim;
    double weights = p->embd_size * (2.0 * q + 2.0 * kv_size + 3.0 * p->ffn_size),
           prompt = b->options->prompt_tokens;
    return (struct bench_work){.product_flops = p->layer_count * 2.0 * weights * prompt,
                               .attention_flops = p->layer_count * 2.0 * q * prompt * prompt};
}

static struct bench_work decode_work(const struct bench *b)
{
    const struct model_params *p = &b->model->params;
    double context = b->options->prompt_tokens + b->options->gen_tokens * 0.5;
    return (struct bench_work){
        .weight_bytes = (double)model_weight_bytes(b->model, 0, p->layer_count),
        .kv_bytes = (double)kv_dtype_layer_size(b->backend->kv_dtype, p->kv_head_count, p->head_dim) *
                    p->layer_count / KV_BLOCK_TOKENS * context * b->seq_count};
}

/* That over what the device can do. */
static void fill_floors(const struct bench *b, struct bench_engine_result *r)
{
    struct bench_work prompt = prefill_work(b), step = decode_work(b);
    double bytes = step.weight_bytes + step.kv_bytes, flops = prompt.product_flops + prompt.attention_flops;
    r->read_gb_s = b->ceilings.read_gb_s, r->copy_gb_s = b->ceilings.copy_gb_s;
    r->matmul_tflop_s = b->ceilings.matmul_tflop_s, r->to_device_gb_s = b->ceilings.to_device_gb_s;
    if (r->read_gb_s > 0)
        r->decode_floor_ms = bytes / r->read_gb_s * 1e-6;
    if (r->matmul_tflop_s > 0)
        r->prefill_floor_ms = flops / r->matmul_tflop_s * 1e-9;
}

/* ---- where a GPU's time goes ---- */

#define LOOKED_STEPS 8

static const char *const part_names[CUDA_PARTS] = {"layers", "products", "attention",
                                                   "other",  "sampling", "copies"};

/* One part's `seconds` of all, and what it computed and read in them; 0: not told. */
static struct bench_family part_family(const struct bench *b, enum cuda_part part, double seconds, double all,
                                       double flops, double bytes)
{
    struct bench_family f = {.ms = seconds * 1e3, .share = seconds / all};
    snprintf(f.name, sizeof f.name, "%s", part_names[part]);
    f.gop_s = flops / seconds * 1e-9, f.gb_s = bytes / seconds * 1e-9;
    if (b->ceilings.matmul_tflop_s > 0)
        f.of_peak = f.gop_s / (1e3 * b->ceilings.matmul_tflop_s);
    if (b->ceilings.read_gb_s > 0)
        f.of_read = f.gb_s / b->ceilings.read_gb_s;
    return f;
}

/* The same prompt, or the last token `runs` times, with every pass looked at. */
static int look(struct bench *b, bool decodes, uint32_t runs, double seconds[CUDA_PARTS],
                struct td_error *err)
{
    struct cuda_profile before, after;
    int rc = 0;
    cuda_profile_read(b->backend, &before);
    cuda_profile_every(b->backend, true);
    for (uint32_t i = 0; i < runs && !rc; i++)
        rc = decodes ? decode(b, b->total_tokens - 1, err) : prefill(b, 0, err);
    cuda_profile_every(b->backend, false);
    cuda_profile_read(b->backend, &after);
    for (int i = 0; i < CUDA_PARTS; i++)
        seconds[i] = (after.part_s[i] - before.part_s[i]) / runs;
    return rc;
}

static uint32_t fill_parts(const struct bench *b, const double seconds[CUDA_PARTS],
                           const struct bench_work *w, struct bench_family *families)
{
    double all = 0;
    uint32_t count = 0;
    for (int i = 0; i < CUDA_PARTS; i++)
        all += seconds[i];
    bool apart = seconds[CUDA_PART_LAYERS] == 0; /* else a kernel of all layers has most of the work */
    for (int i = 0; i < CUDA_PARTS; i++) {
        bool products = apart && i == CUDA_PART_PRODUCTS, attention = apart && i == CUDA_PART_ATTENTION;
        if (seconds[i] > 0)
            families[count++] = part_family(b, i, seconds[i], all,
                                            products    ? w->product_flops
                                            : attention ? w->attention_flops
                                                        : 0,
                                            products    ? w->weight_bytes
                                            : attention ? w->kv_bytes
                                                        : 0);
    }
    return count;
}

static int look_at_parts(struct bench *b, struct bench_engine_result *r, struct td_error *err)
{
    double seconds[CUDA_PARTS], same_s[64];
    struct bench_work prompt = prefill_work(b), step = decode_work(b);
    int rc = look(b, false, 1, seconds, err);
    if (rc)
        return rc;
    r->prefill_family_count = fill_parts(b, seconds, &prompt, r->prefill_families);
    if (b->options->gen_tokens == 0 || (rc = look(b, true, LOOKED_STEPS, seconds, err)))
        return rc;
    r->decode_family_count = fill_parts(b, seconds, &step, r->decode_families);
    for (uint32_t i = 0; i < TD_COUNT(same_s) && !rc; i++) {
        uint64_t begun = clock_mono_us();
        rc = decode(b, b->total_tokens - 1, err);
        same_s[i] = seconds_since(begun);
    }
    double device_ms = rc ? 0 : cuda_replay_ms(b->backend, TD_COUNT(same_s));
    if (device_ms > 0) /* of the same step */
        r->host_ms = TD_MAX(bench_median(same_s, TD_COUNT(same_s)) * 1e3 - device_ms, 0.0);
    return rc;
}

static int fill_result(struct bench *b, struct bench_engine_result *r, struct td_error *err)
{
    const struct bench_engine_options *o = b->options;
    double prefill_s = TD_MAX(bench_median(b->prefill_s, b->repeats), 1e-9),
           decode_s = bench_median(b->decode_s, b->repeats);
    r->prefill_tps = (double)o->prompt_tokens * b->seq_count / prefill_s;
    r->prefill_ms = prefill_s / b->seq_count * 1e3;
    if (o->gen_tokens > 0) {
        r->decode_tps = (double)o->gen_tokens * b->seq_count / TD_MAX(decode_s, 1e-9);
        r->decode_step_ms = bench_median(b->step_s, b->repeats * o->gen_tokens) * 1e3;
    }
    if (on_gpu(b)) {
        r->isa = b->backend->ops->name;
        fill_floors(b, r);
        return look_at_parts(b, r, err);
    }
    const struct cpu_backend *cpu = (const struct cpu_backend *)b->backend;
    r->isa = cpu->ops->name;
    r->threads = workers_count(cpu->workers);
    begin_half(b, 2 * b->repeats);
    return bench_cpu_result(&b->cpu, r, err);
}

static void bench_free(struct bench *b)
{
    if (b->backend)
        b->backend->ops->destroy(b->backend);
    if (!b->random)
        model_free(b->model);
    bench_model_destroy(b->random);
    bench_cpu_deinit(&b->cpu);
    if (b->file)
        gguf_close(b->file);
    free(b->ids);
    free(b->step_s);
    free(b->logits);
    free(b->samples);
    free(b->sampled);
    free(b->pages);
}

int bench_engine(const struct bench_engine_options *options, struct bench_engine_result *result,
                 struct td_error *err)
{
    struct bench b = {.options = options};
    *result = (struct bench_engine_result){0};
    uint64_t start = clock_mono_us();
    int rc = bench_prepare(&b, err);
    result->load_s = seconds_since(start);
    if (!rc && !on_gpu(&b))
        rc = bench_cpu_init(&b.cpu, b.backend, b.repeats, err);
    if (!rc)
        tell_tokens(&b, 0);
    for (uint32_t run = 0; !rc && run < b.repeats; run++)
        rc = bench_run(&b, run, err);
    result->first_token_s = result->load_s + b.prefill_s[0] / TD_MAX(1u, b.seq_count);
    if (!rc)
        rc = bench_swap(&b, result, err);
    if (!rc)
        rc = fill_result(&b, result, err);
    bench_free(&b);
    return rc;
}
