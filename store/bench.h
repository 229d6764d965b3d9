/* bench: how fast a store is on this machine, beside what its disk and its cipher do by themselves in the same run. */
#ifndef TANDEM_STORE_BENCH_H
#define TANDEM_STORE_BENCH_H
#include "shared/base.h"
#include "shared/status.h"

#define STORE_BENCH_BUCKETS 32 /* of the histogram: bucket n counts look-ups of [2^n, 2^(n+1)) ns */

struct store_bench_options {
    const char *directory;   /* something is made in it, and removed */
    uint64_t size;           /* bytes written and read by each of raw file, cipher and store */
    uint32_t lookup_entries; /* blocks in the table of the look-ups */
    void (*progress)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
};
/* Of the slices that a run is cut into. */
struct store_bench_spread {
    double median, lowest, highest;
};
struct store_bench_result {
    uint64_t blocks, block_size; /* of the store's part */
    uint32_t slices;
    struct store_bench_spread raw_write, raw_read, cipher, put, get; /* bytes/s */
    /* The store beside the slower of disk and cipher. median: of the medians of its own half of the run; lowest and highest: quartiles of what the slices
     * say one by one, each beside its neighbours in time. */
    struct store_bench_spread put_share, get_share;
    bool direct; /* the raw file went past the page cache (O_DIRECT) */
    uint32_t io_threads, cipher_threads;
    double lookup_median_ns, lookup_p99_ns, lookup_p999_ns; /* two readings of the clock included */
    uint64_t histogram[STORE_BENCH_BUCKETS];
};
int store_bench(const struct store_bench_options *o, struct store_bench_result *out, struct td_error *err);

#endif
