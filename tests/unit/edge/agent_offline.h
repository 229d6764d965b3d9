/* What the tests of a device without its cloud share: computing is paced, so that a link can come back in the middle of it; a bias makes every
 * token the same on both sides. */
#ifndef TANDEM_TESTS_AGENT_OFFLINE_H
#define TANDEM_TESTS_AGENT_OFFLINE_H
#include "agent_rig.h"

static inline void rig_offline(struct rig *r)
{
    rig_make(r, PLANNER_AUTO);
    r->config.offline = OFFLINE_CONTINUE;
    r->cloud.same_token = RIG_TOKEN;
}

static inline bool is_whole(void *arg)
{
    return ((struct client *)arg)->done;
}

static inline bool has_ten(void *arg)
{
    return ((struct client *)arg)->count >= 10;
}

static inline int set_up_paced(void **state)
{
    (void)state;
    log_set_level(LOG_ERROR);
    return crypto_init() || setenv("TANDEM_PACED_LAYER_US", "200", 1);
}
#endif
