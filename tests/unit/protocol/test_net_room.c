/* A listener without room for another request, a loop without room for another connection: who makes room, and who is not dropped for it. */
#include "net_rig.h"
#include "protocol/http_internal.h"

static struct net_loop *loop;
static pthread_t thread;
static uint16_t port;

static int set_up(void **state)
{
    (void)state;
    loop = loop_make();
    port = loop_listen(loop, &(struct net_listen){.http = &answering});
    thread = loop_begin(loop);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    loop_end(loop, thread);
    return 0;
}

struct change {
    int count;
    atomic_bool done;
};

static void on_fill(void *arg)
{
    struct change *c = arg;
    loop->listeners->exchange_count += (uint32_t)c->count;
    atomic_store(&c->done, true);
}

static void on_idle_max(void *arg)
{
    struct change *c = arg;
    loop->idle_max = (uint32_t)c->count;
    atomic_store(&c->done, true);
}

static int change(void (*fn)(void *arg), int count)
{
    struct change c = {.count = count};
    assert_int_equal(net_loop_post(loop, fn, &c), 0);
    while (!atomic_load(&c.done))
        usleep(1000);
    return c.count;
}

/* As if so many more were there, or no longer. */
static void fill(int count)
{
    change(on_fill, count);
}

static void assert_answer(struct client *c, int status, const char *body)
{
    struct response r = client_response(c, false);
    assert_int_equal(r.status, status);
    if (body)
        assert_string_equal(r.body, body);
    free(r.body);
}

/* Whose body has been arriving for longest makes room for others. */
static void slow_bodies_keep_nobody_out(void **state)
{
    (void)state;
    static const char head[] = "POST /p HTTP/1.1\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n";
    struct client slow = client_open(port), c = client_open(port);
    client_send(&slow, head, sizeof head - 1);
    assert_true(client_wait_for(&slow, "100 Continue"));
    fill(LIMIT_HTTP_EXCHANGES - 1);
    client_request(&c, "GET", "/a", "", NULL);
    assert_answer(&c, 200, "yes");
    assert_true(client_at_end(&slow));
    fill(-(LIMIT_HTTP_EXCHANGES - 1));
    client_close(&c), client_close(&slow);
}

/* Who was refused and still sends makes room before whose body may yet be a good one. */
static void refused_bodies_drop_nobody(void **state)
{
    (void)state;
    static const char head[] = "POST /p HTTP/1.1\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n",
                      large[] = "POST /p HTTP/1.1\r\nContent-Length: 9000000\r\n\r\n";
    struct client slow = client_open(port), refused = client_open(port), c = client_open(port);
    client_send(&slow, head, sizeof head - 1);
    assert_true(client_wait_for(&slow, "100 Continue"));
    client_send(&refused, large, sizeof large - 1);
    assert_answer(&refused, 413, NULL);
    fill(LIMIT_HTTP_EXCHANGES - 2);
    client_request(&c, "GET", "/a", "", NULL);
    assert_answer(&c, 200, "yes");
    assert_true(client_at_end(&refused));
    client_send(&slow, "123456789", 9);
    assert_answer(&slow, 200, "123456789");
    fill(-(LIMIT_HTTP_EXCHANGES - 2));
    client_close(&c), client_close(&refused), client_close(&slow);
}

static void assert_served(struct client *c)
{
    client_request(c, "GET", "/a", "", NULL);
    assert_answer(c, 200, "yes");
}

/* Whoever has asked nothing for longest goes before others that do not either, and who is being answered stays. */
static void the_idle_make_room(void **state)
{
    (void)state;
    struct client held = client_open(port), first, second, third;
    assert_int_equal(loop->idle_max, NET_IDLE_MAX);
    change(on_idle_max, 2);
    client_request(&held, "GET", "/held", "", NULL);
    assert_true(client_wait_for(&held, "held"));
    first = client_open(port);
    assert_served(&first);
    second = client_open(port);
    assert_served(&second);
    assert_served(&first);
    third = client_open(port);
    assert_served(&third);
    assert_true(client_at_end(&second));
    assert_served(&first);
    assert_int_equal(poll(&(struct pollfd){.fd = held.fd, .events = POLLIN}, 1, 0), 0);
    client_close(&held), client_close(&first), client_close(&second), client_close(&third);
}

static struct client victim, newcomer;

static void on_both(void *arg)
{
    struct change *c = arg;
    client_send(&victim, "GET / HT", 8);
    newcomer = client_open(port);
    atomic_store(&c->done, true);
}

static void on_dropped(void *arg)
{
    struct change *c = arg;
    c->count = (int)loop->dropped_count;
    atomic_store(&c->done, true);
}

/* What the one that has to go sends on the loop's same turn does not save it. */
static void who_has_to_go_goes(void **state)
{
    (void)state;
    victim = client_open(port);
    assert_served(&victim);
    change(on_idle_max, 1);
    change(on_both, 0);
    assert_served(&newcomer);
    change(on_idle_max, 1);
    assert_int_equal(change(on_dropped, 0), 0);
    assert_true(client_at_end(&victim));
    client_close(&victim), client_close(&newcomer);
}

static void on_drop_and_begin(void *arg)
{
    struct change *c = arg;
    struct lws *wsi = loop->listeners->first_exchange->wsi;
    assert_true(net_idle_drop(loop, false));
    net_idle_begin(wsi);
    c->count = (int)loop->idle_count;
    atomic_store(&c->done, true);
}

/* Nor does a body that grows on that turn put it back among those that may stay, where it would be dropped twice, or another for it. */
static void who_has_to_go_is_not_idle_again(void **state)
{
    (void)state;
    static const char head[] = "POST /p HTTP/1.1\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n";
    struct client growing = client_open(port);
    client_send(&growing, head, sizeof head - 1);
    assert_true(client_wait_for(&growing, "100 Continue"));
    assert_int_equal(change(on_drop_and_begin, -1), 0);
    assert_true(client_at_end(&growing));
    client_close(&growing);
}

/* A body that grows is no idleness, however long it takes. */
static void growing_bodies_stay(void **state)
{
    (void)state;
    static const char head[] = "POST /p HTTP/1.1\r\nContent-Length: 20000\r\nExpect: 100-continue\r\n\r\n";
    char body[20001] = "";
    memset(body, 'b', 20000);
    struct client growing = client_open(port), idle, other;
    change(on_idle_max, 2);
    client_send(&growing, head, sizeof head - 1);
    assert_true(client_wait_for(&growing, "100 Continue"));
    idle = client_open(port);
    assert_served(&idle);
    client_send(&growing, body, 17000);
    for (int i = 0; i < 2; i++)
        change(on_idle_max, 2); /* what was sent before is read by the second turn */
    other = client_open(port);
    assert_served(&other);
    assert_true(client_at_end(&idle));
    client_send(&growing, body, 3000);
    assert_answer(&growing, 200, body);
    client_close(&growing), client_close(&idle), client_close(&other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(slow_bodies_keep_nobody_out, set_up, tear_down),
        cmocka_unit_test_setup_teardown(refused_bodies_drop_nobody, set_up, tear_down),
        cmocka_unit_test_setup_teardown(the_idle_make_room, set_up, tear_down),
        cmocka_unit_test_setup_teardown(who_has_to_go_goes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(who_has_to_go_is_not_idle_again, set_up, tear_down),
        cmocka_unit_test_setup_teardown(growing_bodies_stay, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
