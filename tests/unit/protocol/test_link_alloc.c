/* link, memory: once warm, a token costs no allocation at either end, and bulk none for a frame; a hostile header's memory is bounded and given back. */
#include "frames.h"
#include "protocol/link_internal.h"

/* Count allocations by standing in for the C library's. Sanitizers do that themselves, so there the count stays 0. */
static unsigned long allocation_count;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 1
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *p, size_t size);
void *__libc_memalign(size_t align, size_t size);
void *malloc(size_t size)
{
    allocation_count++;
    return __libc_malloc(size);
}
void *calloc(size_t count, size_t size)
{
    allocation_count++;
    return __libc_calloc(count, size);
}
void *realloc(void *p, size_t size)
{
    allocation_count++;
    return __libc_realloc(p, size);
}
void *aligned_alloc(size_t align, size_t size)
{
    allocation_count++;
    return __libc_memalign(align, size);
}
#else
#define COUNTS_ALLOCATIONS 0
#endif

static unsigned long frame_count;

static void send_tokens(struct owner *cloud, struct owner *edge, uint32_t count)
{
    static uint8_t bytes[4096];
    Tandem__TokenLogprobs logprobs = TANDEM__TOKEN_LOGPROBS__INIT, *list = &logprobs;
    int32_t top_ids[5] = {1, 2, 3, 4, 5};
    float top_logprobs[5] = {-1, -2, -3, -4, -5};
    logprobs.n_top_ids = logprobs.n_top_logprobs = 5;
    logprobs.top_ids = top_ids, logprobs.top_logprobs = top_logprobs;
    for (uint32_t i = 0; i < count; i++) {
        cloud->now_us += 1000;
        Tandem__Token token = TANDEM__TOKEN__INIT;
        token.attempt = 1;
        token.index = i;
        token.n_logprobs = 1;
        token.logprobs = &list;
        assert_int_equal(link_send(cloud->link, FRAME_TOKEN, 1, &token.base, many_bytes, 4), 0);
        for (;;) {
            int64_t size = link_next(cloud->link, bytes, sizeof bytes, cloud->now_us);
            if (size == 0)
                break;
            assert_true(size > 0);
            assert_int_equal(link_receive(edge->link, bytes, (size_t)size, cloud->now_us), 0);
        }
    }
}

static void test_tokens_cost_no_allocation(void **state)
{
    (void)state;
    struct owner cloud, edge;
    cloud_ready(&cloud, 0, 0);
    edge_ready(&edge, 0, 0);
    assert_int_equal(cloud_open(&cloud, 1), 0);
    assert_int_equal(edge_open(&edge, 1), 0);
    while (take(&edge).type)
        ;
    send_tokens(&cloud, &edge, 10);
    unsigned long before = allocation_count;
    send_tokens(&cloud, &edge, 1000);
    assert_int_equal(allocation_count, before);
    if (COUNTS_ALLOCATIONS)
        assert_true(before > 0); /* the counter does count */
    size_t tokens = 0;
    for (size_t i = 0; i < edge.seen_count; i++)
        tokens += edge.seen[i].type == FRAME_TOKEN;
    assert_int_equal(tokens, 1010);
    owner_stop(&cloud), owner_stop(&edge);
}

/* Sends messages of many frames each, and consumes them at once. */
static void send_bulk(struct owner *edge, struct owner *cloud, uint32_t count, uint64_t round_us)
{
    const size_t size = 1 << 20;
    static uint8_t bytes[LIMIT_FRAME_SIZE], back[4096];
    for (uint32_t i = 0; i < count; i++) {
        Tandem__KvBlock kv = kv_valid(0, 0);
        uint8_t *payload = calloc(1, size);
        assert_int_equal(link_send_bulk(edge->link, FRAME_KV_BLOCK, 1, &kv.base, 1, payload, size), 0);
        cloud->seen_count = 0;
        while (cloud->seen_count == 0) {
            edge->now_us = cloud->now_us += round_us;
            for (int64_t sent; (sent = link_next(edge->link, bytes, sizeof bytes, edge->now_us)) > 0;) {
                frame_count += frame_is_bulk(bytes[0]);
                assert_int_equal(link_receive(cloud->link, bytes, (size_t)sent, cloud->now_us), 0);
            }
            if (cloud->seen_count > 0)
                link_consumed(cloud->link, 1, size);
            for (int64_t sent; (sent = link_next(cloud->link, back, sizeof back, cloud->now_us)) > 0;)
                assert_int_equal(link_receive(edge->link, back, (size_t)sent, edge->now_us), 0);
        }
        assert_int_equal(cloud->seen[0].type, FRAME_KV_BLOCK);
    }
}

/* Its payload, which the caller makes, its place in the queue, and where it is put together, which grows twofold: of a message, however many
 * frames it takes. */
static void test_bulk_costs_no_allocation_a_frame(void **state)
{
    (void)state;
    static const uint64_t round_us[] = {1000, 50000}; /* the slower the link, the smaller its frames */
    for (size_t i = 0; i < TD_COUNT(round_us); i++) {
        struct owner cloud, edge;
        cloud_ready(&cloud, 0, 0);
        edge_ready(&edge, 0, 0);
        assert_int_equal(cloud_open(&cloud, 1), 0);
        assert_int_equal(edge_open(&edge, 1), 0);
        while (take(&edge).type)
            ;
        send_bulk(&edge, &cloud, 10, round_us[i]);
        frame_count = 0;
        unsigned long before = allocation_count;
        send_bulk(&edge, &cloud, 100, round_us[i]);
        assert_true(frame_count >= 500);
        assert_true(allocation_count - before <= 16 * 100);
        owner_stop(&cloud), owner_stop(&edge);
    }
}

/* The header that unpacks to the most: nothing but empty sub-messages. */
static void test_hostile_header_is_bounded(void **state)
{
    (void)state;
    struct owner o;
    edge_ready(&o, 0, 0);
    assert_int_equal(edge_open(&o, 1), 0);
    for (uint32_t i = 0; i < LIMIT_HEADER_SIZE / 2; i++) {
        frame_bytes[WIRE_HEAD_SIZE + 2 * i] = 3 << 3 | 2; /* Token.logprobs, length 0 */
        frame_bytes[WIRE_HEAD_SIZE + 2 * i + 1] = 0;
    }
    const uint32_t count = LIMIT_HEADER_SIZE / 2;
    memset(frame_bytes, 0, WIRE_HEAD_SIZE);
    frame_bytes[0] = FRAME_TOKEN;
    store_le16(frame_bytes + 2, LIMIT_HEADER_SIZE);
    store_le32(frame_bytes + 4, 1);
    store_le32(frame_bytes + 8, 4 * count);
    assert_int_equal(
        link_receive(o.link, frame_bytes, WIRE_HEAD_SIZE + LIMIT_HEADER_SIZE + 4 * count, o.now_us), 0);
    assert_int_equal(o.seen[0].payload_size, 4 * count); /* it is a valid frame */
    assert_true(o.link->arena.taken_size <= LINK_ARENA_KEEP);
    owner_stop(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens_cost_no_allocation),
        cmocka_unit_test(test_bulk_costs_no_allocation_a_frame),
        cmocka_unit_test(test_hostile_header_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
