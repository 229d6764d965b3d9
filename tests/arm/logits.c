/* logits: prints, for every tiny golden model and every instruction set of this CPU, a checksum of the bits of all logits
 * of a prompt that crosses blocks. The lines must be the same on every machine: `arm` in deploy/test.sh compares x86
 * with Arm. */
#include "kernels/cpu/ops.h"
#include "tests/unit/kernels/models.h"

#define TOKENS 150
#define CHUNK  37

/* FNV-1a. */
static uint64_t checksum(const void *data, size_t size)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t logits_of(const char *name, const char *isa)
{
    struct run r;
    int32_t ids[TOKENS];
    run_open(&r, name, 2, isa);
    fill_ids(ids, TOKENS, r.model->params.vocab_count, 42);
    float *logits = new_logits(&r, TOKENS);
    run_chunks(&r, ids, TOKENS, CHUNK, r.pages, logits);
    uint64_t hash = checksum(logits, sizeof *logits * TOKENS * r.model->params.vocab_count);
    free(logits);
    run_close(&r);
    return hash;
}

int main(void)
{
    const struct cpu_ops *ops;
    for (size_t n = 0; n < TD_COUNT(golden_names); n++) {
        const uint64_t want = logits_of(golden_names[n], "portable");
        printf("%s %016llx\n", golden_names[n], (unsigned long long)want);
        for (size_t i = 0; (ops = cpu_ops_at(i)); i++)
            if (logits_of(golden_names[n], ops->name) != want)
                fail_msg("%s: %s gives other logits than portable", golden_names[n], ops->name);
    }
    return 0;
}
