/* redis_fixture: servers for the remote tier: the real redis-server, on a port of its own with nothing on disk; and a small hostile one that
 * answers whatever a test wants. */
#ifndef TANDEM_TESTS_REDIS_FIXTURE_H
#define TANDEM_TESTS_REDIS_FIXTURE_H
#include "shared/base.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

/* A socket that listens on loopback; *port in: 0 or wanted, out. */
static inline int fixture_listen(uint16_t *port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons(*port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &size), 0);
    *port = ntohs(a.sin_port);
    return fd;
}

/* A free port below those that the system hands out, so that nobody gets it while a server is away. */
static inline uint16_t fixture_port(void)
{
    static uint32_t next;
    if (next == 0)
        next = (uint32_t)getpid() * 7919u + (uint32_t)clock_mono_us();
    for (;; next++) {
        uint16_t port = (uint16_t)(20000 + next % 12000);
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct sockaddr_in a = {
            .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        bool is_free = bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
        close(fd);
        if (is_free) {
            next++;
            return port;
        }
    }
}

static inline void fixture_pause(unsigned us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

/* ---- the real one ------------------------------------------------------------------------------------------- */

struct real_redis {
    pid_t pid;
    uint16_t port;
    char password[64];
};

static inline bool redis_is_installed(void)
{
    return system("command -v redis-server >/dev/null 2>&1") == 0;
}

static inline bool redis_accepts(uint16_t port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    bool good = connect(fd, (struct sockaddr *)&a, sizeof a) == 0;
    close(fd);
    return good;
}

/* port 0: a free one. */
static inline void redis_start(struct real_redis *r)
{
    char port[8];
    if (r->port == 0)
        r->port = fixture_port();
    snprintf(port, sizeof port, "%u", r->port);
    r->pid = fork();
    if (r->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that is killed leaves nothing behind */
        if (!freopen("/dev/null", "w", stdout))
            _exit(126);
        const char *argv[] = {"redis-server", "--port", port,   "--bind",
                              "127.0.0.1",    "--save", "",     "--appendonly",
                              "no",           "--dir",  "/tmp", r->password[0] ? "--requirepass" : NULL,
                              r->password,    NULL};
        execvp(argv[0], (char *const *)argv);
        _exit(127);
    }
    for (int i = 0; i < 5000 && !redis_accepts(r->port); i++)
        fixture_pause(2000);
    assert_true(redis_accepts(r->port));
}

static inline void redis_stop(struct real_redis *r)
{
    int status;
    kill(r->pid, SIGCONT);
    kill(r->pid, SIGKILL);
    waitpid(r->pid, &status, 0);
    r->pid = 0;
}

/* ---- the hostile one ---------------------------------------------------------------------------------------- */

struct fake_redis {
    int fd;
    uint16_t port;
    pthread_t thread;
    atomic_bool stop;
    /* What every command is answered with, once and for all or byte by byte for ever. PING gets its PONG while pong is set. */
    pthread_mutex_t lock;
    char answer[4096];
    size_t answer_size;
    bool pong, trickle, mute;
    atomic_uint commands, clients;
};

static inline void fake_answer(struct fake_redis *f, const void *bytes, size_t size, bool pong)
{
    pthread_mutex_lock(&f->lock);
    memcpy(f->answer, bytes, size);
    f->answer_size = size;
    f->pong = pong;
    pthread_mutex_unlock(&f->lock);
}

struct fake_client {
    struct fake_redis *server;
    int fd;
};

static inline bool fake_reply(struct fake_redis *f, int fd, bool ping)
{
    char bytes[4096];
    pthread_mutex_lock(&f->lock);
    bool pong = ping && f->pong, trickle = f->trickle, mute = f->mute && !pong;
    size_t size = pong ? 7 : f->answer_size;
    memcpy(bytes, pong ? "+PONG\r\n" : f->answer, size);
    pthread_mutex_unlock(&f->lock);
    if (mute)
        return true;
    if (send(fd, bytes, size, MSG_NOSIGNAL) != (ssize_t)size)
        return false;
    while (trickle && !pong && !atomic_load(&f->stop)) {
        if (send(fd, "x", 1, MSG_NOSIGNAL) != 1)
            return false;
        fixture_pause(20000);
    }
    return true;
}

static inline void *fake_client_main(void *arg)
{
    struct fake_client c = *(struct fake_client *)arg;
    char in[65536];
    free(arg);
    while (!atomic_load(&c.server->stop)) {
        struct pollfd p = {.fd = c.fd, .events = POLLIN};
        if (poll(&p, 1, 20) <= 0)
            continue;
        ssize_t n = recv(c.fd, in, sizeof in - 1, 0);
        if (n <= 0)
            break;
        atomic_fetch_add(&c.server->commands, 1);
        in[n] = '\0';
        if (!fake_reply(c.server, c.fd, strstr(in, "PING") != NULL))
            break;
    }
    close(c.fd);
    atomic_fetch_sub(&c.server->clients, 1);
    return NULL;
}

static inline void *fake_main(void *arg)
{
    struct fake_redis *f = arg;
    pthread_t thread;
    while (!atomic_load(&f->stop)) {
        struct pollfd p = {.fd = f->fd, .events = POLLIN};
        if (poll(&p, 1, 20) <= 0)
            continue;
        struct fake_client *c = malloc(sizeof *c);
        *c = (struct fake_client){f, accept(f->fd, NULL, NULL)};
        atomic_fetch_add(&f->clients, 1);
        pthread_create(&thread, NULL, fake_client_main, c);
        pthread_detach(thread);
    }
    while (atomic_load(&f->clients) > 0)
        fixture_pause(1000);
    return NULL;
}

static inline void fake_start(struct fake_redis *f)
{
    memset(f, 0, sizeof *f);
    pthread_mutex_init(&f->lock, NULL);
    f->fd = fixture_listen(&f->port);
    pthread_create(&f->thread, NULL, fake_main, f);
}

static inline void fake_stop(struct fake_redis *f)
{
    atomic_store(&f->stop, true);
    pthread_join(f->thread, NULL);
    close(f->fd);
}

#endif
