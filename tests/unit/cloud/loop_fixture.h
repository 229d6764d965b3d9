/* loop_fixture: what tests of a node's front doors share whatever is behind them: the service, its loop's thread, a folder, a tokens file with
 * two people of one tenant and one of another. */
#ifndef TANDEM_TESTS_LOOP_FIXTURE_H
#define TANDEM_TESTS_LOOP_FIXTURE_H
#include "cloud/direct.h"
#include "cloud/edge_server.h"
#include "shared/log.h"
#include <ftw.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#define FIXTURE_CONTEXT 4096u

struct fixture {
    char folder[64], tokens_path[80];
    struct service service;
    struct gguf *file;
    struct tokenizer *tokenizer;
    struct edge_server *edges;
    struct direct *direct;
    pthread_t thread;
    uint16_t port;
};
static struct fixture fx;

/* ---- the loop ---- */

struct on_loop {
    void (*fn)(void *arg);
    void *arg;
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool ran;
};

static inline void on_loop_run(void *arg)
{
    struct on_loop *c = arg;
    c->fn(c->arg);
    pthread_mutex_lock(&c->lock);
    c->ran = true;
    pthread_cond_signal(&c->done);
    pthread_mutex_unlock(&c->lock);
}

/* Run fn there and wait for it. */
static inline void on_loop(void (*fn)(void *arg), void *arg)
{
    struct on_loop c = {fn, arg, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    if (net_loop_post(fx.service.loop, on_loop_run, &c) != 0)
        abort();
    pthread_mutex_lock(&c.lock);
    while (!c.ran)
        pthread_cond_wait(&c.done, &c.lock);
    pthread_mutex_unlock(&c.lock);
}

/* ---- folder and tokens ---- */

/* In memory if possible: syncs of a busy disk take longer than the tests. */
static inline void fixture_folder(void)
{
    memset(&fx, 0, sizeof fx);
    snprintf(fx.folder, sizeof fx.folder, "%s/td-test-cloud-%d",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", (int)getpid());
    snprintf(fx.tokens_path, sizeof fx.tokens_path, "%s/tokens", fx.folder);
    mkdir(fx.folder, 0700);
}

/* Tokens are the names: "alice" and "bob" of acme, "eve" of globex. */
static inline void fixture_tokens(bool with_alice)
{
    static const char *const people[][2] = {{"acme", "bob"}, {"globex", "eve"}, {"acme", "alice"}};
    char temporary[96], digits[65];
    snprintf(temporary, sizeof temporary, "%s.new", fx.tokens_path);
    FILE *f = fopen(temporary, "w");
    for (unsigned i = 0; i < 2u + with_alice; i++) {
        uint8_t hash[TD_HASH_SIZE];
        sha256_once(people[i][1], strlen(people[i][1]), hash);
        hex_encode(hash, sizeof hash, digits);
        fprintf(f, "%s %s %s\n", digits, people[i][0], people[i][1]);
    }
    fclose(f);
    chmod(temporary, 0600);
    assert_int_equal(rename(temporary, fx.tokens_path), 0);
}

static inline int fixture_remove(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

#endif
