/* cuda_pass: how decode rows are shared out with cuda-det-v2: whatever stands beside a row, its splits are those of the rule or one, and what they
 * find has room. Needs no GPU: the question for the kernel is answered here (tests/CMakeLists.txt). */
#include "kernels/cuda/cuda.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#ifdef TANDEM_HAS_CUDA
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/det_kernels.h"

enum { SMS = 132, CONTEXT = 131072, SPLIT_PAGES = CUDA_DET_SPLIT_TOKENS / KV_BLOCK_TOKENS };

bool __wrap_cuda_det_attention_has(uint32_t head_dim, uint32_t heads_per_kv_head);
bool __wrap_cuda_det_attention_has(uint32_t head_dim, uint32_t heads_per_kv_head)
{
    return head_dim == 128 && heads_per_kv_head <= 8;
}

struct scene {
    struct model model;
    struct cuda_backend b;
    struct batch_seq seqs[BATCH_SEQS_MAX];
    uint32_t *pages;
};

static void scene_open(struct scene *s, uint32_t kv_heads)
{
    *s = (struct scene){.model.params = {.layer_count = 1,
                                         .head_count = 4 * kv_heads,
                                         .kv_head_count = kv_heads,
                                         .head_dim = 128,
                                         .context_max = CONTEXT},
                        .b = {.sm_count = SMS, .rows_max = BATCH_SEQS_MAX, .deterministic = true}};
    s->b.base.model = &s->model;
    s->b.stage = malloc(cuda_stage_size(&s->b));
    s->pages = calloc(CONTEXT / KV_BLOCK_TOKENS, sizeof *s->pages);
    assert_non_null(s->b.stage);
    assert_non_null(s->pages);
}

static void scene_close(struct scene *s)
{
    free(s->b.stage), free(s->pages);
}

/* All have one row. */
static const struct cuda_work *lay_out(struct scene *s, const uint32_t *positions, uint32_t count)
{
    bool done[BATCH_SEQS_MAX] = {0};
    for (uint32_t i = 0; i < count; i++)
        s->seqs[i] = (struct batch_seq){.layer_end = 1,
                                        .position = positions[i],
                                        .row_count = 1,
                                        .ids = (const int32_t *)s->pages,
                                        .logit_count = 1,
                                        .pages = s->pages};
    assert_true(cuda_pass_next(&s->b, &(struct batch){s->seqs, count}, done));
    assert_true(s->b.pass.stage_size <= cuda_stage_size(&s->b));
    return &s->b.pass.all;
}

/* How many are apart. */
static uint32_t check(struct scene *s, const uint32_t *positions, uint32_t count)
{
    const struct cuda_work *w = lay_out(s, positions, count);
    uint32_t pages_of[BATCH_SEQS_MAX] = {0}, places = 0, apart = 0, table = 0, longest = UINT32_MAX;
    bool *taken = calloc(cuda_splits_max(&s->b), sizeof *taken);
    assert_int_equal(w->tile_count, 0);
    for (uint32_t i = 0; i < w->split_grid && w->splits[i].page_count > 0; i++) {
        const struct cuda_split *p = &w->splits[i];
        uint32_t all = positions[p->row] / 64 + 1, splits = (all + SPLIT_PAGES - 1) / SPLIT_PAGES;
        assert_true(p->row < count && p->page_count <= longest);
        longest = p->page_count, pages_of[p->row] += p->page_count;
        assert_int_equal(p->token_count, positions[p->row] + 1 - 64 * p->page_begin);
        if (p->split_count == 1) {
            assert_true(p->page_begin == 0 && p->page_count == all);
            continue;
        }
        assert_int_equal(p->split_count, splits);
        assert_int_equal(p->page_begin % SPLIT_PAGES, 0);
        assert_int_equal(p->page_count, TD_MIN((uint32_t)SPLIT_PAGES, all - p->page_begin));
        uint32_t place = p->first_split + p->page_begin / SPLIT_PAGES;
        assert_true(place < cuda_splits_max(&s->b) && !taken[place]);
        taken[place] = true, places++;
        apart += p->page_begin == 0;
    }
    for (uint32_t i = 0; i < w->split_grid; i++) { /* each row's pages lie behind those before it */
        const struct cuda_split *p = &w->splits[i];
        for (uint32_t r = table = 0; p->page_count > 0 && r < p->row; r++)
            table += positions[r] / 64 + 1;
        assert_true(p->page_count == 0 || p->table == table);
    }
    for (uint32_t r = 0; r < count; r++) /* the list has each page once */
        assert_int_equal(pages_of[r], positions[r] / 64 + 1);
    for (uint32_t i = 0; i < places; i++)
        assert_true(taken[i]);
    free(taken);
    return apart;
}

static void rows_are_whole_or_in_the_rules_splits(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 64, 2047, 2048, 2049, 4096, 8000, 32768, 131072};
    uint32_t positions[BATCH_SEQS_MAX], random = 1;
    for (uint32_t kv_heads = 1; kv_heads <= 8; kv_heads *= 2) {
        struct scene s;
        scene_open(&s, kv_heads);
        for (uint32_t count = 1; count <= 300; count += 1 + count / 3)
            for (size_t l = 0; l <= TD_COUNT(lengths); l++) { /* all of one length; of any */
                for (uint32_t i = 0; i < count; i++) {
                    random = random * 1664525u + 1013904223u;
                    positions[i] = (l < TD_COUNT(lengths) ? lengths[l] : 1 + (random >> 8) % CONTEXT) - 1;
                }
                check(&s, positions, count);
            }
        scene_close(&s);
    }
}

static void what_is_apart(void **state)
{
    (void)state;
    uint32_t positions[BATCH_SEQS_MAX];
    struct scene s;
    scene_open(&s, 8);
    positions[0] = 2047;
    assert_int_equal(check(&s, positions, 1), 0); /* has one split */
    positions[0] = 2048;
    assert_int_equal(check(&s, positions, 1), 1);
    positions[0] = 131071;
    assert_int_equal(check(&s, positions, 1), 1);
    for (uint32_t i = 0; i < 128; i++)
        positions[i] = 8191;
    assert_int_equal(check(&s, positions, 8), 8);
    assert_int_equal(check(&s, positions, 128), 0); /* rows fill the SMs */
    for (uint32_t i = 1; i < 128; i++)
        positions[i] = 1000;
    positions[0] = 65535;
    assert_int_equal(check(&s, positions, 128), 1); /* one would be left behind by the others */
    scene_close(&s);
}
#endif

int main(void)
{
#ifdef TANDEM_HAS_CUDA
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_whole_or_in_the_rules_splits),
        cmocka_unit_test(what_is_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
#else
    puts("skipped: built without CUDA");
    return 0;
#endif
}
