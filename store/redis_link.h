/* redis_link: one connection to a server that speaks the Redis protocol, for one thread at a time. Nothing that the server does may hurt: every
 * wait has a deadline, every reply a largest size, and after any error the connection is closed and the next use opens another.
 *
 * Why not hiredis's own redisCommand: its time-out is of one read(), so a server that sends a byte now and then holds it for ever, and
 * it takes in replies of any size. */
#ifndef TANDEM_STORE_REDIS_LINK_H
#define TANDEM_STORE_REDIS_LINK_H
#include "shared/base.h"
#include "shared/status.h"
#include <hiredis/hiredis.h>

#define REDIS_CONNECT_MS 1000
#define REDIS_ARRAY_MAX  1024 /* elements of a reply */

struct redis_server {
    const char *host, *password; /* borrowed; password may be NULL */
    uint16_t port;
};
struct redis_link {
    const struct redis_server *server;
    redisContext *context; /* NULL: closed */
    const char *why;       /* the last exchange failed; static text */
    size_t reply_max;
    uint64_t deadline_us;
};

void redis_link_init(struct redis_link *l, const struct redis_server *server);
void redis_link_close(struct redis_link *l);
/* Begin an exchange: everything until the last reply takes at most timeout_us, and no reply is larger than reply_max bytes. Connects if need be.
 * -TD_ERR_IO. */
int redis_link_begin(struct redis_link *l, uint64_t timeout_us, size_t reply_max);
/* Queue a command. */
int redis_link_send(struct redis_link *l, size_t count, const struct span *words);
int redis_link_send_words(struct redis_link *l, size_t count, const char **words, const size_t *sizes);
/* The reply of the oldest command that has none yet, to be freed by freeReplyObject. -TD_ERR_IO: the connection is gone, and all replies
 * with it. A reply that is an error is -TD_ERR_UNSUPPORTED; the connection stays. */
int redis_link_reply(struct redis_link *l, redisReply **out);

static inline struct span redis_word(const char *text)
{
    return (struct span){(const uint8_t *)text, strlen(text)};
}

#endif
