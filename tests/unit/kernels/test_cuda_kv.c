/* cuda_kv: KV in and out of the device's pages: pieces of every codec give the bits that the host's decoder gives, wherever they lie
 * in a page; what no piece may hold is found; pages swapped out and in, layer by layer, come back whole. Skipped where no GPU is. */
#include "kernels/bench_model.h"
#include "tests/unit/kernels/models.h"
#include "tests/unit/kernels/on_gpu.h"

static struct bench_model *model;
static struct run run;
static struct kv_shape shape;
static struct kv_codec_scratch *scratch;

static int open_run(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct backend_config config = {.page_count = RUN_PAGES, .layers_paged = 2, .rows_max = 8};
    if (bench_model_create("tiny", "bf16", &model, &err))
        return -1;
    run.model = bench_model_get(model);
    shape = (struct kv_shape){2, run.model->params.kv_head_count, run.model->params.head_dim};
    scratch = kv_codec_scratch_create(&shape);
    return cuda_backend_create(run.model, &config, "cuda", &run.backend, &err);
}

static int close_run(void **state)
{
    (void)state;
    run.backend->ops->destroy(run.backend);
    kv_codec_scratch_destroy(scratch);
    bench_model_destroy(model);
    return 0;
}

/* Finite f16 of either sign, some zero, some small. */
static void fill_values(uint16_t *values, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint16_t bits = (uint16_t)(random32() & 0xbfff);
        values[i] = i % 97 == 0 || i / 64 % 11 == 3 ? (uint16_t)(bits & 0x8000) : (uint16_t)(bits & ~0x4000u);
    }
}

struct made { /* a piece as it is received, and what it stands for */
    uint8_t *wire;
    uint16_t *values;
    size_t count;
    struct page_piece piece;
};

static void make_piece(struct made *m, enum kv_codec codec, uint8_t table, uint32_t page, uint16_t layer,
                       bool is_value, uint16_t first, uint16_t tokens)
{
    *m = (struct made){.count = kv_piece_values(&shape, tokens)};
    size_t capacity = kv_piece_bound(&shape, tokens);
    uint16_t *source = malloc(2 * m->count);
    m->wire = malloc(capacity), m->values = malloc(2 * m->count);
    fill_values(source, m->count);
    struct kv_piece_head head = {
        .version = 1,
        .codec = (uint8_t)codec,
        .is_value = is_value,
        .table = table,
        .quality = {codec == KV_RAW ? KV_L0 : (uint8_t)codec, KV_NUMERICS_CPU_V1, 0, 0},
        .first_token = first,
        .token_count = tokens,
        .layer = layer,
        .kv_head_count = (uint16_t)shape.kv_head_count,
        .head_dim = (uint16_t)shape.head_dim};
    int64_t size = kv_piece_encode(scratch, &head, source, m->wire, capacity);
    assert_true(size > 0);
    m->piece.page = page;
    assert_int_equal(kv_piece_parse(m->wire, (size_t)size, &m->piece.head, &m->piece.payload), 0);
    assert_int_equal(kv_piece_decode(scratch, &m->piece.head, m->piece.payload, m->values, m->count), 0);
    free(source);
}

static void free_piece(struct made *m)
{
    free(m->wire), free(m->values);
}

/* A page's K or V of one layer, all 64 tokens. */
static void read_half(uint32_t page, uint32_t layer, bool is_value, uint16_t *out)
{
    size_t count = kv_piece_values(&shape, KV_BLOCK_TOKENS);
    uint16_t *both = malloc(4 * count);
    assert_int_equal(
        run.backend->ops->page_read(run.backend, page, layer, KV_BLOCK_TOKENS, both, both + count), 0);
    memcpy(out, both + (is_value ? count : 0), 2 * count);
    free(both);
}

static void pieces_give_the_bits_of_the_host(void **state)
{
    (void)state;
    static const enum kv_codec codecs[] = {KV_RAW, KV_L0, KV_L1, KV_L1, KV_L2, KV_L2};
    static const uint16_t spans[][2] = {{0, 64}, {0, 1}, {63, 1}, {5, 17}, {31, 33}, {0, 23}};
    enum { COUNT = 72 };
    struct made made[COUNT];
    struct page_piece pieces[COUNT];
    size_t all = kv_piece_values(&shape, KV_BLOCK_TOKENS);
    uint16_t *mark = malloc(4 * all), *got = malloc(2 * all);
    memset(mark, 0x5a, 4 * all);
    uint32_t count = 0;
    for (uint32_t c = 0; c < TD_COUNT(codecs); c++)
        for (uint32_t s = 0; s < TD_COUNT(spans); s++)
            for (uint32_t v = 0; v < 2; v++, count++) {
                uint32_t page = count * 37 % RUN_PAGES, layer = count / RUN_PAGES;
                run.backend->ops->page_write(run.backend, page, layer, KV_BLOCK_TOKENS, mark, mark + all);
                make_piece(&made[count], codecs[c], c == 3 || c == 5, page, (uint16_t)layer, v, spans[s][0],
                           spans[s][1]);
                pieces[count] = made[count].piece;
            }
    assert_int_equal(run.backend->ops->pieces_write(run.backend, pieces, count), 0);
    for (uint32_t i = 0; i < count; i++) {
        const struct kv_piece_head *h = &pieces[i].head;
        assert_int_equal(pieces[i].status, 0);
        read_half(pieces[i].page, h->layer, h->is_value, got);
        for (uint32_t head = 0; head < h->kv_head_count; head++)
            for (uint32_t t = 0; t < KV_BLOCK_TOKENS; t++)
                for (uint32_t d = 0; d < h->head_dim; d++) {
                    bool inside = t >= h->first_token && t < (uint32_t)h->first_token + h->token_count;
                    size_t at = ((size_t)head * h->token_count + t - h->first_token) * h->head_dim + d;
                    uint16_t want = inside ? made[i].values[at] : 0x5a5a;
                    if (got[((size_t)head * KV_BLOCK_TOKENS + t) * h->head_dim + d] != want)
                        fail_msg("piece %u (codec %u): head %u, token %u, value %u", i, h->codec, head, t, d);
                }
        free_piece(&made[i]);
    }
    free(mark), free(got);
}

static void what_no_piece_may_hold_is_found(void **state)
{
    (void)state;
    struct made made[6];
    struct page_piece pieces[6];
    for (uint32_t i = 0; i < 6; i++)
        make_piece(&made[i], i == 2 ? KV_L1 : i == 3 ? KV_L0 : KV_RAW, 0, i, 0, false, 0, 64);
    for (uint32_t i = 0; i < 6; i++)
        pieces[i] = made[i].piece;
    size_t n = made[0].count;
    store_le16((uint8_t *)(uintptr_t)pieces[1].payload.data + 2 * (n - 1), 0xfc00); /* -infinity */
    ((uint8_t *)(uintptr_t)pieces[2].payload.data)[n / 64 + 77] = 0x80;             /* q = -128 */
    pieces[3].payload.size -= 1;
    pieces[4].head.kv_head_count++;
    pieces[5].page = RUN_PAGES;
    assert_int_equal(run.backend->ops->pieces_write(run.backend, pieces, 6), 0);
    assert_int_equal(pieces[0].status, 0);
    assert_int_equal(pieces[1].status, -TD_ERR_FORMAT);
    assert_int_equal(pieces[2].status, -TD_ERR_FORMAT);
    assert_int_equal(pieces[3].status, -TD_ERR_FORMAT);
    assert_int_equal(pieces[4].status, -TD_ERR_SHAPE);
    assert_int_equal(pieces[5].status, -TD_ERR_ARG);
    for (uint32_t i = 0; i < 6; i++)
        free_piece(&made[i]);
}

/* More pieces than one launch takes. */
static void many_pieces(void **state)
{
    (void)state;
    enum { COUNT = 2500 };
    struct made one;
    struct page_piece *pieces = calloc(COUNT, sizeof *pieces);
    uint16_t *got = malloc(2 * kv_piece_values(&shape, KV_BLOCK_TOKENS));
    make_piece(&one, KV_L1, 0, 0, 0, true, 0, 64);
    for (uint32_t i = 0; i < COUNT; i++)
        pieces[i] = one.piece, pieces[i].page = i % RUN_PAGES, pieces[i].head.layer = i / RUN_PAGES % 2;
    assert_int_equal(run.backend->ops->pieces_write(run.backend, pieces, COUNT), 0);
    for (uint32_t page = 0; page < RUN_PAGES; page++) {
        read_half(page, page % 2, true, got);
        assert_memory_equal(got, one.values, 2 * one.count);
    }
    free(pieces), free(got), free_piece(&one);
}

static void pages_swapped_out_and_in(void **state)
{
    (void)state;
    enum { COUNT = 20 };
    struct backend *b = run.backend;
    size_t half = kv_piece_values(&shape, KV_BLOCK_TOKENS), layer = 2 * half;
    uint16_t *values = malloc(2 * COUNT * 2 * layer), *zeros = calloc(layer, 2), *got = malloc(2 * layer);
    uint16_t *host = b->ops->host_take(b, 2 * COUNT * 2 * layer);
    uint32_t pages[COUNT];
    void *hosts[COUNT];
    assert_non_null(host);
    fill_values(values, COUNT * 2 * layer);
    for (uint32_t i = 0; i < COUNT; i++) {
        pages[i] = (i * 29 + 3) % RUN_PAGES;
        hosts[i] = host + i * 2 * layer;
        for (uint32_t l = 0; l < 2; l++) {
            const uint16_t *at = values + (i * 2 + l) * layer;
            assert_int_equal(b->ops->page_write(b, pages[i], l, KV_BLOCK_TOKENS, at, at + half), 0);
        }
    }
    struct page_swap swap = {.pages = pages, .hosts = hosts, .count = COUNT, .layer_end = 2, .to_host = true};
    int64_t ticket = b->ops->swap_start(b, &swap);
    assert_true(ticket > 0);
    assert_int_equal(b->ops->swap_done(b, ticket, true), 1);
    assert_memory_equal(host, values, 2 * COUNT * 2 * layer);
    for (uint32_t i = 0; i < COUNT; i++)
        for (uint32_t l = 0; l < 2; l++)
            b->ops->page_write(b, pages[i], l, KV_BLOCK_TOKENS, zeros, zeros + half);
    for (uint32_t i = 0; i < COUNT; i++)
        pages[i] = (i * 31 + 7) % RUN_PAGES; /* back, but elsewhere */
    for (uint32_t l = 0; l < 2; l++) {
        for (uint32_t i = 0; i < COUNT; i++)
            hosts[i] = host + (i * 2 + l) * layer;
        swap = (struct page_swap){
            .pages = pages, .hosts = hosts, .count = COUNT, .layer_begin = l, .layer_end = l + 1};
        ticket = b->ops->swap_start(b, &swap);
        assert_true(ticket > 0);
    }
    assert_int_equal(b->ops->swap_done(b, ticket, true), 1);
    assert_int_equal(b->ops->swap_done(b, ticket - 1, false), 1);
    for (uint32_t i = 0; i < COUNT; i++)
        for (uint32_t l = 0; l < 2; l++) {
            assert_int_equal(b->ops->page_read(b, pages[i], l, KV_BLOCK_TOKENS, got, got + half), 0);
            assert_memory_equal(got, values + (i * 2 + l) * layer, 2 * layer);
        }
    for (int i = 0; i < 40; i++) /* more than are on their way at once: the oldest is waited for */
        assert_int_equal(b->ops->swap_start(b, &swap), ++ticket);
    assert_int_equal(b->ops->swap_done(b, ticket, true), 1);
    swap.pages = (uint32_t[]){RUN_PAGES}, swap.count = 1;
    assert_int_equal(b->ops->swap_start(b, &swap), -TD_ERR_ARG);
    assert_int_equal(b->ops->swap_done(b, ticket + 1, false), -TD_ERR_ARG);
    b->ops->host_give(b, host);
    free(values), free(zeros), free(got);
}

int main(void)
{
    if (!gpu_is_here())
        return 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_give_the_bits_of_the_host),
        cmocka_unit_test(what_no_piece_may_hold_is_found),
        cmocka_unit_test(many_pieces),
        cmocka_unit_test(pages_swapped_out_and_in),
    };
    return cmocka_run_group_tests(tests, open_run, close_run);
}
