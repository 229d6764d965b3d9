/* tcp: BBR's view of a path begins anew, and nobody else's does. */
#include "protocol/tcp.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <linux/inet_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static bool bbr_is_forbidden;
int __real_setsockopt(int fd, int level, int name, const void *value, socklen_t size);
int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t size);

int __wrap_setsockopt(int fd, int level, int name, const void *value, socklen_t size)
{
    bool is_bbr = level == IPPROTO_TCP && name == TCP_CONGESTION && memcmp(value, "bbr", 3) == 0;
    errno = EPERM;
    return is_bbr && bbr_is_forbidden ? -1 : __real_setsockopt(fd, level, name, value, size);
}

/* Both ends of a connection over loopback. */
static void connect_pair(int fds[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(listener >= 0 && fds[0] >= 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&address, size), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &size), 0);
    assert_int_equal(connect(fds[0], (struct sockaddr *)&address, size), 0);
    assert_true((fds[1] = accept(listener, NULL, NULL)) >= 0);
    close(listener);
}

static void close_pair(const int fds[2])
{
    close(fds[0]);
    close(fds[1]);
}

static bool choose(int fd, const char *name)
{
    return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name)) == 0;
}

static bool has(int fd, const char *name)
{
    char text[17] = "";
    socklen_t size = sizeof text - 1;
    return getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, text, &size) == 0 && strcmp(text, name) == 0;
}

/* The bandwidth that BBR has measured; it forgets it when it begins anew. */
static uint32_t bandwidth(int fd)
{
    union tcp_cc_info info = {0};
    socklen_t size = sizeof info;
    assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_CC_INFO, &info, &size), 0);
    return info.bbr.bbr_bw_lo;
}

/* There and back: the acknowledgement has come with the answer. */
static void exchange(const int fds[2])
{
    char data[1000] = {0};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(send(fds[i], data, sizeof data, 0), (ssize_t)sizeof data);
        assert_int_equal(recv(fds[1 - i], data, sizeof data, MSG_WAITALL), (ssize_t)sizeof data);
    }
}

static void bbr_begins_anew(void **state)
{
    (void)state;
    int fds[2];
    connect_pair(fds);
    bool possible = choose(fds[0], "bbr");
    if (possible) {
        bool renewed = false;
        for (int i = 0; i < 10000 && !renewed; i++) { /* other work makes some round trips long */
            exchange(fds);
            assert_true(bandwidth(fds[0]) > 0);
            renewed = tcp_renew(fds[0]);
        }
        assert_true(renewed);
        assert_true(has(fds[0], "bbr"));
        assert_int_equal(bandwidth(fds[0]), 0);
        bbr_is_forbidden = true;
        assert_false(tcp_renew(fds[0]));
        bbr_is_forbidden = false;
        assert_true(has(fds[0], "bbr")); /* and not what comes between */
        exchange(fds);
        assert_true(bandwidth(fds[0]) > 0);
    }
    close_pair(fds);
    if (!possible)
        skip(); /* this kernel has no BBR, or does not let everybody choose it */
}

static void a_path_that_has_become_longer_is_left_alone(void **state)
{
    (void)state;
    assert_true(tcp_may_renew(40500, 40000));
    assert_true(tcp_may_renew(2 * 40000 + TCP_RENEW_SLACK_US - 1, 40000));
    assert_false(tcp_may_renew(2 * 40000 + TCP_RENEW_SLACK_US, 40000));
    assert_false(tcp_may_renew(40000, 2000));
}

static void others_are_left_alone(void **state)
{
    (void)state;
    int fds[2];
    connect_pair(fds);
    assert_true(choose(fds[0], "reno"));
    assert_false(tcp_renew(fds[0]));
    assert_true(has(fds[0], "reno"));
    close_pair(fds);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    assert_false(tcp_renew(fds[0]));
    close_pair(fds);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bbr_begins_anew),
        cmocka_unit_test(a_path_that_has_become_longer_is_left_alone),
        cmocka_unit_test(others_are_left_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
