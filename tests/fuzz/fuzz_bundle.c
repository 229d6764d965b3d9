/* fuzz_bundle: hostile bytes as an exported store. Whoever knows the words can seal anything, so the frames are the fuzzer's own, each u32le size and bytes, and
 * sealed here; the first byte says whether a sound head goes before them (bit 0), whether the operator vouches for the file (bit 1), or whether
 * the rest is the file itself (bit 2). Nothing may come in that does not check out: afterwards every record of the store must verify. */
#include "shared/log.h"
#include "store/bundle.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define INPUT_SIZE_MAX (256u << 10)
#define RUNS           512 /* inputs that one store takes */

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char HEAD[] =
    "{\"format\":\"tandem-store\",\"version\":1,\"tenant\":\"acme\",\"principal\":\"ann\","
    "\"fingerprint\":\"f100000000000000000000000000000000000000000000000000000000000000\","
    "\"layout\":\"1a00000000000000000000000000000000000000000000000000000000000000\"}";
static char directory[64], path[96];
static struct store *store;

static void need(bool good)
{
    if (!good)
        abort();
}

static void open_store(void)
{
    struct store_config config = {
        .directory = directory, .ballast_size = 4096, .limit_size = 32u << 20, .commit_interval_ms = 1};
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", directory);
    need(system(command) == 0);
    memset(config.master_key, 7, sizeof config.master_key);
    need(store_open(&config, &store, NULL) == 0);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    log_set_level(LOG_ERROR);
    snprintf(directory, sizeof directory, "/dev/shm/tandem-fuzz-bundle-%d", (int)getpid());
    snprintf(path, sizeof path, "%s.file", directory);
    open_store();
    return 0;
}

/* As it is, but for the number of iterations: the fuzzer has better things to do than to hash. */
static void write_raw(const uint8_t *data, size_t size)
{
    enum { ITERATIONS_AT = 40 };
    uint8_t *bytes = malloc(size + 1);
    FILE *f = fopen(path, "wb");
    memcpy(bytes, data, size);
    if (size >= ITERATIONS_AT + 4)
        memset(bytes + ITERATIONS_AT + 1, 0, 3);
    need(f && fwrite(bytes, 1, size, f) == size);
    free(bytes);
    need(fclose(f) == 0);
}

static void write_sealed(const uint8_t *data, size_t size, bool with_head)
{
    struct portable *p;
    struct reader r = reader_over(data, size);
    need(portable_create_with(path, "words", 1, &p, NULL) == 0);
    if (with_head)
        need(portable_write(p, HEAD, sizeof HEAD - 1, NULL) == 0);
    while (r.next < r.end && !r.bad) {
        uint32_t length = reader_u32(&r);
        length = (uint32_t)TD_MIN((size_t)length, (size_t)(r.end - r.next));
        const uint8_t *frame = reader_take(&r, length);
        need(!frame || portable_write(p, frame, length, NULL) == 0);
    }
    need(portable_finish(p, NULL) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static unsigned runs;
    struct portable *p;
    struct bundle_counts n;
    struct td_error err = {0};
    if (size < 1 || size > INPUT_SIZE_MAX)
        return 0;
    unlink(path);
    if (data[0] & 4)
        write_raw(data + 1, size - 1);
    else
        write_sealed(data + 1, size - 1, data[0] & 1);
    if (portable_open(path, "words", &p, &err) == 0) {
        int rc = bundle_import(store, "", "", data[0] & 2, p, NULL, &n, &err);
        need(rc == 0 || err.text[0]);
        portable_close(p);
    }
    if (++runs % RUNS == 0) {
        uint64_t records, bad;
        need(store_verify(store, NULL, NULL, &records, &bad, NULL) == 0 && bad == 0);
        store_close(store);
        open_store();
    }
    return 0;
}
