/* tandem bench trace: what a cache of some size would have saved on recorded requests, by policy. */
#include "cli/cli.h"
#include "cli/trace.h"
#include "cli/trace_chart.h"
#include <stdio.h>
#include <stdlib.h>

#define SIZES_MAX CHART_POINTS_MAX
#define FILES_MAX 16

struct trace_settings {
    const char *sizes, *policy, *svg;
    uint64_t block_size;
    bool json;
};
#define FIELD(name) offsetof(struct trace_settings, name)
static const struct config_option OPTIONS[] = {
    {.name = "sizes",
     .type = CONFIG_STRING,
     .offset = FIELD(sizes),
     .fallback = "1,3,10,30",
     .metavar = "LIST",
     .help = "capacities, in % of the trace's unique blocks"},
    {.name = "policy",
     .type = CONFIG_STRING,
     .offset = FIELD(policy),
     .fallback = "all",
     .metavar = "NAME",
     .help = "tandem, demoting (the same, re-encoding before it evicts), lru, s3fifo, belady (the bound: it "
             "knows the future) or all"},
    {.name = "block-bytes",
     .type = CONFIG_SIZE,
     .offset = FIELD(block_size),
     .fallback = "64M",
     .min = 1,
     .max = 1ll << 32,
     .metavar = "SIZE",
     .help = "bytes of a block: 512 tokens of an 8B model in f16"},
    {.name = "svg",
     .type = CONFIG_STRING,
     .offset = FIELD(svg),
     .metavar = "FILE",
     .help = "write the chart there; only with one trace"},
    {.name = "json", .type = CONFIG_BOOL, .offset = FIELD(json), .help = "one JSON object a trace"},
};
static const struct config_spec SPEC = {
    .program = "tandem bench trace",
    .env_prefix = "TANDEM_BENCH_TRACE",
    .summary =
        "FILE...: hit rate of the cache policy on request traces (JSON lines with timestamp and hash_ids)",
    .usage = "FILE... [--sizes LIST] [--policy NAME] [--json] [--svg FILE]",
    .examples = "  tandem bench trace conversation_trace.jsonl\n"
                "  tandem bench trace conversation_trace.jsonl --sizes 3,10 --policy tandem --json\n"
                "  tandem bench trace conversation_trace.jsonl --svg hits.svg\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

static const struct {
    const char *name;
    trace_replay replay;
} POLICIES[] = {
    {"tandem", trace_replay_tandem}, {"demoting", trace_replay_demoting}, {"lru", trace_replay_lru},
    {"s3fifo", trace_replay_s3fifo}, {"belady", trace_replay_belady},
};
#define POLICY_COUNT TD_COUNT(POLICIES)

struct plan { /* what to replay, and what came out */
    double sizes[SIZES_MAX];
    size_t size_count;
    bool wanted[POLICY_COUNT];
    uint32_t capacity[SIZES_MAX];
    struct trace_result results[POLICY_COUNT][SIZES_MAX];
};

static bool parse_sizes(const char *text, struct plan *plan)
{
    for (double last = 0; plan->size_count < SIZES_MAX;) {
        char *end;
        double size = strtod(text, &end);
        if (end == text || !(size > last) || !(size <= 100))
            return false;
        last = plan->sizes[plan->size_count++] = size;
        if (!*end)
            return true;
        if (*end != ',')
            return false;
        text = end + 1;
    }
    return false;
}

static bool parse_policy(const char *name, struct plan *plan)
{
    bool any = false;
    for (size_t i = 0; i < POLICY_COUNT; i++)
        any |= plan->wanted[i] = !strcmp(name, "all") || !strcmp(name, POLICIES[i].name);
    return any;
}

static int replay_all(const struct trace *t, struct plan *plan, struct td_error *err)
{
    uint64_t done = 0, total = POLICY_COUNT * plan->size_count;
    for (size_t k = 0; k < plan->size_count; k++) {
        double blocks = t->unique * plan->sizes[k] / 100;
        plan->capacity[k] = blocks < 1 ? 1 : (uint32_t)blocks;
        for (size_t i = 0; i < POLICY_COUNT; i++) {
            int rc = plan->wanted[i] ? POLICIES[i].replay(t, plan->capacity[k], &plan->results[i][k]) : 0;
            if (rc < 0)
                return td_fail(err, rc, "cannot replay: %s", td_status_text(rc));
            cli_progress((char[]){"replaying"}, ++done, total);
        }
    }
    return 0;
}

static double percent(uint64_t part, uint64_t whole)
{
    return whole ? 100.0 * (double)part / (double)whole : 0;
}

static void print_table(const struct trace *t, const struct plan *plan, const char *path, uint64_t block_size)
{
    char read[32], written[32];
    printf("%s: %zu request%s, %zu block reference%s, %u unique; %.1f %% hit in an unbounded cache\n", path,
           t->request_count, TD_S(t->request_count), t->reference_count, TD_S(t->reference_count), t->unique,
           percent(t->reference_count - t->unique, t->reference_count));
    printf("%9s %10s  %-8s %9s %8s %12s %12s %10s\n", "capacity", "blocks", "policy", "hits", "rate",
           "from cache", "to cache", "lossy hits");
    for (size_t k = 0; k < plan->size_count; k++)
        for (size_t i = 0; i < POLICY_COUNT; i++) {
            const struct trace_result *r = &plan->results[i][k];
            if (plan->wanted[i])
                printf("%7g %% %10u  %-8s %9llu %6.2f %% %12s %12s %10llu\n", plan->sizes[k],
                       plan->capacity[k], POLICIES[i].name, (unsigned long long)r->hits,
                       percent(r->hits, t->reference_count), cli_bytes(r->hits * block_size, read),
                       cli_bytes(r->inserted * block_size, written), (unsigned long long)r->lossy_hits);
        }
}

static void print_json(const struct trace *t, const struct plan *plan, const char *path, uint64_t block_size)
{
    json_t *rows = json_array();
    for (size_t k = 0; k < plan->size_count; k++)
        for (size_t i = 0; i < POLICY_COUNT; i++) {
            const struct trace_result *r = &plan->results[i][k];
            if (plan->wanted[i])
                json_array_append_new(
                    rows, json_pack("{s:f,s:I,s:s,s:I,s:f,s:I,s:I,s:I,s:I}", "size_percent", plan->sizes[k],
                                    "capacity_blocks", (json_int_t)plan->capacity[k], "policy",
                                    POLICIES[i].name, "hits", (json_int_t)r->hits, "hit_rate",
                                    percent(r->hits, t->reference_count) / 100, "bytes_from_cache",
                                    (json_int_t)(r->hits * block_size), "bytes_to_cache",
                                    (json_int_t)(r->inserted * block_size), "demoted", (json_int_t)r->demoted,
                                    "lossy_hits", (json_int_t)r->lossy_hits));
        }
    cli_print_json(json_pack("{s:s,s:I,s:I,s:I,s:o}", "trace", path, "requests", (json_int_t)t->request_count,
                             "references", (json_int_t)t->reference_count, "unique", (json_int_t)t->unique,
                             "results", rows));
}

static int write_chart(const struct trace *t, const struct plan *plan, const char *path, struct td_error *err)
{
    struct chart c = {.title = "Blocks found in the cache, by policy",
                      .x_label = "capacity, % of the trace's unique blocks",
                      .y_label = "hits, % of all blocks asked for",
                      .point_count = plan->size_count};
    memcpy(c.x, plan->sizes, sizeof c.x);
    for (size_t i = 0; i < POLICY_COUNT; i++) {
        if (!plan->wanted[i])
            continue;
        for (size_t k = 0; k < plan->size_count; k++)
            c.y[c.series_count][k] = percent(plan->results[i][k].hits, t->reference_count);
        c.names[c.series_count++] = POLICIES[i].name;
    }
    return trace_chart_write(&c, path, err);
}

static int bench_file(const struct trace_settings *s, const char *path, struct plan *plan)
{
    struct td_error err = {0};
    struct trace t;
    int rc = trace_load(&t, path, cli_progress, (char[]){"reading"}, &err);
    rc = rc < 0 ? rc : replay_all(&t, plan, &err);
    if (rc == 0 && s->json)
        print_json(&t, plan, path, s->block_size);
    else if (rc == 0)
        print_table(&t, plan, path, s->block_size);
    if (rc == 0 && s->svg[0])
        rc = write_chart(&t, plan, s->svg, &err);
    trace_free(&t);
    return rc < 0 ? cli_fail("bench trace", &err) : CLI_OK;
}

int cli_bench_trace(int argc, char **argv)
{
    struct trace_settings s;
    struct plan plan = {0};
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    if (rest_count < 1 || rest_count > FILES_MAX || (s.svg[0] && rest_count > 1))
        code = cli_usage(&SPEC);
    else if (!parse_sizes(s.sizes, &plan))
        fprintf(
            stderr,
            "tandem bench trace: --sizes takes up to %d percentages in ascending order, as in 1,3,10,30\n",
            SIZES_MAX);
    else if (!parse_policy(s.policy, &plan))
        fprintf(stderr, "tandem bench trace: there is no policy '%s'; tandem, lru, s3fifo, belady or all\n",
                s.policy);
    else
        for (int i = 0; i < rest_count; i++)
            if ((code = bench_file(&s, rest[i], &plan)) != CLI_OK)
                break;
    config_free(config);
    return code;
}
