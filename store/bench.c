/* bench: see bench.h.
 *
 * The raw file is written and read past the page cache in pieces of 1 MiB by IO_THREADS threads, as fio would; the cipher works on all cores. A store
 * can at best be as fast as the slower of the two. A machine is not the same from one second to the next (other programs, the host, the bursts that a
 * rented disk is granted), so a run is cut into slices: raw, cipher and store by turns, the order turned round each time, and what is compared are
 * medians and neighbours. Its segments are dropped from the page cache before they are read.
 * Look-ups are those of store_find among entries that are in the table only. */
#include "store/bench.h"
#include "shared/workers.h"
#include "store/store_internal.h"
#include "store/tiers.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PIECE_SIZE (1u << 20)
#define IO_THREADS 4
/* blocks that are put in turn, each once it has been written: as many wait as the writer can take */
#define SOURCES    128u
#define LAYERS     30 /* of a small model: a block of 1.4 MiB */
#define HEADS      3
#define HEAD_DIM   64
#define LOOKUPS    1000000u
#define STRIDE     7919u /* a prime: blocks are read in no order of the disk, each once */
#define SLICES_MIN 3u
#define SLICES_MAX 12u
#define SLICE_SIZE (128ull << 20) /* at least, where the run is long enough */
#define TENANT     "bench"

struct bench {
    const struct store_bench_options *o;
    struct store_bench_result *r;
    char directory[IO_PATH_MAX];
    struct store *store;
    struct workers *io, *cores, *readers;
    int fd;                      /* the raw file */
    size_t base;                 /* the slice's first piece, or block */
    size_t pieces, slice_blocks; /* a slice */
    struct tier_block *sources[SOURCES];
    bool writing;
    uint8_t *buffers[WORKERS_MAX]; /* PIECE_SIZE each, aligned */
    atomic_int failed;             /* negative errno or code */
    struct td_error *err;
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double rate_since(uint64_t start_ns, uint64_t bytes)
{
    uint64_t ns = now_ns() - start_ns;
    return ns ? (double)bytes * 1e9 / (double)ns : 0;
}

static void step(const struct bench *b, uint64_t done)
{
    if (b->o->progress)
        b->o->progress(b->o->ctx, done, 2 * b->r->slices + 1);
}

static int failed(const struct bench *b, const char *what)
{
    int code = atomic_load(&b->failed);
    return td_fail(b->err, -TD_ERR_IO, "cannot %s in %s: %s", what, b->o->directory, strerror(-code));
}

/* ---- the disk alone ----------------------------------------------------------------------------------------- */

static int raw_open(struct bench *b)
{
    char path[IO_PATH_MAX + 8];
    snprintf(path, sizeof path, "%s/raw", b->directory);
    b->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
    b->r->direct = b->fd >= 0;
    if (b->fd < 0)
        b->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (b->fd < 0)
        return td_fail(b->err, -TD_ERR_IO, "cannot make %s: %s", path, strerror(errno));
    unlink(path);
    return 0;
}

static void raw_task(void *ctx, size_t task, unsigned worker)
{
    struct bench *b = ctx;
    off_t at = (off_t)((b->base + task) * PIECE_SIZE);
    ssize_t n = b->writing ? pwrite(b->fd, b->buffers[worker], PIECE_SIZE, at)
                           : pread(b->fd, b->buffers[worker], PIECE_SIZE, at);
    if (n != PIECE_SIZE)
        atomic_store(&b->failed, n < 0 ? -errno : -EIO);
}

static double raw_slice(struct bench *b, uint32_t slice, bool writing)
{
    uint64_t start = now_ns();
    b->base = (size_t)slice * b->pieces;
    b->writing = writing;
    workers_run(b->io, b->pieces, raw_task, b);
    if (writing && fsync(b->fd) < 0)
        atomic_store(&b->failed, -errno);
    return rate_since(start, b->pieces * (uint64_t)PIECE_SIZE);
}

/* ---- the cipher alone --------------------------------------------------------------------------------------- */

static void cipher_task(void *ctx, size_t task, unsigned worker)
{
    struct bench *b = ctx;
    uint8_t key[CRYPTO_KEY_SIZE] = {0}, tag[CRYPTO_TAG_SIZE];
    store_le64(key, task); /* each piece its own key, as each record has */
    if (gcm_seal(key, 0, NULL, 0, b->buffers[worker], PIECE_SIZE, b->buffers[worker], tag) < 0)
        atomic_store(&b->failed, -EIO);
}

static double cipher_slice(struct bench *b)
{
    uint64_t start = now_ns();
    workers_run(b->cores, b->pieces, cipher_task, b);
    return rate_since(start, b->pieces * (uint64_t)PIECE_SIZE);
}

/* ---- the store ---------------------------------------------------------------------------------------------- */

static struct kv_block_id numbered(uint64_t n)
{
    struct kv_block_id id = {{0}};
    for (int i = 0; i < 4; i++) { /* splitmix64: spread as HMACs are */
        uint64_t x = (n * 4 + (uint64_t)i + 1) * 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        store_le64(id.bytes + 8 * i, x ^ (x >> 31));
    }
    return id;
}

/* Valid pieces of random values; one allocation, the caller's. */
static uint8_t *make_pieces(struct span pieces[2 * LAYERS], uint64_t *block_size)
{
    const struct kv_shape shape = {LAYERS, HEADS, HEAD_DIM};
    size_t values = kv_piece_values(&shape, KV_BLOCK_TOKENS), bound = kv_piece_bound(&shape, KV_BLOCK_TOKENS);
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&shape);
    uint16_t *source = malloc(values * sizeof *source);
    uint8_t *bytes = malloc(2 * LAYERS * bound);
    bool good = scratch && source && bytes && crypto_random(source, values * sizeof *source) == 0;
    *block_size = 0;
    for (size_t i = 0; good && i < values; i++)
        source[i] &= 0xbbff; /* finite */
    for (unsigned i = 0; good && i < 2 * LAYERS; i++) {
        struct kv_piece_head h = {.codec = KV_RAW,
                                  .is_value = (uint8_t)(i % 2),
                                  .quality = {KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0},
                                  .token_count = KV_BLOCK_TOKENS,
                                  .layer = (uint16_t)(i / 2),
                                  .kv_head_count = HEADS,
                                  .head_dim = HEAD_DIM};
        int64_t size = kv_piece_encode(scratch, &h, source, bytes + i * bound, bound);
        good = size > 0;
        pieces[i] = (struct span){bytes + i * bound, good ? (size_t)size : 0};
        *block_size += pieces[i].size;
    }
    kv_codec_scratch_destroy(scratch);
    free(source);
    if (good)
        return bytes;
    free(bytes);
    return NULL;
}

static void written(void *ctx, int status)
{
    struct bench *b = ctx;
    if (status < 0)
        atomic_store(&b->failed, -EIO);
}

/* As the engine's encoder leaves them. */
static int make_sources(struct bench *b)
{
    struct span pieces[2 * LAYERS];
    uint8_t *bytes = make_pieces(pieces, &b->r->block_size);
    int rc = bytes ? 0 : -TD_ERR_NOMEM;
    for (unsigned i = 0; i < SOURCES && rc == 0; i++) {
        struct tier_block *t = b->sources[i] = tier_block_create(LAYERS, b->r->block_size);
        if (!t) {
            rc = -TD_ERR_NOMEM;
            break;
        }
        t->block.quality = (struct kv_quality){KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0};
        t->block.layer_end = LAYERS;
        uint8_t *at = t->data;
        for (unsigned j = 0; j < 2 * LAYERS; at += pieces[j++].size) {
            memcpy(at, pieces[j].data, pieces[j].size);
            t->pieces[j] = (struct span){at, pieces[j].size};
        }
    }
    free(bytes);
    if (rc < 0)
        return td_fail(b->err, rc, "cannot measure: out of memory");
    b->slice_blocks = (size_t)(b->pieces * (uint64_t)PIECE_SIZE / b->r->block_size);
    b->slice_blocks -= b->slice_blocks % STRIDE == 0; /* so that a stride gets to each */
    b->r->blocks = b->slice_blocks * b->r->slices;
    return 0;
}

static void wait_a_little(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

static double put_slice(struct bench *b, uint32_t slice)
{
    uint64_t start = now_ns();
    int rc = 0;
    for (size_t i = slice * b->slice_blocks; i < (slice + 1) * b->slice_blocks && rc == 0; i++) {
        struct tier_block *t = b->sources[i % SOURCES];
        while (atomic_load(&t->references) > 1)
            wait_a_little(); /* the writer has it */
        t->block.id = numbered(i);
        while ((rc = store_put_held(b->store, TENANT, t, written, b)) == -TD_ERR_FULL)
            wait_a_little();
    }
    rc = rc < 0 ? rc : store_flush(b->store);
    if (rc < 0)
        atomic_store(&b->failed, -EIO);
    return rate_since(start, b->slice_blocks * b->r->block_size);
}

/* What was written is on the disk, not in memory. */
static void drop_cached(const char *directory)
{
    char path[IO_PATH_MAX + NAME_MAX + 2];
    DIR *d = opendir(directory);
    struct dirent *e;
    while (d && (e = readdir(d))) {
        snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    if (d)
        closedir(d);
}

static void get_task(void *ctx, size_t task, unsigned worker)
{
    struct bench *b = ctx;
    struct kv_block_id id = numbered(b->base + task * STRIDE % b->slice_blocks); /* in no order of the disk */
    struct tier_block *block;
    (void)worker;
    if (store_read_block(b->store, TENANT, &id, &block) < 0)
        atomic_store(&b->failed, -EIO);
    else
        tier_block_release(block);
}

static double get_slice(struct bench *b, uint32_t slice)
{
    uint64_t start = now_ns();
    b->base = slice * b->slice_blocks;
    workers_run(b->readers, b->slice_blocks, get_task, b);
    return rate_since(start, b->slice_blocks * b->r->block_size);
}

/* ---- by turns ----------------------------------------------------------------------------------------------- */

static int compare_rates(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* From the lowest to the highest but `skip` at either end. Sorts the values. */
static struct store_bench_spread spread_of(double *values, uint32_t count, uint32_t skip)
{
    qsort(values, count, sizeof *values, compare_rates);
    return (struct store_bench_spread){(values[(count - 1) / 2] + values[count / 2]) / 2, values[skip],
                                       values[count - 1 - skip]};
}

struct half { /* of the run: writing, then reading */
    double raw[SLICES_MAX], cipher[SLICES_MAX], store[SLICES_MAX];
};

static void measure_half(struct bench *b, struct half *h, bool writing)
{
    for (uint32_t i = 0; i < b->r->slices && atomic_load(&b->failed) == 0; i++) {
        bool store_first = i % 2 == 1;
        if (store_first)
            h->store[i] = writing ? put_slice(b, i) : get_slice(b, i);
        else
            h->raw[i] = raw_slice(b, i, writing);
        h->cipher[i] = cipher_slice(b);
        if (store_first)
            h->raw[i] = raw_slice(b, i, writing);
        else
            h->store[i] = writing ? put_slice(b, i) : get_slice(b, i);
        step(b, (writing ? 0 : b->r->slices) + i + 1);
    }
}

static struct store_bench_spread share_of(struct half *h, uint32_t count)
{
    double shares[SLICES_MAX] = {0};
    for (uint32_t i = 0; i < count; i++)
        shares[i] = h->store[i] / TD_MIN(h->raw[i], h->cipher[i]);
    struct store_bench_spread share = spread_of(shares, count, count / 4);
    double raw = spread_of(h->raw, count, 0).median, cipher = spread_of(h->cipher, count, 0).median;
    share.median = spread_of(h->store, count, 0).median / TD_MIN(raw, cipher);
    return share;
}

static int measure_rates(struct bench *b)
{
    static struct half written_half, read_half;
    struct store_bench_result *r = b->r;
    double cipher[2 * SLICES_MAX];
    measure_half(b, &written_half, true);
    if (atomic_load(&b->failed) < 0)
        return failed(b, "write");
    sync();
    drop_cached(b->directory);
    measure_half(b, &read_half, false);
    if (atomic_load(&b->failed) < 0)
        return failed(b, "read back");
    memcpy(cipher, written_half.cipher, r->slices * sizeof *cipher);
    memcpy(cipher + r->slices, read_half.cipher, r->slices * sizeof *cipher);
    r->cipher = spread_of(cipher, 2 * r->slices, 0);
    r->put_share = share_of(&written_half, r->slices);
    r->get_share = share_of(&read_half, r->slices);
    r->raw_write = spread_of(written_half.raw, r->slices, 0);
    r->put = spread_of(written_half.store, r->slices, 0);
    r->raw_read = spread_of(read_half.raw, r->slices, 0);
    r->get = spread_of(read_half.store, r->slices, 0);
    return 0;
}

/* ---- look-ups ----------------------------------------------------------------------------------------------- */

static int fill_table(struct bench *b)
{
    uint32_t tenant = keys_find(b->store->keys, TENANT);
    for (uint32_t i = 0; i < b->o->lookup_entries; i++) {
        struct kv_block_id id = numbered((1ull << 40) + i);
        struct table_shard *shard = table_lock(&b->store->blocks, id.bytes);
        struct entry *e = table_insert(&b->store->blocks, shard, tenant, id.bytes);
        if (e)
            e->segment_id = 1, e->stored_size = PIECE_SIZE;
        table_unlock(shard);
        if (!e)
            return td_fail(b->err, -TD_ERR_NOMEM, "cannot hold %u blocks in the table: out of memory",
                           b->o->lookup_entries);
    }
    return 0;
}

static int compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Every other one is there. */
static int measure_lookups(struct bench *b)
{
    struct store_block_info info;
    int rc = fill_table(b);
    uint32_t *ns = rc < 0 ? NULL : malloc(LOOKUPS * sizeof *ns);
    if (!ns)
        return rc < 0 ? rc : td_fail(b->err, -TD_ERR_NOMEM, "cannot measure: out of memory");
    uint64_t x = 1, wrong = 0;
    for (uint32_t i = 0; i < LOOKUPS; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        bool there = i % 2 == 0;
        struct kv_block_id id =
            numbered((there ? 1ull << 40 : 1ull << 41) + (x >> 33) % b->o->lookup_entries);
        uint64_t start = now_ns();
        bool found = store_find(b->store, TENANT, &id, &info) == 0;
        uint64_t took = now_ns() - start;
        wrong += found != there;
        ns[i] = (uint32_t)TD_MIN(took, (uint64_t)UINT32_MAX);
        unsigned bucket = 0;
        while (bucket + 1 < STORE_BENCH_BUCKETS && took >> (bucket + 1))
            bucket++;
        b->r->histogram[bucket]++;
    }
    qsort(ns, LOOKUPS, sizeof *ns, compare);
    b->r->lookup_median_ns = ns[LOOKUPS / 2];
    b->r->lookup_p99_ns = ns[LOOKUPS / 100 * 99];
    b->r->lookup_p999_ns = ns[LOOKUPS / 1000 * 999];
    free(ns);
    step(b, 2 * b->r->slices + 1);
    return wrong ? td_fail(b->err, -TD_ERR_INTERNAL, "look-ups answered wrongly") : 0;
}

/* ---- the run ------------------------------------------------------------------------------------------------ */

static void remove_directory(const char *directory)
{
    char path[IO_PATH_MAX + NAME_MAX + 2];
    DIR *d = opendir(directory);
    struct dirent *e;
    while (d && (e = readdir(d))) {
        snprintf(path, sizeof path, "%s/%s", directory, e->d_name);
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            unlink(path);
    }
    if (d)
        closedir(d);
    rmdir(directory);
}

static int prepare(struct bench *b)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned threads = (unsigned)TD_MIN(TD_MAX(cores, 1L), (long)WORKERS_MAX);
    b->r->cipher_threads = threads;
    b->r->io_threads = IO_THREADS;
    if (b->o->size < 64ull * PIECE_SIZE)
        return td_fail(b->err, -TD_ERR_ARG, "cannot measure with so little: --size is at least 64M");
    if (snprintf(b->directory, sizeof b->directory, "%s/bench-XXXXXX", b->o->directory) >= IO_PATH_MAX ||
        !mkdtemp(b->directory)) {
        b->directory[0] = '\0';
        return td_fail(b->err, -TD_ERR_IO, "cannot make a directory in %s: %s", b->o->directory,
                       strerror(errno));
    }
    b->r->slices =
        (uint32_t)TD_MIN(TD_MAX(b->o->size / SLICE_SIZE, (uint64_t)SLICES_MIN), (uint64_t)SLICES_MAX);
    b->pieces = (size_t)(b->o->size / b->r->slices / PIECE_SIZE);
    b->io = workers_create(IO_THREADS);
    b->cores = workers_create(threads);
    b->readers = workers_create(tiers_default_threads()); /* as a node does */
    bool good = b->io && b->cores && b->readers;
    for (unsigned i = 0; i < TD_MAX(threads, (unsigned)IO_THREADS) && good; i++) {
        b->buffers[i] = aligned_alloc(4096, PIECE_SIZE);
        good = b->buffers[i] && crypto_random(b->buffers[i], PIECE_SIZE) == 0;
    }
    return good ? 0 : td_fail(b->err, -TD_ERR_NOMEM, "cannot measure: out of memory");
}

static int open_store(struct bench *b)
{
    uint8_t chain[CRYPTO_KEY_SIZE];
    struct store_config config = {.directory = b->directory, .limit_size = 2 * b->o->size + (1u << 30)};
    int rc = crypto_random(config.master_key, sizeof config.master_key);
    rc = rc < 0 ? rc : store_open(&config, &b->store, b->err);
    return rc < 0 ? rc : store_chain_key(b->store, TENANT, chain, b->err);
}

int store_bench(const struct store_bench_options *o, struct store_bench_result *out, struct td_error *err)
{
    struct bench b = {.o = o, .r = out, .err = err, .fd = -1};
    memset(out, 0, sizeof *out);
    int rc = prepare(&b);
    rc = rc < 0 ? rc : raw_open(&b);
    rc = rc < 0 ? rc : make_sources(&b);
    rc = rc < 0 ? rc : open_store(&b);
    rc = rc < 0 ? rc : measure_rates(&b);
    rc = rc < 0 ? rc : measure_lookups(&b);
    if (b.store)
        store_close(b.store);
    for (size_t i = 0; i < TD_COUNT(b.sources); i++)
        tier_block_release(b.sources[i]);
    for (size_t i = 0; i < TD_COUNT(b.buffers); i++)
        free(b.buffers[i]);
    if (b.fd >= 0)
        close(b.fd);
    workers_destroy(b.io);
    workers_destroy(b.cores);
    workers_destroy(b.readers);
    if (b.directory[0])
        remove_directory(b.directory);
    return rc;
}
