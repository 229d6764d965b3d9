/* fuzz_index: hostile index.sqlite and keys.td beside a sound log. The first byte says what the rest is: 0 the index, byte for byte; 1 changes to a sound one
 * (u16le place, u8 value); 2 rows and lengths of segments that a sound SQLite file holds, 12 bytes each; 3 changes to keys.td, its CRC made right. An index
 * may cost hits, and never gives wrong ones: what is read, before and after a rebuild, is what was written, quality included, and nothing ends the process.
 * And it costs no record: whatever the index says, and whatever is deleted and compacted by its word, after a rebuild all that was not deleted is there.
 * A changed key file is refused. */
#include "shared/log.h"
#include "store/policy.h"
#include "store/store_internal.h"
#include "store/tier.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define INPUT_SIZE_MAX (64u << 10)
#define BLOCKS         3
#define LSN_MAX        300 /* of no record */
#define VALUES         128 /* one head of two dimensions */
#define PIECE_SIZE     (KV_PIECE_HEAD_SIZE + 2 * VALUES + 8)
#define SEGMENT        "seg-0000000000000001.td"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const names[] = {"keys.td", SEGMENT, INDEX_FILE};
static struct file {
    uint8_t *data;
    size_t size;
} files[TD_COUNT(names)];
static char directory[64];
static struct block {
    struct store_block block;
    struct span pieces[2];
    uint8_t bytes[2][PIECE_SIZE];
} blocks[BLOCKS];
static struct index_row rows[8];
static size_t row_count;
static uint64_t nonce;

static void need(bool good)
{
    if (!good)
        abort();
}

static const char *path_of(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static void write_file(const char *name, const uint8_t *data, size_t size)
{
    FILE *f = fopen(path_of(name), "wb");
    need(f && fwrite(data, 1, size, f) == size && fclose(f) == 0);
}

static void empty_directory(void)
{
    DIR *d = opendir(directory);
    need(d != NULL);
    for (const struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.')
            unlink(path_of(e->d_name));
    closedir(d);
}

static struct store_config config_of(void)
{
    struct store_config c = {
        .directory = directory, .ballast_size = 4096, .limit_size = 32u << 20, .commit_interval_ms = 1};
    memset(c.master_key, 7, sizeof c.master_key);
    return c;
}

static void make_block(struct kv_codec_scratch *scratch, struct block *b, uint8_t seed)
{
    uint16_t values[VALUES];
    struct kv_quality quality = {seed == 1 ? KV_L1 : KV_L0, KV_NUMERICS_CPU_V1, KV_FROM_CLOUD, 0};
    b->block = (struct store_block){
        .quality = quality, .block_index = seed, .layer_begin = 0, .layer_end = 1, .pieces = b->pieces};
    sha256_once(&seed, 1, b->block.id.bytes);
    for (uint8_t v = 0; v < 2; v++) {
        for (size_t i = 0; i < VALUES; i++)
            values[i] = (uint16_t)(seed * 1000u + v * 500u + i);
        struct kv_piece_head h = {.codec = KV_RAW,
                                  .is_value = v,
                                  .quality = quality,
                                  .block_index = seed,
                                  .token_count = KV_BLOCK_TOKENS,
                                  .kv_head_count = 1,
                                  .head_dim = 2};
        int64_t size = kv_piece_encode(scratch, &h, values, b->bytes[v], PIECE_SIZE);
        need(size > 0);
        b->pieces[v] = (struct span){b->bytes[v], (size_t)size};
    }
}

static void keep_file(size_t i)
{
    struct stat st;
    FILE *f = fopen(path_of(names[i]), "rb");
    need(f && fstat(fileno(f), &st) == 0);
    files[i].size = (size_t)st.st_size;
    files[i].data = malloc(files[i].size);
    need(files[i].data && fread(files[i].data, 1, files[i].size, f) == files[i].size && fclose(f) == 0);
}

static int keep_row(void *ctx, const struct index_row *row)
{
    (void)ctx;
    need(row_count < TD_COUNT(rows));
    rows[row_count++] = *row;
    return 0;
}

static int keep_segment(void *ctx, const struct index_segment *s)
{
    (void)ctx;
    nonce = s->nonce;
    return 0;
}

int __real_policy_create(const struct policy_config *config, struct policy **out);
int __wrap_policy_create(const struct policy_config *config, struct policy **out);

/* Room for few blocks: for a million it is 8 MiB, whose shadow the address sanitizer wrote at each opening, a third of a unit's time. */
int __wrap_policy_create(const struct policy_config *config, struct policy **out)
{
    struct policy_config few = *config;
    few.blocks_max = 1000;
    return __real_policy_create(&few, out);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    log_set_level((enum log_level)(LOG_ERROR + 1)); /* a false index is told of */
    snprintf(directory, sizeof directory, "/dev/shm/tandem-fuzz-index-%d", (int)getpid());
    struct store_config c = config_of();
    struct kv_codec_scratch *scratch = kv_codec_scratch_create(&(struct kv_shape){1, 1, 2});
    struct store *s;
    struct index *x;
    need(scratch && store_open(&c, &s, NULL) == 0);
    for (uint8_t i = 0; i < BLOCKS; i++) {
        make_block(scratch, &blocks[i], i);
        need(store_put(s, i == 2 ? "labs" : "acme", &blocks[i].block, NULL, NULL) == 0);
    }
    need(store_conv_put(s, "acme", "ann", "trip", 0, "ann's", 5, NULL, NULL) == 0);
    need(store_conv_put(s, "acme", "bob", "trip", 0, "bob's", 5, NULL, NULL) == 0);
    store_close(s);
    need(index_open(directory, &x) == 0 && index_each_row(x, keep_row, NULL) == 0 &&
         index_each_segment(x, keep_segment, NULL) == 0);
    index_close(x);
    for (size_t i = 0; i < TD_COUNT(names); i++)
        keep_file(i);
    kv_codec_scratch_destroy(scratch);
    return 0;
}

/* ---- what the fuzzer makes ---------------------------------------------------------------------------------- */

static void change(const char *name, struct file f, const uint8_t *data, size_t size)
{
    uint8_t *bytes = malloc(f.size);
    memcpy(bytes, f.data, f.size);
    for (; size >= 3; data += 3, size -= 3)
        bytes[load_le16(data) % f.size] = data[2];
    if (f.data == files[0].data)
        store_le32(bytes + f.size - 4, crc32c(0, bytes, f.size - 4));
    write_file(name, bytes, f.size);
    free(bytes);
}

/* A row that says of one record what is another's: u8 whose name, u8 whose place, pages, sizes and the rest as they come. */
static void write_rows(const uint8_t *data, size_t size)
{
    struct index *x;
    struct index_segment s = {1, nonce, size ? (uint64_t)RECORD_PAGE * data[0] : 0, 0};
    need(index_open(directory, &x) == 0 && index_apply(x, NULL, 0, &s, 1, LSN_MAX) == 0);
    for (; size >= 12; data += 12, size -= 12) {
        struct index_row row = rows[data[0] % row_count];
        const struct index_row *place = &rows[data[1] % row_count];
        row.type = (uint8_t)(data[2] & 1 ? place->type : row.type);
        row.segment_id = 1 + data[3] / 128;
        row.offset =
            data[2] & 2 ? (uint64_t)RECORD_PAGE * load_le16(data + 4) + (data[2] >> 4) : place->offset;
        row.stored_size = data[2] & 4 ? load_le32(data + 4) : place->stored_size;
        row.lsn = data[2] & 8 ? data[6] : place->lsn;
        row.quality.fidelity = data[7];
        row.layer_begin = data[8];
        row.layer_end = data[9];
        row.block_index = data[10];
        row.version = data[11];
        need(index_apply(x, &row, 1, &s, 1, data[3] & 64 ? data[6] : LSN_MAX) == 0);
    }
    index_close(x);
}

/* ---- what must hold ----------------------------------------------------------------------------------------- */

static bool block_is_right(struct store *s, const struct block *b, const char *tenant)
{
    struct tier_block *t;
    if (store_read_block(s, tenant, &b->block.id, &t) < 0)
        return false;
    need(memcmp(&t->block.quality, &b->block.quality, sizeof b->block.quality) == 0 &&
         t->block.layer_begin == 0 && t->block.layer_end == 1 &&
         t->block.block_index == b->block.block_index);
    for (size_t i = 0; i < 2; i++)
        need(t->pieces[i].size == b->pieces[i].size &&
             memcmp(t->pieces[i].data, b->pieces[i].data, b->pieces[i].size) == 0);
    tier_block_release(t);
    return true;
}

static bool conversation_is_right(struct store *s, const char *principal, const char *text)
{
    uint64_t version;
    uint8_t *body;
    size_t size;
    if (store_conv_get(s, "acme", principal, "trip", &version, &body, &size) < 0)
        return false;
    need(size == 5 && memcmp(body, text, 5) == 0);
    free(body);
    return true;
}

static size_t count_right(struct store *s)
{
    size_t count = 0;
    for (size_t i = 0; i < BLOCKS; i++) {
        count += block_is_right(s, &blocks[i], i == 2 ? "labs" : "acme");
        need(!block_is_right(s, &blocks[i], i == 2 ? "acme" : "labs"));
    }
    count += conversation_is_right(s, "ann", "ann's");
    return count + conversation_is_right(s, "bob", "bob's");
}

/* The first block is deleted, if it is known, and all that is sealed rewritten. */
static bool shake(struct store *s)
{
    uint64_t freed;
    bool deleted = store_delete(s, "acme", &blocks[0].block.id, NULL, NULL) == 0;
    need(store_flush(s) == 0 && store_compact(s, 0, NULL, NULL, &freed, NULL) == 0);
    count_right(s);
    return deleted;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct store_config c = config_of();
    struct store *s = NULL;
    uint64_t records;
    if (size < 1 || size > INPUT_SIZE_MAX)
        return 0;
    int mode = data[0] % 4;
    empty_directory();
    for (size_t i = 0; i < 2; i++)
        write_file(names[i], files[i].data, files[i].size);
    if (mode == 0)
        write_file(INDEX_FILE, data + 1, size - 1);
    else if (mode == 1)
        change(INDEX_FILE, files[2], data + 1, size - 1);
    else if (mode == 2)
        write_rows(data + 1, size - 1);
    else
        change("keys.td", files[0], data + 1, size - 1);
    int rc = store_open(&c, &s, NULL);
    need(rc == 0 || mode == 3);
    if (rc < 0)
        return 0;
    size_t found = count_right(s);
    need(mode != 3 || found == BLOCKS + 2);
    bool deleted = shake(s);
    store_close(s);
    if (mode == 3)
        return 0;
    need(store_rebuild(&c, NULL, NULL, &records, NULL) == 0 && store_open(&c, &s, NULL) == 0);
    need(block_is_right(s, &blocks[0], "acme") == !deleted && count_right(s) == BLOCKS + 2u - deleted);
    store_close(s);
    return 0;
}
