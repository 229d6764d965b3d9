/* bench: see bench.h. Each run starts with an empty context, so runs are alike; medians keep a busy neighbour
 * out. */
#include "kernels/bench.h"
#include "kernels/cpu/cpu_backend.h"
#include <stdlib.h>

#define CHUNK_TOKENS_DEFAULT 512
#define REPEATS_MAX          100

struct bench {
    const struct bench_engine_options *options;
    struct gguf *file;
    struct model *model;
    struct backend *backend;
    int32_t *ids;
    float *logits;
    uint32_t *pages;
    uint32_t total_tokens, chunk_tokens, repeats;
    double prefill_s[REPEATS_MAX], decode_s[REPEATS_MAX];
};

static double seconds_since(uint64_t start_us)
{
    return (double)(clock_mono_us() - start_us) * 1e-6;
}

static int bench_check(struct bench *b, struct td_error *err)
{
    const struct bench_engine_options *o = b->options;
    uint64_t total = (uint64_t)o->prompt_tokens + o->gen_tokens;
    b->chunk_tokens = o->chunk_tokens ? o->chunk_tokens : CHUNK_TOKENS_DEFAULT;
    b->repeats = TD_MAX(1u, o->repeat_count);
    if (o->prompt_tokens == 0 || b->chunk_tokens > BATCH_ROWS_MAX || b->repeats > REPEATS_MAX)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot run the benchmark: it takes a prompt of 1 token or more, chunks of at most %d "
                       "and %d runs",
                       BATCH_ROWS_MAX, REPEATS_MAX);
    if (total > b->model->params.context_max)
        return td_fail(err, -TD_ERR_CONTEXT,
                       "cannot run the benchmark: %llu tokens wanted, the model's context holds %u",
                       (unsigned long long)total, b->model->params.context_max);
    if (b->model->layers_held < b->model->params.layer_count)
        return td_fail(err, -TD_ERR_UNSUPPORTED,
                       "cannot run the benchmark: %s is a slice; use the whole model", o->model_path);
    b->total_tokens = (uint32_t)total;
    return 0;
}

static int bench_prepare(struct bench *b, struct td_error *err)
{
    int rc;
    if ((rc = gguf_open(b->options->model_path, &b->file, err)) ||
        (rc = model_load(b->file, &b->model, err)) || (rc = bench_check(b, err)))
        return rc;
    const struct model_params *p = &b->model->params;
    uint32_t page_count = (b->total_tokens + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    struct backend_config config = {.page_count = page_count,
                                    .layers_paged = p->layer_count,
                                    .threads = b->options->threads,
                                    .rows_max = TD_MIN(b->chunk_tokens, b->options->prompt_tokens),
                                    .isa = b->options->isa};
    if ((rc = cpu_backend_create(b->model, &config, &b->backend, err)))
        return rc;
    b->ids = calloc(b->total_tokens, sizeof *b->ids);
    b->logits = calloc(p->vocab_count, sizeof *b->logits);
    b->pages = calloc(page_count, sizeof *b->pages);
    if (!b->ids || !b->logits || !b->pages)
        return td_fail(err, -TD_ERR_NOMEM, "cannot run the benchmark: out of memory");
    for (uint32_t i = 0; i < b->total_tokens; i++)
        b->ids[i] = (int32_t)((i * 2654435761u >> 8) % p->vocab_count);
    for (uint32_t i = 0; i < page_count; i++)
        b->pages[i] = i;
    return 0;
}

/* Rows [position, position + count) of the one sequence; logits of the last when wanted. */
static int step(struct bench *b, uint32_t position, uint32_t count, bool want_logits, struct td_error *err)
{
    struct batch_seq seq = {.layer_end = b->model->params.layer_count,
                            .position = position,
                            .row_count = count,
                            .ids = b->ids + position,
                            .logits = want_logits ? b->logits : NULL,
                            .logit_count = want_logits,
                            .pages = b->pages};
    int rc = b->backend->ops->forward(b->backend, &(struct batch){&seq, 1});
    return rc ? td_fail(err, rc, "the benchmark's step at token %u failed: %s", position, td_status_text(rc))
              : 0;
}

static int bench_run(struct bench *b, uint32_t run, struct td_error *err)
{
    uint32_t prompt = b->options->prompt_tokens;
    uint64_t start = clock_mono_us();
    for (uint32_t at = 0; at < prompt;) {
        uint32_t count = TD_MIN(b->chunk_tokens, prompt - at);
        int rc = step(b, at, count, at + count == prompt, err);
        if (rc)
            return rc;
        at += count;
    }
    b->prefill_s[run] = seconds_since(start);
    start = clock_mono_us();
    for (uint32_t at = prompt; at < b->total_tokens; at++) {
        int rc = step(b, at, 1, true, err);
        if (rc)
            return rc;
    }
    b->decode_s[run] = seconds_since(start);
    return 0;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, uint32_t count)
{
    qsort(values, count, sizeof *values, compare_doubles);
    return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

static void bench_free(struct bench *b)
{
    if (b->backend)
        b->backend->ops->destroy(b->backend);
    model_free(b->model);
    if (b->file)
        gguf_close(b->file);
    free(b->ids);
    free(b->logits);
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
    for (uint32_t run = 0; !rc && run < b.repeats; run++)
        rc = bench_run(&b, run, err);
    if (!rc) {
        result->prefill_tps = options->prompt_tokens / TD_MAX(median(b.prefill_s, b.repeats), 1e-9);
        if (options->gen_tokens > 0)
            result->decode_tps = options->gen_tokens / TD_MAX(median(b.decode_s, b.repeats), 1e-9);
        const struct cpu_backend *cpu = (const struct cpu_backend *)b.backend;
        result->isa = cpu->ops->name;
        result->threads = workers_count(cpu->workers);
    }
    bench_free(&b);
    return rc;
}
