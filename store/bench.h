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
struct store_bench_result {
    uint64_t blocks, block_size;                  /* of the store's part */
    double raw_write, raw_read, cipher, put, get; /* bytes/s */
    bool direct;                                  /* the raw file went past the page cache (O_DIRECT) */
    uint32_t io_threads, cipher_threads;
    uint32_t lookups;
    double lookup_median_ns, lookup_p99_ns, lookup_p999_ns; /* two readings of the clock included */
    uint64_t histogram[STORE_BENCH_BUCKETS];
};
int store_bench(const struct store_bench_options *o, struct store_bench_result *out, struct td_error *err);

#endif
