/* tandem bench: how fast this machine is. */
#include "cli/cli.h"
#include "kernels/bench.h"
#include "kernels/bench_model.h"
#include <stdio.h>
#include <unistd.h>

struct bench_settings {
    const char *model, *isa, *device, *shape, *dtype, *kv_dtype;
    int64_t threads, prompt, gen, repeat, batch, chunk, swap;
    bool json, deterministic;
};

#define FIELD(name) offsetof(struct bench_settings, name)
static const struct config_option OPTIONS[] = {
    {.name = "model",
     .type = CONFIG_STRING,
     .offset = FIELD(model),
     .metavar = "FILE",
     .help = "the GGUF file"},
    {.name = "threads",
     .type = CONFIG_INT,
     .offset = FIELD(threads),
     .fallback = "0",
     .min = 0,
     .max = 64,
     .metavar = "N",
     .help = "compute threads; 0: all cores"},
    {.name = "prompt",
     .type = CONFIG_INT,
     .offset = FIELD(prompt),
     .fallback = "512",
     .min = 1,
     .max = 1 << 20,
     .metavar = "TOKENS",
     .help = "tokens of the prefill"},
    {.name = "gen",
     .type = CONFIG_INT,
     .offset = FIELD(gen),
     .fallback = "64",
     .min = 0,
     .max = 1 << 20,
     .metavar = "TOKENS",
     .help = "tokens decoded behind it"},
    {.name = "repeat",
     .type = CONFIG_INT,
     .offset = FIELD(repeat),
     .fallback = "3",
     .min = 1,
     .max = 99,
     .metavar = "N",
     .help = "medians of so many runs"},
    {.name = "isa",
     .type = CONFIG_STRING,
     .offset = FIELD(isa),
     .metavar = "NAME",
     .help = "instruction set: portable, avx2, avx512, ...; the best by default"},
    {.name = "device",
     .type = CONFIG_STRING,
     .offset = FIELD(device),
     .fallback = "cpu",
     .metavar = "NAME",
     .help = "cpu, cuda or cuda:N"},
    {.name = "shape",
     .type = CONFIG_STRING,
     .offset = FIELD(shape),
     .metavar = "NAME",
     .help = "random weights of this shape instead of a file: " BENCH_MODEL_SHAPES},
    {.name = "dtype",
     .type = CONFIG_STRING,
     .offset = FIELD(dtype),
     .metavar = "NAME",
     .help = "type of the random weights: bf16 (without it), f16, q8_0, q4_k, ..."},
    {.name = "batch",
     .type = CONFIG_INT,
     .offset = FIELD(batch),
     .fallback = "1",
     .min = 1,
     .max = 512,
     .metavar = "N",
     .help = "sequences decoded side by side"},
    {.name = "chunk",
     .type = CONFIG_INT,
     .offset = FIELD(chunk),
     .fallback = "0",
     .min = 0,
     .max = 4096,
     .metavar = "TOKENS",
     .help = "rows of one prefill step; 0: 512"},
    {.name = "swap",
     .type = CONFIG_INT,
     .offset = FIELD(swap),
     .fallback = "0",
     .min = 0,
     .max = 1 << 20,
     .metavar = "TOKENS",
     .help = "also move the KV of so many tokens between a GPU's pages and host memory"},
    {.name = "kv-dtype",
     .type = CONFIG_STRING,
     .offset = FIELD(kv_dtype),
     .fallback = "f16",
     .metavar = "NAME",
     .help = "what a GPU's pages keep KV in: f16, fp8, int8"},
    {.name = "deterministic",
     .type = CONFIG_BOOL,
     .offset = FIELD(deterministic),
     .help = "a GPU's arithmetic that depends on nothing beside a row"},
    {.name = "json",
     .type = CONFIG_BOOL,
     .offset = FIELD(json),
     .help = "one JSON object instead of a table"},
};
static const struct config_spec SPEC = {
    .program = "tandem bench",
    .env_prefix = "TANDEM_BENCH",
    .summary = "How fast this machine runs a model (engine; the options below). codec, store and trace have "
               "their own --help.",
    .usage = "engine --model FILE|--shape NAME [options]\n"
             "codec --model FILE --text FILE... [options]\n"
             "store --store DIR [options]\n"
             "trace FILE... [options]",
    .examples = "  tandem bench engine --model model.gguf --threads 2 --prompt 512 --gen 64 --json\n"
                "  tandem bench codec --model model.gguf --text english.txt code.txt --write\n"
                "  tandem bench store --store /var/lib/tandem --size 4G\n"
                "  tandem bench trace conversation_trace.jsonl\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

/* Of a ceiling, which is named where there are several; "-" where none applies. */
static const char *percent(double share, const char *of, char out[24])
{
    snprintf(out, 24, share > 0 ? "%.0f%%%s%s" : "-", 100 * share, of ? " " : "", of ? of : "");
    return out;
}

static void print_families(const char *title, const struct bench_family *families, uint32_t count)
{
    if (count > 0)
        printf("\n%-14s %10s %7s %9s %12s %7s %8s\n", title, "ms", "share", "GOP/s", "of peak", "GB/s",
               "of read");
    for (uint32_t i = 0; i < count; i++) {
        const struct bench_family *f = &families[i];
        char peak[24], read[24];
        printf("%-14s %10.2f %6.1f%%", f->name, f->ms, 100 * f->share);
        if (f->gop_s > 0 || f->gb_s > 0)
            printf(" %9.1f %12s %7.1f %8s", f->gop_s, percent(f->of_peak, f->peak, peak), f->gb_s,
                   percent(f->of_read, NULL, read));
        printf("\n");
    }
}

static json_t *families_json(const struct bench_family *families, uint32_t count)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++) {
        const struct bench_family *f = &families[i];
        json_array_append_new(list, json_pack("{s:s,s:f,s:f,s:f,s:f,s:f,s:f,s:s*}", "name", f->name, "ms",
                                              f->ms, "share", f->share, "gop_s", f->gop_s, "gb_s", f->gb_s,
                                              "of_peak", f->of_peak, "of_read", f->of_read, "peak", f->peak));
    }
    return list;
}

/* Of a ceiling; 0 where nothing was measured. */
static double share(double floor, double measured)
{
    return measured > 0 ? floor / measured : 0;
}

static double swap_in_share(const struct bench_engine_result *r)
{
    const double gb = r->swap_gib * (double)(1u << 30) / 1e9;
    return r->to_device_gb_s > 0 ? share(gb / r->to_device_gb_s, r->swap_in_s) : 0;
}

static bool on_gpu(const struct bench_settings *s)
{
    return strcmp(s->device, "cpu") != 0;
}

struct rate {
    const char *name;
    double value;
};

static void add_rates(json_t *o, const struct rate *rates, size_t count)
{
    for (size_t i = 0; i < count; i++)
        json_object_set_new(o, rates[i].name, json_real(rates[i].value));
}

/* What was measured, and nothing else: a GPU has other ceilings. */
static int print_json(const struct bench_settings *s, const struct bench_engine_result *r)
{
    const struct rate cpu[] = {{"dot_gop_s", r->dot_gop_s}, {"fma_gflop_s", r->fma_gflop_s}};
    const struct rate gpu[] = {{"copy_gb_s", r->copy_gb_s},
                               {"matmul_tflop_s", r->matmul_tflop_s},
                               {"to_device_gb_s", r->to_device_gb_s},
                               {"decode_floor_ms", r->decode_floor_ms},
                               {"prefill_floor_ms", r->prefill_floor_ms},
                               {"decode_of_floor", share(r->decode_floor_ms, r->decode_step_ms)},
                               {"prefill_of_floor", share(r->prefill_floor_ms, r->prefill_ms)},
                               {"host_ms", r->host_ms},
                               {"host_of_step", share(r->host_ms, r->decode_step_ms)}};
    const struct rate swap[] = {{"swap_gib", r->swap_gib},
                                {"swap_out_s", r->swap_out_s},
                                {"swap_in_s", r->swap_in_s},
                                {"swap_in_of_bus", swap_in_share(r)}};
    json_t *o = json_pack("{s:f,s:f,s:f,s:f,s:i,s:s,s:f,s:f,s:f}", "prefill_tps", r->prefill_tps,
                          "decode_tps", r->decode_tps, "load_s", r->load_s, "first_token_s", r->first_token_s,
                          "threads", (int)r->threads, "isa", r->isa, "prefill_ms", r->prefill_ms,
                          "decode_step_ms", r->decode_step_ms, "read_gb_s", r->read_gb_s);
    add_rates(o, on_gpu(s) ? gpu : cpu, on_gpu(s) ? TD_COUNT(gpu) : TD_COUNT(cpu));
    if (s->swap > 0)
        add_rates(o, swap, TD_COUNT(swap));
    json_object_set_new(o, "prefill_families", families_json(r->prefill_families, r->prefill_family_count));
    json_object_set_new(o, "decode_families", families_json(r->decode_families, r->decode_family_count));
    return cli_print_json(o);
}

/* A bar on a terminal, else a line when something begins. */
static void show_progress(void *label, uint64_t done, uint64_t total)
{
    if (cli_is_terminal(STDERR_FILENO))
        cli_progress(label, done, total);
    else if (done == 0)
        fprintf(stderr, "%s\n", (const char *)label);
}

static int check(const struct bench_settings *s, struct td_error *err)
{
    if (s->model[0] && s->shape[0])
        return td_fail(err, -TD_ERR_ARG, "--model and --shape: give one of them, a file or random weights");
    if (s->dtype[0] && !s->shape[0])
        return td_fail(err, -TD_ERR_ARG, "--dtype is of random weights (--shape); a file has its own types");
    return 0;
}

static int engine(const struct bench_settings *s)
{
    struct td_error err = {0};
    struct bench_engine_result r;
    struct bench_engine_options options = {
        .model_path = s->model,
        .threads = (unsigned)s->threads,
        .prompt_tokens = (uint32_t)s->prompt,
        .gen_tokens = (uint32_t)s->gen,
        .repeat_count = (uint32_t)s->repeat,
        .isa = s->isa[0] ? s->isa : NULL,
        .device = s->device,
        .shape = s->shape[0] ? s->shape : NULL,
        .dtype = s->dtype[0] ? s->dtype : NULL,
        .batch_count = (uint32_t)s->batch,
        .chunk_tokens = (uint32_t)s->chunk,
        .deterministic = s->deterministic,
        .kv_dtype = s->kv_dtype,
        .swap_tokens = (uint32_t)s->swap,
        .progress = s->json && !cli_is_terminal(STDERR_FILENO) ? NULL : show_progress,
    };
    int rc = check(s, &err);
    if (rc < 0 || (rc = bench_engine(&options, &r, &err)) < 0) {
        cli_fail("bench engine", &err);
        return rc == -TD_ERR_ARG || rc == -TD_ERR_CONTEXT ? CLI_USAGE : CLI_FAILED;
    }
    if (s->json)
        return print_json(s, &r);
    printf("%-10s %8lld tokens  %9.1f tokens/s\n", "prefill", (long long)s->prompt, r.prefill_tps);
    printf("%-10s %8lld tokens  %9.1f tokens/s\n", "decode", (long long)s->gen, r.decode_tps);
    printf("%-10s %.3f s, %.3f s to the first token, %u threads, %s\n", "load", r.load_s, r.first_token_s,
           r.threads, r.isa);
    if (r.matmul_tflop_s > 0) {
        printf("%-10s %9.2f ms  %5.1f %% of the floor %.2f ms\n", "prefill", r.prefill_ms,
               100 * share(r.prefill_floor_ms, r.prefill_ms), r.prefill_floor_ms);
        if (r.decode_step_ms > 0)
            printf("%-10s %9.3f ms  %5.1f %% of the floor %.2f ms, %lld sequences\n", "step",
                   r.decode_step_ms, 100 * share(r.decode_floor_ms, r.decode_step_ms), r.decode_floor_ms,
                   (long long)s->batch);
        if (r.host_ms > 0)
            printf("%-10s %9.3f ms  %5.1f %% of a step\n", "host", r.host_ms,
                   100 * share(r.host_ms, r.decode_step_ms));
        printf("%-10s read %.0f GB/s, copy %.0f GB/s, products %.0f TFLOP/s, from the host %.1f GB/s\n",
               "ceilings", r.read_gb_s, r.copy_gb_s, r.matmul_tflop_s, r.to_device_gb_s);
    } else if (r.prefill_family_count > 0) {
        printf("%-10s int8 %.0f GOP/s, f32 %.0f GFLOP/s, read %.1f GB/s\n", "ceilings", r.dot_gop_s,
               r.fma_gflop_s, r.read_gb_s);
    }
    print_families("prefill", r.prefill_families, r.prefill_family_count);
    print_families("decode", r.decode_families, r.decode_family_count);
    if (r.swap_gib > 0)
        printf("%-10s %.2f GiB to the host %.3f s, back into scattered pages %.3f s, %.1f %% of the bus\n",
               "swap", r.swap_gib, r.swap_out_s, r.swap_in_s, 100 * swap_in_share(&r));
    return CLI_OK;
}

int cli_bench(int argc, char **argv)
{
    struct bench_settings s;
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    if (argc > 1 && !strcmp(argv[1], "trace"))
        return cli_bench_trace(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "store"))
        return cli_bench_store(argc - 1, argv + 1);
    if (argc > 1 && !strcmp(argv[1], "codec"))
        return cli_bench_codec(argc - 1, argv + 1);
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    if (rest_count != 1 || strcmp(rest[0], "engine") != 0 || (!s.model[0] && !s.shape[0]))
        code = cli_usage(&SPEC);
    else
        code = engine(&s);
    config_free(config);
    return code;
}
