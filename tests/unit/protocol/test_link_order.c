/* link, order: which frame may come when, from whom, on which stream; how connections and streams begin and end. */
#include "frames.h"

/* ---- greetings ---- */

static void test_greeting_of_both_sides(void **state)
{
    (void)state;
    struct owner cloud, edge;
    owner_start(&cloud, LINK_CLOUD, 3 << 20, 1 << 20);
    owner_start(&edge, LINK_EDGE, 0, 0);
    assert_int_equal(link_message_max(edge.link), 0);
    Tandem__Hello hello = hello_valid();
    assert_int_equal(link_send(edge.link, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
    assert_int_equal(link_state(edge.link), LINK_GREETING);

    uint8_t bytes[4096];
    int64_t size = link_next(edge.link, bytes, sizeof bytes, 1);
    assert_true(size > 0);
    assert_int_equal(link_next(edge.link, bytes + size, sizeof bytes - (size_t)size, 1), 0);
    assert_int_equal(link_receive(cloud.link, bytes, (size_t)size, 1), 0);
    assert_int_equal(cloud.seen[0].type, FRAME_HELLO);
    assert_int_equal(link_state(cloud.link), LINK_GREETING);

    Tandem__Welcome welcome = welcome_valid();
    assert_int_equal(link_send(cloud.link, FRAME_WELCOME, 0, &welcome.base, NULL, 0), 0);
    assert_int_equal(link_state(cloud.link), LINK_READY);
    size = link_next(cloud.link, bytes, sizeof bytes, 1);
    assert_int_equal(link_receive(edge.link, bytes, (size_t)size, 1), 0);
    assert_int_equal(edge.seen[0].type, FRAME_WELCOME);
    assert_int_equal(link_state(edge.link), LINK_READY);
    assert_int_equal(link_message_max(edge.link), 1 << 20); /* the cloud's windows came with WELCOME */
    assert_int_equal(link_message_max(cloud.link), LIMIT_STREAM_WINDOW);
    owner_stop(&cloud), owner_stop(&edge);
}

/* Nothing but HELLO comes first, and nothing more before WELCOME. */
static void test_cloud_wants_hello_first(void **state)
{
    (void)state;
    for (unsigned type = FRAME_WELCOME; type < FRAME_TYPE_END; type++)
        for (int greeted = 0; greeted < 2; greeted++) {
            struct owner o;
            owner_start(&o, LINK_CLOUD, 0, 0);
            Tandem__Hello hello = hello_valid();
            if (greeted)
                assert_int_equal(give(&o, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
            o.seen_count = 0;
            Tandem__Open open = open_valid(1);
            Tandem__Ping ping = TANDEM__PING__INIT;
            int rc = type == FRAME_OPEN ? give(&o, type, 1, &open.base, many_bytes, 4)
                                        : give(&o, type, type == FRAME_PING ? 0 : 1, &ping.base, NULL, 0);
            assert_true(rc < 0);
            assert_int_equal(o.seen_count, 0);
            assert_failed(&o, rc);
            owner_stop(&o);
        }
}

static void test_hello_once(void **state)
{
    (void)state;
    struct owner o;
    Tandem__Hello hello = hello_valid();
    owner_start(&o, LINK_CLOUD, 0, 0);
    assert_int_equal(give(&o, FRAME_HELLO, 0, &hello.base, NULL, 0), 0);
    assert_int_equal(give(&o, FRAME_HELLO, 0, &hello.base, NULL, 0), -TD_ERR_PROTOCOL);
    assert_failed(&o, -TD_ERR_PROTOCOL);
    owner_stop(&o);
    cloud_ready(&o, 0, 0);
    assert_int_equal(give(&o, FRAME_HELLO, 0, &hello.base, NULL, 0), -TD_ERR_PROTOCOL);
    assert_failed(&o, -TD_ERR_PROTOCOL);
    owner_stop(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greeting_of_both_sides),
        cmocka_unit_test(test_cloud_wants_hello_first),
        cmocka_unit_test(test_hello_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
