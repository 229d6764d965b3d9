/* redis_link: see redis_link.h. */
#include "store/redis_link.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

#define READ_SLACK (64u << 10) /* bytes that may be in the buffer beside the largest reply */

static struct timeval to_timeval(uint64_t us)
{
    return (struct timeval){(time_t)(us / 1000000), (suseconds_t)(us % 1000000)};
}

void redis_link_init(struct redis_link *l, const struct redis_server *server)
{
    *l = (struct redis_link){.server = server};
}

void redis_link_close(struct redis_link *l)
{
    if (l->context)
        redisFree(l->context);
    l->context = NULL;
}

static int fail(struct redis_link *l, const char *why)
{
    l->why = why;
    redis_link_close(l);
    return -TD_ERR_IO;
}

/* ---- replies of any number of elements are refused before memory is taken for them ------------------------ */

#if HIREDIS_MAJOR < 1
static redisReplyObjectFunctions careful, usual;

static void *create_small_array(const redisReadTask *task, int elements)
{
    return elements > REDIS_ARRAY_MAX ? NULL : usual.createArray(task, elements);
}

static pthread_mutex_t careful_lock = PTHREAD_MUTEX_INITIALIZER;
static bool careful_ready;

static void limit_arrays(redisContext *c)
{
    pthread_mutex_lock(&careful_lock);
    if (!careful_ready) {
        usual = careful = *c->reader->fn;
        careful.createArray = create_small_array;
        careful_ready = true;
    }
    pthread_mutex_unlock(&careful_lock);
    c->reader->fn = &careful;
}
#else
static void limit_arrays(redisContext *c)
{
    c->reader->maxelements = REDIS_ARRAY_MAX;
}
#endif

/* ---- exchange ----------------------------------------------------------------------------------------------- */

/* The library writes with write(): a server that has gone must be an error, not a signal. */
static void block_broken_pipe(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
}

static int authenticate(struct redis_link *l)
{
    redisReply *reply;
    const struct span words[] = {redis_word("AUTH"), redis_word(l->server->password)};
    int rc = redis_link_send(l, TD_COUNT(words), words);
    rc = rc < 0 ? rc : redis_link_reply(l, &reply);
    if (rc < 0)
        return fail(l, rc == -TD_ERR_UNSUPPORTED ? "it refuses the password" : l->why);
    freeReplyObject(reply);
    return 0;
}

/* Between exchanges nothing may come: what can be read is the end of the connection, or what was not asked for. */
static bool is_stale(const struct redis_link *l)
{
    struct pollfd p = {.fd = l->context->fd, .events = POLLIN};
    return poll(&p, 1, 0) != 0;
}

int redis_link_begin(struct redis_link *l, uint64_t timeout_us, size_t reply_max)
{
    block_broken_pipe();
    l->deadline_us = clock_mono_us() + timeout_us;
    l->reply_max = reply_max;
    if (l->context && is_stale(l))
        redis_link_close(l);
    if (l->context)
        return 0;
    l->context = redisConnectWithTimeout(l->server->host, l->server->port,
                                         to_timeval(TD_MIN(timeout_us, REDIS_CONNECT_MS * UINT64_C(1000))));
    if (!l->context || l->context->err)
        return fail(l, "it cannot be connected to");
    limit_arrays(l->context);
    return l->server->password ? authenticate(l) : 0;
}

int redis_link_send_words(struct redis_link *l, size_t count, const char **words, const size_t *sizes)
{
    if (!l->context)
        return -TD_ERR_IO;
    return redisAppendCommandArgv(l->context, (int)count, words, sizes) == REDIS_OK
               ? 0
               : fail(l, "out of memory");
}

int redis_link_send(struct redis_link *l, size_t count, const struct span *words)
{
    const char *texts[8];
    size_t sizes[8];
    if (!l->context || count > TD_COUNT(texts))
        return -TD_ERR_IO;
    for (size_t i = 0; i < count; i++) {
        texts[i] = (const char *)words[i].data;
        sizes[i] = words[i].size;
    }
    return redis_link_send_words(l, count, texts, sizes);
}

/* Wait until the socket can be read or written; what is left of the time at most. */
static bool wait_for(struct redis_link *l, short events)
{
    for (;;) {
        uint64_t now = clock_mono_us();
        if (now >= l->deadline_us)
            return false;
        struct pollfd p = {.fd = l->context->fd, .events = events};
        int n = poll(&p, 1, (int)((l->deadline_us - now) / 1000 + 1));
        if (n > 0)
            return true;
        if (n == 0 || errno != EINTR)
            return false;
    }
}

static bool flush(struct redis_link *l)
{
    struct timeval left;
    for (int done = 0; !done;) {
        uint64_t now = clock_mono_us();
        if (!wait_for(l, POLLOUT))
            return false;
        left =
            to_timeval(l->deadline_us - now); /* the socket blocks: a write of much must end in time, too */
        if (redisSetTimeout(l->context, left) != REDIS_OK || redisBufferWrite(l->context, &done) != REDIS_OK)
            return false;
    }
    return true;
}

int redis_link_reply(struct redis_link *l, redisReply **out)
{
    void *reply = NULL;
    if (!l->context || !flush(l))
        return fail(l, "it takes no more in");
    for (;;) {
        if (redisGetReplyFromReader(l->context, &reply) != REDIS_OK)
            return fail(l, "its answers make no sense");
        if (reply)
            break;
        if (l->context->reader->len > l->reply_max + READ_SLACK)
            return fail(l, "its answers are too large");
        if (!wait_for(l, POLLIN))
            return fail(l, "it does not answer in time");
        if (redisBufferRead(l->context) != REDIS_OK)
            return fail(l, "it has closed the connection");
    }
    *out = reply;
    if ((*out)->type != REDIS_REPLY_ERROR)
        return 0;
    freeReplyObject(*out);
    return -TD_ERR_UNSUPPORTED;
}
