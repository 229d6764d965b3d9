/* What the protocol's parts take, while each allocation fails once: there or not there, and nothing left behind. */
#include "../no_memory.h"
#include "protocol/generation.h"
#include "protocol/io_worker.h"
#include "protocol/link.h"
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

static int on_frame(void *ctx, const struct wire_frame *frame)
{
    (void)ctx, (void)frame;
    return 0;
}

static void a_link(void **state)
{
    (void)state;
    const struct link_config config = {.role = LINK_EDGE, .on_frame = on_frame};
    bool came = true;
    int n = 1;
    for (; came; n++) {
        no_memory_at(n);
        struct link *l = link_create(&config, 1);
        came = no_memory_came();
        assert_int_equal(l != NULL, !came);
        link_destroy(l);
    }
    assert_true(n > 2);
}

static void a_worker_and_its_inbox(void **state)
{
    (void)state;
    struct td_error err = {0};
    struct net_loop *loop = net_loop_create(&err);
    bool came = true;
    int n = 1;
    for (; came; n++) {
        no_memory_at(n);
        struct inbox *inbox = inbox_create(loop);
        struct io_worker *w = inbox ? io_worker_create(inbox) : NULL;
        came = no_memory_came();
        assert_int_equal(w != NULL, !came);
        io_worker_destroy(w);
        if (inbox)
            inbox_destroy(inbox);
    }
    assert_true(n > 3);
    net_loop_destroy(loop);
}

/* Refused, and the next attempt of the same request is the first that is known. */
static void a_generation(void **state)
{
    (void)state;
    static const uint8_t id[GEN_REQUEST_ID_SIZE] = {1}, hash[TD_HASH_SIZE] = {2};
    bool came = true;
    int n = 1;
    for (; came; n++) {
        no_memory_at(n);
        struct gen_table *t = gen_table_create(4);
        came = no_memory_came();
        assert_int_equal(t != NULL, !came);
        gen_table_destroy(t);
    }
    assert_true(n > 2);
    struct gen_table *t = gen_table_create(4);
    struct generation *g;
    came = true;
    for (n = 1; came; n++) {
        no_memory_at(n);
        enum gen_verdict verdict = gen_open(t, "acme", "ann", id, 1, hash, NULL, 0, 10, &g);
        came = no_memory_came();
        assert_int_equal(verdict, came ? GEN_STALE : GEN_NEW);
        assert_int_equal(g != NULL, !came);
    }
    assert_int_equal(n - 2, 2);
    gen_table_destroy(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_link),
        cmocka_unit_test(a_worker_and_its_inbox),
        cmocka_unit_test(a_generation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
