/* profile: where the time of steps goes, as totals that anybody may read (cuda.h). Between steps the device is idle, within them busy: two
 * looks at a clock. One pass in PROFILE_EVERY runs without its graph and with an event behind each of its parts; nothing overlaps in it,
 * so it is longer than others: what it tells is each part's share. The other passes pay nothing. */
#include "kernels/cuda/cuda_backend.h"
#include <stdlib.h>

#define PROFILE_FIRST 8   /* the pass that is looked at first, */
#define PROFILE_EVERY 256 /* and each so many behind it */
#define MARKS_MAX     1024

struct cuda_profiler {
    bool looks; /* at the pass in progress */
    bool every; /* and at all others */
    uint64_t passes, begun_us, ended_us;
    uint32_t count;
    enum cuda_part parts[MARKS_MAX]; /* what ends at an event; the first begins the pass */
    cudaEvent_t events[MARKS_MAX];   /* made when the first pass is looked at */
    uint64_t steps, looked_at, busy_us, idle_us, part_ns[CUDA_PARTS]; /* read by any thread */
};

static void add(uint64_t *to, uint64_t amount)
{
    __atomic_fetch_add(to, amount, __ATOMIC_RELAXED);
}

struct cuda_profiler *cuda_profiler_create(void)
{
    return calloc(1, sizeof(struct cuda_profiler));
}

void cuda_profiler_destroy(struct cuda_profiler *f)
{
    for (uint32_t i = 0; f && i < MARKS_MAX; i++)
        if (f->events[i])
            cudaEventDestroy(f->events[i]);
    free(f);
}

void cuda_profile_step(struct cuda_profiler *f, bool begins)
{
    uint64_t now = clock_mono_us();
    if (begins) {
        add(&f->idle_us, f->ended_us ? now - f->ended_us : 0);
        f->begun_us = now;
    } else {
        add(&f->steps, 1), add(&f->busy_us, now - f->begun_us);
        f->ended_us = now;
    }
}

static bool has_events(struct cuda_profiler *f)
{
    for (uint32_t i = 0; i < MARKS_MAX; i++)
        if (!f->events[i] && cudaEventCreate(&f->events[i])) {
            f->events[i] = NULL;
            return false;
        }
    return true;
}

bool cuda_profile_begin(struct cuda_backend *b)
{
    struct cuda_profiler *f = b->profiler;
    bool is_due = ++f->passes % PROFILE_EVERY == PROFILE_FIRST || f->every;
    f->looks = is_due && has_events(f);
    f->count = 0;
    cuda_profile_mark(b, CUDA_PART_OTHER);
    return f->looks;
}

void cuda_profile_mark(struct cuda_backend *b, enum cuda_part part)
{
    struct cuda_profiler *f = b->profiler;
    if (!f->looks || f->count == MARKS_MAX)
        return;
    if (f->count > 1 && f->parts[f->count - 1] == part)
        f->count--; /* one part that goes on */
    f->parts[f->count] = part;
    f->looks = !cudaEventRecord(f->events[f->count++], b->stream);
}

/* The stream has been waited for. */
void cuda_profile_end(struct cuda_backend *b)
{
    struct cuda_profiler *f = b->profiler;
    if (!f->looks)
        return;
    for (uint32_t i = 1; i < f->count; i++) {
        float ms = 0;
        if (!cudaEventElapsedTime(&ms, f->events[i - 1], f->events[i]))
            add(&f->part_ns[f->parts[i]], (uint64_t)(ms * 1e6f));
    }
    add(&f->looked_at, 1);
    f->looks = false;
}

static uint64_t now_at(const uint64_t *value)
{
    return __atomic_load_n(value, __ATOMIC_RELAXED);
}

void cuda_profile_read(const struct backend *base, struct cuda_profile *out)
{
    const struct cuda_profiler *f = ((const struct cuda_backend *)base)->profiler;
    *out = (struct cuda_profile){.steps = now_at(&f->steps),
                                 .looked_at = now_at(&f->looked_at),
                                 .busy_s = (double)now_at(&f->busy_us) * 1e-6,
                                 .idle_s = (double)now_at(&f->idle_us) * 1e-6};
    for (int i = 0; i < CUDA_PARTS; i++)
        out->part_s[i] = (double)now_at(&f->part_ns[i]) * 1e-9;
}

void cuda_profile_every(struct backend *base, bool every)
{
    ((struct cuda_backend *)base)->profiler->every = every;
}
