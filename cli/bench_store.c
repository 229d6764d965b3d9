/* tandem bench store: how fast a store is on a disk, beside what disk and cipher do by themselves. */
#include "cli/cli.h"
#include "store/bench.h"
#include <stdio.h>

struct bench_settings {
    const char *directory;
    uint64_t size;
    int64_t entries;
    bool json;
};
#define FIELD(name) offsetof(struct bench_settings, name)
static const struct config_option OPTIONS[] = {
    {.name = "store",
     .type = CONFIG_STRING,
     .offset = FIELD(directory),
     .metavar = "DIR",
     .help = "a directory on the disk in question; what is made in it is removed"},
    {.name = "size",
     .type = CONFIG_SIZE,
     .offset = FIELD(size),
     .fallback = "1G",
     .min = 1 << 20,
     .metavar = "SIZE",
     .help = "bytes that each part writes and reads"},
    {.name = "entries",
     .type = CONFIG_INT,
     .offset = FIELD(entries),
     .fallback = "1000000",
     .min = 1,
     .max = 100000000,
     .metavar = "N",
     .help = "blocks in the table of the look-ups"},
    {.name = "json",
     .type = CONFIG_BOOL,
     .offset = FIELD(json),
     .help = "one JSON object instead of a table"},
};
static const struct config_spec SPEC = {
    .program = "tandem bench",
    .env_prefix = "TANDEM_BENCH",
    .summary = "How fast a store is on a disk of this machine.",
    .usage = "store --store DIR [options]",
    .examples = "  tandem bench store --store /var/lib/tandem --size 4G\n",
    .options = OPTIONS,
    .option_count = TD_COUNT(OPTIONS),
};

/* In units of `unit`: {"median", "lowest", "highest"}. */
static json_t *spread(const struct store_bench_spread *p, double unit)
{
    return json_pack("{s:f,s:f,s:f}", "median", p->median / unit, "lowest", p->lowest / unit, "highest",
                     p->highest / unit);
}

static int print_json(const struct store_bench_result *r)
{
    json_t *histogram = json_array();
    for (unsigned i = 0; i < STORE_BENCH_BUCKETS; i++)
        json_array_append_new(histogram, json_integer((json_int_t)r->histogram[i]));
    return cli_print_json(
        json_pack("{s:I,s:I,s:i,s:b,s:i,s:i,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:f,s:f,s:f,s:o}", "blocks",
                  (json_int_t)r->blocks, "block_bytes", (json_int_t)r->block_size, "slices", (int)r->slices,
                  "direct", r->direct, "io_threads", (int)r->io_threads, "cipher_threads",
                  (int)r->cipher_threads, "raw_write_mb_s", spread(&r->raw_write, 1e6), "raw_read_mb_s",
                  spread(&r->raw_read, 1e6), "cipher_mb_s", spread(&r->cipher, 1e6), "put_mb_s",
                  spread(&r->put, 1e6), "get_mb_s", spread(&r->get, 1e6), "put_of_ceiling",
                  spread(&r->put_share, 1), "get_of_ceiling", spread(&r->get_share, 1), "lookup_median_us",
                  r->lookup_median_ns / 1e3, "lookup_p99_us", r->lookup_p99_ns / 1e3, "lookup_p999_us",
                  r->lookup_p999_ns / 1e3, "lookup_histogram_log2_ns", histogram));
}

static void print_histogram(const struct store_bench_result *r)
{
    enum { WIDTH = 50 };
    uint64_t most = 1;
    for (unsigned i = 0; i < STORE_BENCH_BUCKETS; i++)
        most = TD_MAX(most, r->histogram[i]);
    for (unsigned i = 0; i < STORE_BENCH_BUCKETS; i++)
        if (r->histogram[i])
            printf("  from %10.3f us %9llu %.*s\n", (double)(1u << i) / 1e3,
                   (unsigned long long)r->histogram[i], (int)(r->histogram[i] * WIDTH / most),
                   "##################################################");
}

static int print(const struct store_bench_result *r, int64_t entries)
{
    const struct {
        const char *name;
        const struct store_bench_spread *rate, *share;
    } rows[] = {{"raw write", &r->raw_write, NULL},
                {"raw read", &r->raw_read, NULL},
                {"cipher", &r->cipher, NULL},
                {"store put", &r->put, &r->put_share},
                {"store get", &r->get, &r->get_share}};
    printf("medians of %u slices, by turns (lowest to highest)\n", r->slices);
    for (size_t i = 0; i < TD_COUNT(rows); i++) {
        const struct store_bench_spread *rate = rows[i].rate, *share = rows[i].share;
        printf("%-10s %9.1f MB/s (%.0f to %.0f)", rows[i].name, rate->median / 1e6, rate->lowest / 1e6,
               rate->highest / 1e6);
        if (share)
            printf("  %5.1f %% of the smaller of disk and cipher (half of the slices: %.0f to %.0f)",
                   100 * share->median, 100 * share->lowest, 100 * share->highest);
        printf("\n");
    }
    printf("%llu blocks of %.2f MB; raw file %s, %u threads; cipher on %u cores\n",
           (unsigned long long)r->blocks, (double)r->block_size / 1e6,
           r->direct ? "past the page cache" : "through the page cache", r->io_threads, r->cipher_threads);
    printf("look-up among %lld blocks: median %.2f us, p99 %.2f us, p99.9 %.2f us\n", (long long)entries,
           r->lookup_median_ns / 1e3, r->lookup_p99_ns / 1e3, r->lookup_p999_ns / 1e3);
    print_histogram(r);
    return CLI_OK;
}

int cli_bench_store(int argc, char **argv)
{
    struct bench_settings s;
    struct config *config = NULL;
    char **rest = NULL;
    int rest_count = 0, code = CLI_USAGE;
    struct td_error err = {0};
    struct store_bench_result r;
    if (cli_load(&SPEC, argc, argv, &s, &config, &rest, &rest_count, &code) != 0)
        return code;
    struct store_bench_options o = {.directory = s.directory,
                                    .size = s.size,
                                    .lookup_entries = (uint32_t)s.entries,
                                    .progress = cli_progress,
                                    .ctx = (char[]){"measuring"}};
    if (rest_count != 0 || !s.directory[0])
        code = cli_usage(&SPEC);
    else if (store_bench(&o, &r, &err) < 0)
        code = cli_fail("bench store", &err);
    else
        code = s.json ? print_json(&r) : print(&r, s.entries);
    config_free(config);
    return code;
}
