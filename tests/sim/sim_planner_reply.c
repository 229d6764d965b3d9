/* sim_planner_reply: reply tokens of the planner's simulation: the client's list, which has each index from whoever is first, and the device's run, which
 * computes what is known through all layers and draws the token behind it, at most LEAD before the cloud; without a bound while it is away. */
#include "sim_planner.h"

int32_t reply_token(const int32_t *before, uint32_t count)
{
    uint32_t state = 1;
    for (uint32_t i = 0; i < count; i++)
        state = state * 1664525 + (uint32_t)before[i] + 1013904223;
    return 1 + (int32_t)((state >> 16) % 90);
}

/* ---- the client's list ---- */

static void add(struct sim *s, int32_t id, bool by_device)
{
    s->by_device[s->held] = by_device;
    s->reply[s->held++] = id;
}

bool reply_receive(struct sim *s, const int32_t *ids, uint32_t count)
{
    uint32_t before = s->held;
    for (uint32_t i = s->confirmed; i < count; i++) {
        if (i < s->held && s->reply[i] != ids[i])
            return false;
        if (i == s->held)
            add(s, ids[i], false);
    }
    if (count <= s->confirmed)
        return true;
    s->confirmed = count;
    if (s->held > before || s->offline) { /* overtaken, or handed back */
        s->handed_back += s->offline;
        run_stop(s);
    }
    return true;
}

void reply_check(const struct sim *s)
{
    for (uint32_t i = 0; i < REPLY; i++) {
        int32_t id = reply_token(s->reply, i);
        if (s->reply[i] != id && !(s->others && s->by_device[i] && s->reply[i] == id + 1))
            fail(s, "a token was lost, doubled, or is nobody's");
    }
}

/* ---- the device's run ---- */

void run_begin(struct sim *s)
{
    s->runs = true;
    s->run_position = 0; /* what was run through some layers only helps nobody */
    s->run_end = 0;
    s->run_us = s->now_us;
}

void run_stop(struct sim *s)
{
    s->runs = s->offline = false;
    s->run_us = NEVER;
}

static bool may_draw(const struct sim *s)
{
    return s->held < REPLY && ((s->offline && !s->up) || s->held - s->confirmed < LEAD);
}

static void draw(struct sim *s)
{
    uint32_t index = s->run_known - s->prompt;
    if (index != s->held)
        fail(s, "a token is drawn in another's place");
    add(s, reply_token(s->reply, index) + (s->others && pick(s, 20) == 0), true);
    s->made++;
    s->made_offline += s->offline;
}

static void work(struct sim *s)
{
    uint64_t cost_us;
    if (s->run_end > s->run_position) {
        s->run_position = s->run_end;
        if (s->run_end == s->run_known)
            draw(s);
    }
    if (!may_draw(s)) {
        s->run_us = NEVER; /* until the cloud has said more */
        return;
    }
    s->run_known = s->prompt + s->held;
    s->run_position = TD_MIN(s->run_position, s->run_known - 1); /* the last one's row is needed */
    s->run_end = TD_MIN(s->run_known, s->run_position + CHUNK);
    cost_us = 1 + (uint64_t)((s->run_end - s->run_position) * LAYERS * s->edge_ns * 1e-3);
    s->run_us = s->now_us + cost_us;
    if (s->run_end - s->run_position == 1)
        estimates_edge_token(&s->estimates, cost_us);
}

void run_step(struct sim *s)
{
    if (s->continues && !s->offline && s->away_us != NEVER && s->now_us >= s->away_us + AWAY_US) {
        s->offline = true;
        if (!s->runs)
            run_begin(s);
    }
    if (s->runs && s->run_us == NEVER && may_draw(s))
        s->run_us = s->now_us;
    while (s->runs && s->run_us <= s->now_us)
        work(s);
}
