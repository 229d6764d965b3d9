/* generation: the receiver takes each token once; the table continues, adopts, fences, parks and forgets. */
#include "protocol/generation.h"
#include "shared/crypto.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static const uint8_t prompt_a[TD_HASH_SIZE] = {1}, prompt_b[TD_HASH_SIZE] = {2};
static const uint8_t request_1[GEN_REQUEST_ID_SIZE] = {1}, request_2[GEN_REQUEST_ID_SIZE] = {2};

/* ---- hashes ---- */

/* Expected: printf of the bytes | sha256sum. */
static void test_ids_hash(void **state)
{
    (void)state;
    char hex[2 * TD_HASH_SIZE + 1];
    uint8_t hash[TD_HASH_SIZE];
    ids_hash(NULL, 0, hash);
    hex_encode(hash, sizeof hash, hex);
    assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    const int32_t ids[] = {1, 256, 0x01020304};
    ids_hash(ids, 3, hash);
    hex_encode(hash, sizeof hash, hex);
    assert_string_equal(hex, "9b732c70bf4c84f682d557f937a5af53be83ad8bf0400953ab09c251a1403f4b");

    int32_t *many = malloc(1000 * sizeof *many); /* longer than the buffer inside */
    uint8_t *bytes = malloc(4000), expected[TD_HASH_SIZE];
    for (int i = 0; i < 1000; i++) {
        many[i] = i * 7919;
        store_le32(bytes + 4 * i, (uint32_t)many[i]);
    }
    ids_hash(many, 1000, hash);
    sha256_once(bytes, 4000, expected);
    assert_memory_equal(hash, expected, sizeof hash);
    free(many), free(bytes);
}

/* Expected: hmac.new(bytes(range(32)), b"tandem-idempotency\0" + key, "sha256") in Python. */
static void test_id_from_key(void **state)
{
    (void)state;
    uint8_t key[32], id[GEN_REQUEST_ID_SIZE], other[GEN_REQUEST_ID_SIZE];
    char hex[2 * GEN_REQUEST_ID_SIZE + 1];
    uint64_t seed, seed_other;
    for (int i = 0; i < 32; i++)
        key[i] = (uint8_t)i;
    gen_id_from_key(key, "order-42", id, &seed);
    hex_encode(id, sizeof id, hex);
    assert_string_equal(hex, "8077865b73b4c29780988fe94a4091f5");
    assert_true(seed == UINT64_C(0xfd168d680d0760dd));
    gen_id_from_key(key, "order-43", other, &seed_other);
    assert_memory_not_equal(id, other, sizeof id);
    assert_true(seed != seed_other);
    key[0] ^= 1; /* another principal */
    gen_id_from_key(key, "order-42", other, &seed_other);
    assert_memory_not_equal(id, other, sizeof id);
}

/* ---- the receiver ---- */

struct tokens {
    uint8_t bytes[64];
    struct span span;
};
static struct tokens tokens_of(int count, const int32_t *ids)
{
    struct tokens t = {0};
    for (int i = 0; i < count; i++)
        store_le32(t.bytes + 4 * i, (uint32_t)ids[i]);
    t.span.size = (size_t)count * 4;
    return t;
}
static int receive(struct gen_receiver *g, uint64_t attempt, uint32_t index, int count, const int32_t *ids)
{
    struct tokens t = tokens_of(count, ids);
    t.span.data = t.bytes;
    return gen_receive_tokens(g, attempt, index, t.span);
}

static void test_receiver_takes_each_token_once(void **state)
{
    (void)state;
    int32_t store[6], ids[] = {10, 11, 12, 13, 14, 15, 16};
    struct gen_receiver g = {.attempt = 5, .ids = store, .capacity = 6};
    assert_int_equal(receive(&g, 5, 0, 2, ids), 2);
    assert_int_equal(receive(&g, 5, 0, 2, ids), 0);     /* a repeat */
    assert_int_equal(receive(&g, 5, 1, 3, ids + 1), 2); /* overlaps */
    assert_int_equal(g.count, 4);
    assert_memory_equal(store, ids, 16);
    assert_int_equal(receive(&g, 4, 4, 1, ids + 4), 0); /* another attempt's */
    assert_int_equal(receive(&g, 6, 4, 1, ids + 4), 0);
    assert_int_equal(g.count, 4);
    assert_int_equal(receive(&g, 5, 4, 2, ids + 4), 2); /* full to the last */
    assert_memory_equal(store, ids, sizeof store);
}

static void test_receiver_refuses(void **state)
{
    (void)state;
    int32_t store[4], ids[] = {10, 11, 12, 13, 14};
    struct gen_receiver g = {.attempt = 5, .ids = store, .capacity = 4};
    assert_int_equal(receive(&g, 5, 0, 2, ids), 2);
    assert_int_equal(receive(&g, 5, 3, 1, ids + 3), -TD_ERR_PROTOCOL); /* a gap */
    assert_int_equal(receive(&g, 5, 2, 3, ids + 2), -TD_ERR_PROTOCOL); /* one too many */
    assert_int_equal(receive(&g, 5, 0, 5, ids), -TD_ERR_PROTOCOL);
    assert_int_equal(receive(&g, 5, UINT32_MAX, 1, ids), -TD_ERR_PROTOCOL);
    int32_t conflict[] = {11, 99, 12};
    assert_int_equal(receive(&g, 5, 1, 1, conflict + 1), -TD_ERR_PROTOCOL);
    int32_t mixed[] = {99, 12};
    assert_int_equal(receive(&g, 5, 1, 2, mixed), -TD_ERR_PROTOCOL); /* nothing of it is taken */
    assert_int_equal(g.count, 2);
    struct tokens t = tokens_of(1, ids + 2);
    assert_int_equal(gen_receive_tokens(&g, 5, 2, (struct span){t.bytes, 3}), -TD_ERR_PROTOCOL);
    g.done = true;
    assert_int_equal(receive(&g, 5, 0, 2, ids), 0);
    assert_int_equal(receive(&g, 5, 2, 1, ids + 2), -TD_ERR_PROTOCOL); /* more after the end */
    assert_int_equal(g.count, 2);
}

static void test_receiver_with_tokens_of_its_own(void **state)
{
    (void)state;
    int32_t store[6], ids[] = {10, 11, 12, 13, 14, 15}, other[] = {12, 99};
    struct gen_receiver g = {.attempt = 5, .ids = store, .capacity = 6};
    assert_int_equal(receive(&g, 5, 0, 1, ids), 1);
    assert_int_equal(gen_make_token(&g, 1, 11), 1);
    assert_int_equal(gen_make_token(&g, 2, 12), 1);
    assert_int_equal(gen_make_token(&g, 3, 13), 1);
    assert_int_equal(gen_make_token(&g, 5, 15), -TD_ERR_LIMIT); /* a gap */
    assert_int_equal(gen_make_token(&g, 2, 12), 0);
    assert_int_equal(gen_make_token(&g, 2, 13), -TD_ERR_CONFLICT);
    assert_int_equal(g.confirmed, 1);
    assert_int_equal(receive(&g, 5, 1, 1, ids + 1), 0); /* the cloud comes behind */
    assert_int_equal(g.confirmed, 2);
    assert_int_equal(receive(&g, 5, 2, 2, other), -TD_ERR_CONFLICT); /* and says something else */
    assert_int_equal(g.count, 4);
    assert_int_equal(receive(&g, 5, 1, 1, other), -TD_ERR_PROTOCOL); /* than it said itself */
    assert_int_equal(receive(&g, 5, 2, 3, ids + 2), 1);              /* it overtakes */
    assert_int_equal(g.confirmed, 5);
    assert_int_equal(gen_make_token(&g, 5, 15), 1);
    assert_int_equal(gen_make_token(&g, 6, 16), -TD_ERR_LIMIT); /* no room */
    assert_memory_equal(store, ids, sizeof store);
}

static void test_reopen_raises_the_attempt(void **state)
{
    (void)state;
    struct gen_receiver g = {.attempt = 5};
    gen_reopen(&g, 1000);
    assert_int_equal(g.attempt, 1000);
    gen_reopen(&g, 1000); /* the clock stands still, or went back */
    assert_int_equal(g.attempt, 1001);
    gen_reopen(&g, 7);
    assert_int_equal(g.attempt, 1002);
}

/* ---- the table ---- */

static enum gen_verdict open_as(struct gen_table *t, const char *principal, const uint8_t *request,
                                uint64_t attempt, const uint8_t *prompt, const int32_t *held,
                                uint32_t held_count, struct generation **out)
{
    return gen_open(t, "tenant", principal, request, attempt, prompt, held, held_count, 100, out);
}

static enum gen_verdict open_1(struct gen_table *t, uint64_t attempt, const int32_t *held,
                               uint32_t held_count, struct generation **out)
{
    return open_as(t, "p", request_1, attempt, prompt_a, held, held_count, out);
}

static int gone_count;
static void *gone_owner;
static void gone(void *ctx, struct generation *g)
{
    (void)ctx;
    gone_count++;
    gone_owner = g->owner;
}

static void test_new_continue_stale_mismatch(void **state)
{
    (void)state;
    struct gen_table *t = gen_table_create(8);
    struct generation *g, *again;
    assert_int_equal(open_1(t, 10, NULL, 0, &g), GEN_NEW);
    assert_int_equal(g->state, GEN_RUNNING);
    assert_string_equal(g->tenant, "tenant");
    for (int32_t i = 0; i < 3; i++)
        assert_int_equal(gen_append(g, 100 + i), 0);
    const int32_t held[] = {100, 101, 102};

    assert_int_equal(open_1(t, 10, held, 2, &again), GEN_STALE); /* the same attempt */
    assert_null(again);
    assert_int_equal(open_1(t, 9, held, 2, &again), GEN_STALE);
    assert_int_equal(open_as(t, "p", request_1, 11, prompt_b, held, 2, &again), GEN_MISMATCH);
    assert_null(again);
    assert_int_equal(g->attempt, 10); /* refusals change nothing */

    assert_int_equal(open_1(t, 11, held, 2, &again), GEN_CONTINUE);
    assert_ptr_equal(again, g);
    assert_int_equal(g->attempt, 11);
    assert_int_equal(open_1(t, 12, NULL, 0, &again), GEN_CONTINUE); /* nothing held: replay from token 0 */
    assert_int_equal(open_1(t, 13, held, 3, &again), GEN_CONTINUE); /* all held */
    assert_int_equal(open_1(t, 12, held, 3, &again), GEN_STALE);    /* fenced */

    assert_int_equal(open_as(t, "q", request_1, 1, prompt_a, NULL, 0, &again),
                     GEN_NEW); /* another principal's */
    assert_ptr_not_equal(again, g);
    assert_int_equal(gen_open(t, "u", "p", request_1, 1, prompt_a, NULL, 0, 100, &again),
                     GEN_NEW); /* tenant's */
    assert_int_equal(open_as(t, "p", request_2, 1, prompt_a, NULL, 0, &again), GEN_NEW);
    gen_table_destroy(t);
}

static void test_adopt_after_a_crash(void **state)
{
    (void)state;
    struct gen_table *t = gen_table_create(8);
    struct generation *g;
    const int32_t held[] = {100, 101};
    assert_int_equal(open_1(t, 11, held, 2, &g), GEN_ADOPT);
    assert_int_equal(g->reply_count, 2);
    assert_memory_equal(g->reply, held, sizeof held);
    assert_int_equal(gen_append(g, 102), 0);
    assert_int_equal(g->reply[2], 102);
    gen_table_destroy(t);
}

static void test_the_edges_tokens_are_the_authority(void **state)
{
    (void)state;
    struct gen_table *t = gen_table_create(8);
    struct generation *g, *again;
    const int32_t held[] = {100, 101, 102, 103}, others[] = {100, 999};
    assert_int_equal(open_1(t, 10, NULL, 0, &g), GEN_NEW);
    for (int32_t i = 0; i < 3; i++)
        assert_int_equal(gen_append(g, 100 + i), 0);
    assert_int_equal(open_1(t, 11, others, 2, &again), GEN_REPLACE);
    assert_ptr_equal(again, g);
    assert_int_equal(open_1(t, 11, held, 4, &again), GEN_REPLACE); /* more than we ever made */
    assert_ptr_equal(again, g);
    assert_int_equal(open_1(t, 10, held, 4, &again), GEN_STALE);
    gen_finish(g, 1, 0);
    assert_int_equal(open_1(t, 11, others, 2, &again), GEN_REPLACE);
    gen_forget(t, g);
    assert_int_equal(open_1(t, 11, others, 2, &again), GEN_ADOPT);
    gen_table_destroy(t);
}

static void test_detached_decodes_a_little_and_parks(void **state)
{
    (void)state;
    struct gen_table *t = gen_table_create(8);
    struct generation *g;
    gen_open(t, "tenant", "p", request_1, 1, prompt_a, NULL, 0, 1000, &g);
    for (int i = 0; i < 200; i++) { /* no bound while it runs */
        assert_true(gen_may_decode(g));
        assert_int_equal(gen_append(g, i), 0);
    }
    gen_detach(g, 0);
    for (unsigned i = 0; i < LIMIT_DETACHED_TOKENS; i++) {
        assert_true(gen_may_decode(g));
        assert_int_equal(g->state, GEN_DETACHED);
        assert_int_equal(gen_append(g, (int32_t)i), 0);
    }
    assert_false(gen_may_decode(g));
    assert_int_equal(g->state, GEN_PARKED);
    struct generation *again;
    assert_int_equal(open_1(t, 2, NULL, 0, &again), GEN_CONTINUE);
    assert_int_equal(g->state, GEN_RUNNING);
    assert_true(gen_may_decode(g));
    gen_detach(g, 0); /* a new loss, a new allowance */
    for (unsigned i = 0; i < LIMIT_DETACHED_TOKENS; i++)
        gen_append(g, 1);
    assert_false(gen_may_decode(g));
    gen_detach(g, 5); /* parked already: its time does not start again */
    assert_int_equal(g->state, GEN_PARKED);
    assert_int_equal(g->expires_us, LIMIT_PARK_MS * 1000ull);
    gen_table_destroy(t);
}

static void test_append_up_to_capacity(void **state)
{
    (void)state;
    struct gen_table *t = gen_table_create(8);
    struct generation *g;
    assert_int_equal(gen_open(t, "t", "p", request_1, 1, prompt_a, NULL, 0, 2, &g), GEN_NEW);
    assert_int_equal(gen_append(g, 1), 0);
    assert_int_equal(gen_append(g, 2), 0);
    assert_int_equal(gen_append(g, 3), -TD_ERR_LIMIT);
    assert_int_equal(g->reply_count, 2);
    gen_finish(g, FINISH_LENGTH, 0);
    assert_int_equal(gen_append(g, 3), -TD_ERR_CLOSED);
    assert_false(gen_may_decode(g));
    gen_table_destroy(t);
}

static void test_finished_stays_finished(void **state)
{
    (void)state;
    struct gen_table *t = gen_table_create(8);
    struct generation *g, *again;
    open_1(t, 1, NULL, 0, &g);
    gen_append(g, 100);
    gen_finish(g, FINISH_STOP, 7);
    gen_detach(g, 8);
    gen_finish(g, FINISH_LENGTH, 9); /* the first end counts */
    assert_int_equal(g->finish, FINISH_STOP);
    assert_int_equal(g->expires_us, 7 + LIMIT_PARK_MS * 1000ull);
    assert_int_equal(open_1(t, 2, NULL, 0, &again), GEN_CONTINUE);
    assert_int_equal(again->state, GEN_FINISHED);
    assert_int_equal(again->reply_count, 1);
    gen_table_destroy(t);
}

static void test_expiry_at_its_edge(void **state)
{
    (void)state;
    const uint64_t park_us = LIMIT_PARK_MS * 1000ull;
    struct gen_table *t = gen_table_create(8);
    struct generation *g, *again;
    int owner;
    open_1(t, 1, NULL, 0, &g);
    g->owner = &owner;
    gone_count = 0;
    gen_table_expire(t, UINT64_MAX, gone, NULL); /* a running one never */
    assert_int_equal(gone_count, 0);
    gen_detach(g, 1000);
    gen_table_expire(t, 1000 + park_us - 1, gone, NULL);
    assert_int_equal(gone_count, 0);
    assert_int_equal(open_1(t, 2, NULL, 0, &again), GEN_CONTINUE);
    gen_table_expire(t, 1000 + park_us, gone, NULL); /* re-attached: runs on */
    assert_int_equal(gone_count, 0);
    gen_finish(g, FINISH_STOP, 2000);
    gen_table_expire(t, 2000 + park_us - 1, gone, NULL);
    assert_int_equal(gone_count, 0);
    gen_table_expire(t, 2000 + park_us, gone, NULL);
    assert_int_equal(gone_count, 1);
    assert_ptr_equal(gone_owner, &owner);
    assert_int_equal(open_1(t, 3, NULL, 0, &again), GEN_NEW);
    gen_forget(t, again); /* cancelled */
    assert_int_equal(open_1(t, 1, NULL, 0, &again), GEN_NEW);
    gen_table_destroy(t);
}

static void test_table_is_bounded(void **state)
{
    (void)state;
    struct gen_table *t = gen_table_create(3);
    struct generation *g[3], *more;
    int owner;
    for (int i = 0; i < 3; i++) {
        uint8_t request[GEN_REQUEST_ID_SIZE] = {(uint8_t)(10 + i)};
        assert_int_equal(open_as(t, "p", request, 1, prompt_a, NULL, 0, &g[i]), GEN_NEW);
    }
    assert_int_equal(open_1(t, 1, NULL, 0, &more), GEN_STALE); /* all run: busy */
    assert_null(more);
    gen_finish(g[1], FINISH_STOP, 50);
    gen_finish(g[2], FINISH_STOP, 40);
    g[2]->owner = &owner;
    assert_int_equal(open_1(t, 1, NULL, 0, &more), GEN_FULL);
    assert_null(more);
    assert_int_equal(open_1(t, 1, NULL, 0, &more), GEN_FULL); /* one goes, however often somebody asks */
    gone_count = 0;
    gen_table_expire(t, 1, gone, NULL);
    assert_int_equal(gone_count, 1);
    assert_ptr_equal(gone_owner, &owner); /* of g[2], the older one: whoever holds it hears of it */
    assert_int_equal(open_1(t, 1, NULL, 0, &more), GEN_NEW);
    uint8_t request[GEN_REQUEST_ID_SIZE] = {11};
    assert_int_equal(open_as(t, "p", request, 2, prompt_a, NULL, 0, &more), GEN_CONTINUE);
    request[0] = 12;
    assert_int_equal(open_as(t, "p", request, 2, prompt_a, NULL, 0, &more), GEN_FULL);
    gen_table_expire(t, 1, gone, NULL);
    assert_int_equal(open_as(t, "p", request, 2, prompt_a, NULL, 0, &more), GEN_NEW);
    gen_detach(g[0], 1); /* decodes on: its place is its own */
    request[0] = 13;
    assert_int_equal(open_as(t, "p", request, 2, prompt_a, NULL, 0, &more), GEN_STALE);
    gen_table_destroy(t);
}

static void test_arguments_are_bounded(void **state)
{
    (void)state;
    struct gen_table *t = gen_table_create(3);
    struct generation *g;
    char name[LIMIT_NAME_SIZE + 2] = {0};
    memset(name, 'n', LIMIT_NAME_SIZE);
    assert_int_equal(gen_open(t, name, name, request_1, 1, prompt_a, NULL, 0, 4, &g), GEN_NEW);
    assert_string_equal(g->principal, name);
    name[LIMIT_NAME_SIZE] = 'n';
    assert_int_equal(gen_open(t, "t", name, request_1, 1, prompt_a, NULL, 0, 4, &g), GEN_STALE);
    assert_int_equal(gen_open(t, name, "p", request_1, 1, prompt_a, NULL, 0, 4, &g), GEN_STALE);
    const int32_t held[3] = {0};
    assert_int_equal(gen_open(t, "t", "p", request_1, 1, prompt_a, held, 3, 2, &g), GEN_STALE);
    assert_int_equal(gen_open(t, "t", "p", request_1, 1, prompt_a, NULL, 0, LIMIT_PROMPT_TOKENS + 1, &g),
                     GEN_STALE);
    assert_int_equal(gen_open(t, "t", "p", request_1, 1, prompt_a, NULL, 0, LIMIT_PROMPT_TOKENS, &g),
                     GEN_NEW);
    gen_table_destroy(t);
}

static void test_kept_generations_of_a_principal_are_bounded(void **state)
{
    (void)state;
    struct gen_table *t = gen_table_create(2 * LIMIT_PARKED_PER_PRINCIPAL);
    struct generation *g, *first = NULL;
    uint8_t request[GEN_REQUEST_ID_SIZE] = {0};
    open_as(t, "other", request_1, 1, prompt_a, NULL, 0, &g);
    gen_finish(g, FINISH_STOP, 0); /* older than all, but another's */
    gone_count = 0;
    for (uint32_t i = 0; i <= LIMIT_PARKED_PER_PRINCIPAL; i++) {
        gen_table_expire(t, 1000, gone, NULL);
        assert_int_equal(gone_count, 0); /* up to the limit all stay */
        store_le32(request, i);
        assert_int_equal(open_as(t, "p", request, 1, prompt_a, NULL, 0, &g), GEN_NEW);
        first = i == 0 ? g : first;
        if (i % 2)
            gen_finish(g, FINISH_STOP, 1 + i);
        else
            gen_detach(g, 1 + i);
    }
    first->owner = &gone_count;
    gen_table_expire(t, 1000, gone, NULL);
    assert_int_equal(gone_count, 1); /* the oldest, and only it */
    assert_ptr_equal(gone_owner, &gone_count);
    store_le32(request, 0);
    assert_int_equal(open_as(t, "p", request, 2, prompt_a, NULL, 0, &g), GEN_NEW);
    gen_table_destroy(t);
}

int main(void)
{
    crypto_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ids_hash),
        cmocka_unit_test(test_id_from_key),
        cmocka_unit_test(test_receiver_takes_each_token_once),
        cmocka_unit_test(test_receiver_refuses),
        cmocka_unit_test(test_receiver_with_tokens_of_its_own),
        cmocka_unit_test(test_reopen_raises_the_attempt),
        cmocka_unit_test(test_new_continue_stale_mismatch),
        cmocka_unit_test(test_adopt_after_a_crash),
        cmocka_unit_test(test_the_edges_tokens_are_the_authority),
        cmocka_unit_test(test_detached_decodes_a_little_and_parks),
        cmocka_unit_test(test_append_up_to_capacity),
        cmocka_unit_test(test_finished_stays_finished),
        cmocka_unit_test(test_expiry_at_its_edge),
        cmocka_unit_test(test_table_is_bounded),
        cmocka_unit_test(test_arguments_are_bounded),
        cmocka_unit_test(test_kept_generations_of_a_principal_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
