/* engine on a real GPU, --deterministic: what comes back from host memory and from the disk gives the reply of a fresh prefill, which is computed by
 * another engine on the same GPU; the memory for swaps is pinned by its thread; a lost device fails what runs and nothing that is stored. Skipped
 * where no GPU is. Some of it also on pages of 8 bits. The same with a device's twin on the CPU: test_engine_device.c. */
#include "engine_rig.h"

#ifdef TANDEM_HAS_CUDA
#include "kernels/cuda/kernels.h"

#define VOCAB 256

enum { BLOCKS = 7, PROMPT = BLOCKS * 64 + 8, REPLY = 4 };

static enum kv_dtype kv_dtype; /* of the pages */

static int with_fp8(void **state)
{
    (void)state;
    kv_dtype = KV_DTYPE_FP8;
    return 0;
}

static int with_int8(void **state)
{
    (void)state;
    kv_dtype = KV_DTYPE_INT8;
    return 0;
}

static int with_f16(void **state)
{
    (void)state;
    kv_dtype = KV_DTYPE_F16;
    return 0;
}

static void ask(struct rig *r, struct client *c, uint32_t seed)
{
    int32_t ids[PROMPT], reply[REPLY];
    rig_ids(ids, PROMPT, VOCAB, seed);
    rig_reference(r, ids, PROMPT, rig_sampling(REPLY, seed), reply);
    client_direct(r, c, ids, PROMPT, rig_sampling(REPLY, seed));
    while (!c->done && !c->failed) {
        rig_turn(r);
        if (r->store) /* its threads read meanwhile */
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    assert_reply(c, reply, REPLY);
}

static void swapped_pages_are_pinned_and_come_back(void **state)
{
    (void)state;
    static struct client c;
    struct rig *r = rig_open((struct rig_options){
        .gpu = true, .kv_dtype = kv_dtype, .pages = 12, .swap_pages = 40, .swap_late = true});
    struct engine_swap *w = &r->engine->swap;
    ask(r, &c, 1);
    assert_false(w->has_taker);
    for (uint32_t seed = 2; seed <= 5; seed++)
        ask(r, &c, seed);
    assert_true(w->has_taker);
    rig_until(r, atomic_load(&w->slabs_ended));
    assert_int_equal(atomic_load(&w->slabs_taken), w->slab_count);
    for (uint32_t i = 0; i < w->slab_count; i++) {
        struct cudaPointerAttributes is;
        assert_int_equal(cudaPointerGetAttributes(&is, w->slabs[i]), cudaSuccess);
        assert_int_equal(is.type, cudaMemoryTypeHost); /* cudaMemoryTypeUnregistered: not pinned */
    }
    for (uint32_t seed = 1; seed <= 5; seed++) /* all in host memory now */
        ask(r, &c, seed);
    double out = metric_value(r->engine->metrics.swapped_out),
           in = metric_value(r->engine->metrics.swapped_in);
    for (uint32_t round = 0; round < 3; round++)
        for (uint32_t seed = 1; seed <= 5; seed++) {
            ask(r, &c, seed);
            assert_int_equal(c.done_event.done.cached_tokens, BLOCKS * 64);
        }
    assert_true(metric_value(r->engine->metrics.swapped_in) - in >= 3 * 4 * BLOCKS);
    assert_true(metric_value(r->engine->metrics.swapped_out) - out <= 1); /* it is there already */
    assert_true(metric_value(r->engine->metrics.swap_memory) > 0);
    rig_close(r);
}

/* --- the disk ------------------------------------------------------------------------------------- */

static char directory[32];

static struct rig *open_stored(uint32_t swap_pages)
{
    strcpy(directory, "/tmp/tandem-gpu-XXXXXX");
    assert_non_null(mkdtemp(directory));
    struct rig *r = rig_open((struct rig_options){.gpu = true,
                                                  .kv_dtype = kv_dtype,
                                                  .pages = 10,
                                                  .swap_pages = swap_pages,
                                                  .store = directory,
                                                  .token_budget = 64});
    static struct client c;
    struct store_stats stats;
    for (uint32_t seed = 1; seed <= 2; seed++)
        ask(r, &c, seed);
    do {
        rig_turn(r);
        store_flush(r->store);
        store_stats(r->store, &stats);
    } while (stats.blocks < 2 * BLOCKS || stats.queue_bytes > 0);
    return r;
}

static void close_stored(struct rig *r)
{
    char command[64];
    rig_close(r);
    snprintf(command, sizeof command, "rm -rf %s", directory);
    assert_int_equal(system(command), 0);
}

/* A block is taken to be read in what computing it takes. */
static void both_ends_are_equal(struct rig *r)
{
    r->engine->load_us[TIER_DISK] = 1000;
    line_add(&r->engine->prefill_cost, 300, 1000 * 1e3 / KV_BLOCK_TOKENS / r->model->params.layer_count);
}

static void a_restart_reads_all(void **state)
{
    (void)state;
    static struct client c;
    struct rig *r = open_stored(0);
    rig_stop_engine(r);
    rig_start_engine(r);
    for (uint32_t seed = 1; seed <= 2; seed++) {
        ask(r, &c, seed);
        assert_int_equal(c.open_event.opened.cached_disk, BLOCKS * 64);
        assert_int_equal(c.done_event.done.cached_tokens, BLOCKS * 64);
    }
    close_stored(r);
}

static void both_ends_meet(void **state)
{
    (void)state;
    static struct client c;
    struct rig *r = open_stored(0);
    rig_stop_engine(r);
    rig_start_engine(r);
    both_ends_are_equal(r);
    ask(r, &c, 1);
    assert_int_equal(c.open_event.opened.cached_disk, BLOCKS * 64);
    assert_in_range(c.done_event.done.cached_tokens, 64, (BLOCKS - 1) * 64);
    assert_int_equal(c.done_event.done.cached_tokens + c.done_event.done.prefill_tokens, PROMPT);
    close_stored(r);
}

/* First blocks from host memory, the others from both ends. */
static void from_host_memory_and_disk(void **state)
{
    (void)state;
    static struct client c;
    struct rig *r = open_stored(30);
    struct prefix_entry gone;
    for (int i = 0; i < 4 && prefix_cache_evict(r->engine->swap.blocks, &gone); i++)
        page_pool_release(r->engine->swap.places, gone.page);
    both_ends_are_equal(r);
    double in = metric_value(r->engine->metrics.swapped_in);
    ask(r, &c, 1);
    assert_true(metric_value(r->engine->metrics.swapped_in) > in);
    assert_true(c.open_event.opened.cached_disk >= 4 * 64 && c.open_event.opened.cached_memory >= 64);
    close_stored(r);
}

/* --- the last: nothing works on the GPU in this process behind it --------------------------------- */

static void a_lost_device(void **state)
{
    (void)state;
    static struct client c, other;
    int32_t ids[PROMPT];
    struct rig *r = open_stored(30);
    rig_ids(ids, PROMPT, VOCAB, 9);
    client_direct(r, &other, ids, PROMPT, rig_sampling(REPLY, 9));
    rig_turn(r);
    cuda_swiglu(0, (void *)64, 1, 64, false, false, (void *)4096); /* addresses that are nobody's */
    assert_int_not_equal(cudaDeviceSynchronize(), cudaSuccess);
    rig_until(r, other.done || other.failed);
    assert_int_equal(other.fail_code, -TD_ERR_INTERNAL);
    client_direct(r, &c, ids, PROMPT, rig_sampling(REPLY, 9));
    rig_until(r, c.done || c.failed);
    assert_int_equal(c.fail_code, -TD_ERR_INTERNAL);
    assert_int_equal(r->engine->backend->ops->state(r->engine->backend), -TD_ERR_INTERNAL);
    rig_stop_engine(r);
    r->options.gpu = false, r->options.kv_dtype = KV_DTYPE_F16; /* what was stored is there */
    rig_start_engine(r);
    struct store_stats stats;
    store_stats(r->store, &stats);
    assert_true(stats.blocks >= 2 * BLOCKS);
    close_stored(r);
}
#endif

int main(void)
{
    char why[200];
    if (!cuda_available(why, sizeof why)) {
        printf("skipped: %s\n", why);
        return 0;
    }
#ifdef TANDEM_HAS_CUDA
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(swapped_pages_are_pinned_and_come_back),
        cmocka_unit_test(a_restart_reads_all),
        cmocka_unit_test(both_ends_meet),
        cmocka_unit_test(from_host_memory_and_disk),
        cmocka_unit_test_setup(swapped_pages_are_pinned_and_come_back, with_int8),
        cmocka_unit_test_setup(a_restart_reads_all, with_int8),
        cmocka_unit_test_setup(a_restart_reads_all, with_fp8),
        cmocka_unit_test_setup(from_host_memory_and_disk, with_fp8),
        cmocka_unit_test_setup(a_lost_device, with_f16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
