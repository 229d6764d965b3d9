/* Connections leave descriptors to the rest of the process: what a store reads and writes is opened however many clients there are. */
#include "net_rig.h"
#include <fcntl.h>
#include <semaphore.h>
#include <sys/resource.h>

#define FILES 400 /* that this process may have: a quarter of them is kept */

static struct net_loop *loop;
static uint16_t port, operators_port;
static pthread_t thread;
static sem_t changed;
static struct rlimit before;

static int set_up(void **state)
{
    (void)state;
    loop = loop_make();
    port = loop_listen(loop, &(struct net_listen){.http = &answering});
    operators_port = loop_listen(loop, &(struct net_listen){.http = &answering, .takes_all_files = true});
    thread = loop_begin(loop);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &(struct rlimit){FILES, before.rlim_max}), 0);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    loop_end(loop, thread);
    return setrlimit(RLIMIT_NOFILE, &before);
}

static bool is_served(struct client *c)
{
    client_request(c, "GET", "/", "", NULL);
    struct response r = client_response(c, false);
    free(r.body);
    return r.status == 200;
}

static bool is_held(struct client *c)
{
    client_request(c, "GET", "/held", "", NULL);
    return client_wait_for(c, "held");
}

/* The server has closed it, or something came. */
static bool has_news(const struct client *c)
{
    return poll(&(struct pollfd){.fd = c->fd, .events = POLLIN}, 1, 0) > 0;
}

static int files_left(void)
{
    int files[FILES], count = 0;
    while (count < FILES && (files[count] = open("/dev/null", O_RDONLY)) >= 0)
        count++;
    for (int i = 0; i < count; i++)
        close(files[i]);
    return count;
}

static void clients_leave_files_to_others(void **state)
{
    (void)state;
    struct client clients[FILES];
    int count = 0;
    do /* each takes two here, its own end and the server's */
        clients[count] = client_open(port);
    while (is_held(&clients[count++]) && count < FILES / 2);
    assert_true(count > 20); /* control */
    assert_true(count < FILES / 2);
    assert_true(clients[count - 1].ended);
    assert_true(files_left() >= FILES / 4 - 4);
    struct client other = client_open(operators_port);
    assert_true(is_served(&other));
    client_close(&other);
    for (int i = 0; i < count - 1; i++)
        assert_false(has_news(&clients[i])); /* who is in stays in */
    for (int i = 0; i < count; i++)
        client_close(&clients[i]);
    struct client again;
    for (bool served = false; !served; client_close(&again)) { /* once the server has seen them leave */
        again = client_open(port);
        served = is_served(&again);
    }
}

/* Who comes with nothing but `text`, and stays. Nobody else is kept out, however many they are: the first of them have to go. */
static void assert_makes_room(const char *text)
{
    static struct client idle[2 * FILES];
    size_t first = 0;
    for (size_t i = 0; i < TD_COUNT(idle); i++) {
        idle[i] = client_open(port);
        client_send(&idle[i], text, strlen(text));
        struct client other = client_open(port);
        assert_true(is_served(&other));
        client_close(&other);
        while (first <= i && has_news(&idle[first]))
            client_close(&idle[first++]);
    }
    assert_true(first < TD_COUNT(idle) - 20);
    assert_true(files_left() >= FILES / 4 - 4);
    while (first < TD_COUNT(idle))
        client_close(&idle[first++]);
}

static void the_idle_make_room(void **state)
{
    (void)state;
    assert_makes_room("");
}

static void slow_heads_make_room(void **state)
{
    (void)state;
    assert_makes_room("GET / HTTP/1.1\r\nHost: loc");
}

static void slow_bodies_make_room(void **state)
{
    (void)state;
    assert_makes_room("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nslow");
}

static void on_young(void *young_us)
{
    loop->young_us = *(uint64_t *)young_us;
    sem_post(&changed);
}

static void set_young(uint64_t us)
{
    assert_int_equal(net_loop_post(loop, on_young, &us), 0);
    sem_wait(&changed);
}

/* Requests that are answered late have all descriptors but the last few. Who comes then does not end who came just before, and may be in the middle of its
 * handshake; an old one that asks nothing makes room. */
static void who_has_just_come_is_spared(void **state)
{
    (void)state;
    struct client held[FILES], young[5], other;
    int count = 0;
    sem_init(&changed, 0, 0);
    set_young(UINT64_MAX);
    do {
        held[count] = client_open(port);
        assert_true(is_held(&held[count]));
    } while (held[count++].fd + 1 < FILES - FILES / 4 - FILES / 16);
    for (size_t i = 0; i < TD_COUNT(young); i++)
        young[i] = client_open(port);
    for (size_t i = 0; i < TD_COUNT(young); i++)
        assert_true(is_served(&young[i]));
    set_young(0);
    other = client_open(port);
    assert_true(is_served(&other));
    for (size_t i = 0; i < TD_COUNT(young); i++) {
        assert_true(client_at_end(&young[i]));
        client_close(&young[i]);
    }
    client_close(&other);
    for (int i = 0; i < count; i++)
        client_close(&held[i]);
    sem_destroy(&changed);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {TEST(clients_leave_files_to_others), TEST(the_idle_make_room),
                                       TEST(slow_heads_make_room), TEST(slow_bodies_make_room),
                                       TEST(who_has_just_come_is_spared)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
