/* The network loop's thread, and who posts to it, without memory: nothing that must arrive is lost, and nothing is looked at after it was freed. Linked so
 * that allocations come here first (tests/CMakeLists.txt); those of libwebsockets, which uses neither calloc nor strdup, do not fail. */
#include "net_rig.h"

/* ---- memory ------------------------------------------------------------------------------------------------- */

#define RESPONSE_SIZE 4096 /* of the first buffer of a response */

static _Thread_local bool is_watched;  /* only allocations of such a thread fail … */
static atomic_int fails_in, fails_for; /* … so many from the n-th on; 0: none */
static atomic_int failed;

static bool fails(void)
{
    if (!is_watched || atomic_load(&fails_in) == 0)
        return false;
    if (atomic_load(&fails_in) > 1) {
        atomic_fetch_sub(&fails_in, 1);
        return false;
    }
    if (atomic_fetch_sub(&fails_for, 1) == 1)
        atomic_store(&fails_in, 0);
    atomic_fetch_add(&failed, 1);
    return true;
}

static void fail_from(int n, int count)
{
    atomic_store(&failed, 0);
    atomic_store(&fails_for, count);
    atomic_store(&fails_in, n);
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *p, size_t size);
char *__real_strdup(const char *text);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *p, size_t size);
char *__wrap_strdup(const char *text);

static _Thread_local bool is_poster;

void *__wrap_malloc(size_t size)
{
    return is_poster && fails() ? NULL : __real_malloc(size);
}
void *__wrap_calloc(size_t count, size_t size)
{
    return fails() ? NULL : __real_calloc(count, size);
}
void *__wrap_realloc(void *p, size_t size)
{
    return !p && size == RESPONSE_SIZE && fails() ? NULL : __real_realloc(p, size);
}
char *__wrap_strdup(const char *text)
{
    return fails() ? NULL : __real_strdup(text);
}

/* ---- the server --------------------------------------------------------------------------------------------- */

static struct net_loop *loop;
static pthread_t thread;
static uint16_t port;

static void *run_watched(void *arg)
{
    is_watched = true;
    return loop_main(arg);
}

static int set_up(void **state)
{
    (void)state;
    const struct net_listen listen = {
        .bind_address = "127.0.0.1", .http = &answering, .loopback_hosts_only = true};
    fail_from(0, 0);
    loop = loop_make();
    port = loop_listen(loop, &listen);
    return pthread_create(&thread, NULL, run_watched, loop);
}

static int tear_down(void **state)
{
    (void)state;
    loop_end(loop, thread);
    return 0;
}

static void assert_serves(void)
{
    struct client c = client_open(port);
    client_request(&c, "GET", "/", "", NULL);
    struct response r = client_response(&c, false);
    assert_int_equal(r.status, 200);
    free(r.body);
    client_close(&c);
}

/* ---- posts -------------------------------------------------------------------------------------------------- */

static atomic_int posted;

static void on_post(void *arg)
{
    (void)arg;
    atomic_fetch_add(&posted, 1);
}

struct poster {
    int code, wait_code;
};

static void *post_without_memory(void *arg)
{
    struct poster *p = arg;
    is_watched = is_poster = true;
    p->code = net_loop_post(loop, on_post, NULL);
    p->wait_code = net_loop_post_wait(loop, on_post, NULL);
    return NULL;
}

static void test_what_must_arrive_waits_for_memory(void **state)
{
    (void)state;
    enum { TRIES = 5 };
    pthread_t thread_of_poster;
    struct poster poster = {1, 1};
    atomic_store(&posted, 0);
    fail_from(1, TRIES);
    assert_int_equal(pthread_create(&thread_of_poster, NULL, post_without_memory, &poster), 0);
    pthread_join(thread_of_poster, NULL);
    assert_int_equal(poster.code, -TD_ERR_NOMEM); /* may be lost: its caller hears of it */
    assert_int_equal(poster.wait_code, 0);
    assert_int_equal(atomic_load(&failed), TRIES);
    assert_true(reaches(&posted, 1));
}

static int late_code;

static void post_late(void *arg)
{
    late_code = net_loop_post_wait(arg, on_post, NULL);
}

/* Nobody waits for a loop that has ended. */
static void test_a_loop_that_has_ended_takes_nothing(void **state)
{
    (void)state;
    struct net_loop *l = loop_make();
    assert_int_equal(net_loop_post(l, post_late, l), 0);
    atomic_store(&posted, 0);
    net_loop_destroy(l); /* what was posted runs, and finds it closed */
    assert_int_equal(late_code, -TD_ERR_CLOSED);
    assert_int_equal(atomic_load(&posted), 0);
}

/* ---- refusals ----------------------------------------------------------------------------------------------- */

/* The n-th allocation fails for each n that there is, the last of them the room for the answer: then the exchange ends inside the refusal. Each time the
 * connection closes without an answer, or answers as ever, and the server goes on. Returns how many there were. */
static int fail_each(const char *request, const char *status)
{
    int n = 1;
    for (bool reached = true; reached; n++) {
        fail_from(n, 1);
        struct client c = client_open(port);
        client_send(&c, request, strlen(request));
        bool answered = client_wait_for(&c, "\r\n\r\n");
        reached = atomic_load(&failed) > 0;
        fail_from(0, 0);
        if (answered)
            assert_memory_equal(c.data, status, strlen(status));
        else
            assert_true(c.ended && reached);
        client_close(&c);
        assert_serves();
    }
    return n - 2;
}

static void test_requests_that_find_no_memory(void **state)
{
    (void)state;
    static const char *const refused[][2] = {
        {"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", "HTTP/1.1 403"},
        {"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n", "HTTP/1.1 403"},
        {"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", "HTTP/1.1 411"},
        {"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", "HTTP/1.1 400"},
        {"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\nbody", "HTTP/1.1 413"},
        {"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody", "HTTP/1.1 200"}};
    for (size_t i = 0; i < TD_COUNT(refused); i++)
        assert_true(fail_each(refused[i][0], refused[i][1]) > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_must_arrive_waits_for_memory, set_up, tear_down),
        cmocka_unit_test(test_a_loop_that_has_ended_takes_nothing),
        cmocka_unit_test_setup_teardown(test_requests_that_find_no_memory, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
