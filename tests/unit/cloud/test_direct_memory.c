/* direct, without memory: each allocation that the loop's thread makes for a request fails once, and each that an event of the engine's takes. The client
 * hears of it or gets its reply, its connection is as good as before, and nothing of the request stays. */
#include "../no_memory.h"
#include "service_fixture.h"
#include "../protocol/http_client.h"

static void (*real_on_request)(void *ctx, struct http_exchange *x, const struct http_request *r);
static atomic_int fails_at, handled; /* of the next request */
static atomic_bool came;

static void on_request(void *ctx, struct http_exchange *x, const struct http_request *r)
{
    no_memory_at(atomic_load(&fails_at));
    real_on_request(ctx, x, r);
    atomic_store(&came, no_memory_came());
    atomic_fetch_add(&handled, 1);
}

static void count_calls(void *arg)
{
    *(uint32_t *)arg = direct_calls(fx.direct);
}

static int start(void **state)
{
    int rc = fixture_start(state);
    struct http_handler *h = (struct http_handler *)(uintptr_t)direct_http_handler(fx.direct);
    real_on_request = h->on_request;
    h->on_request = on_request; /* nobody asks for anything yet */
    return rc;
}

static const char *const bodies[][2] = {
    {"/v1/chat/completions", "{\"messages\":[{\"role\":\"system\",\"content\":\"be "
                             "brief\"},{\"role\":\"user\",\"content\":\"hello\"}],\"stop\":[\"END\"],"
                             "\"logit_bias\":{\"3\":-2},\"conversation\":\"c1\",\"stream\":true}"},
    {"/v1/completions", "{\"prompt\":\"the cat\",\"stop\":[\"END\",\"STOP\"]}"},
    {"/v1/completions", "{\"prompt\":[5,6,7]}"},
    {"/tokenize", "{\"content\":\"the cat\"}"},
    {"/detokenize", "{\"tokens\":[5,6,7]}"},
};

static void ask(struct client *c, size_t i, int n)
{
    atomic_store(&handled, 0);
    atomic_store(&fails_at, n);
    client_request(c, "POST", bodies[i][0],
                   "Authorization: Bearer alice\r\nContent-Type: application/json\r\nIdempotency-Key: k\r\n",
                   bodies[i][1]);
    for (int wait = 0; wait < CLIENT_WAIT_MS && atomic_load(&handled) == 0; wait++)
        usleep(1000);
    assert_int_equal(atomic_load(&handled), 1);
}

static void reply(const struct fake_command *open)
{
    static const int32_t ids[] = {'a', 'b'};
    fake_opened(open, 0);
    fake_tokens(open, 0, ids, 2);
    fake_done(open, FINISH_LENGTH, ids, 2);
}

/* Until nothing of it is left. */
static void settle(void)
{
    for (uint32_t calls = 1; calls > 0;) {
        on_loop(count_calls, &calls);
        fixture_settle();
    }
}

static void a_request_without_memory(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_COUNT(bodies); i++) {
        int n = 1;
        for (bool failed = true; failed; n++) {
            struct client c = client_open(fx.port);
            uint32_t calls;
            ask(&c, i, n);
            failed = atomic_load(&came);
            on_loop(count_calls, &calls);
            if (calls > 0)
                reply(fake_next("open"));
            struct response r = client_response(&c, false);
            if (!failed)
                assert_int_equal(r.status, 200);
            assert_true(r.status == 200 || r.status >= 500 || (r.status == 0 && c.ended));
            free(r.body);
            client_close(&c);
            settle();
        }
        assert_true(n > 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_request_without_memory, start, fixture_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
