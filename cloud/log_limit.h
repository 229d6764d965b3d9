/* log_limit: lines that peers can cause, or that come by the hundred when a disk fails, are logged a few times a second at most; metrics count
 * them all. One owner, one thread. */
#ifndef TANDEM_CLOUD_LOG_LIMIT_H
#define TANDEM_CLOUD_LOG_LIMIT_H
#include "shared/base.h"

#define LOG_LIMIT_PER_S 5u

struct log_limit {
    uint64_t second;
    uint32_t count;
};

static inline bool log_limit_allows(struct log_limit *l, uint64_t now_us)
{
    uint64_t second = now_us / 1000000;
    if (second != l->second)
        *l = (struct log_limit){second, 0};
    return l->count++ < LOG_LIMIT_PER_S;
}

#endif
