/* node_erase: a tenant is erased on a running node, on the admin listener's thread. When it returns, nothing of the tenant is stored, and nothing
 * that was under way can bring it back:
 *
 *   1. the loop lets nobody of the tenant in any more, and ends its requests and connections: edges hold names and keys that go with the tenant
 *   2. the workers come to the end of what they were given before: turns that were being saved are saved, and erased with the rest
 *   3. the engine ends what it has of the tenant, and nothing is left on its way to the store (engine_forget.c)
 *   4. the store and its tiers; then what was remembered of its keys and conversations
 *   5. the door is open again: who is still let in begins anew, with new keys. Revoke a tenant's tokens first if that should not be.
 *
 * 1 comes before 2, so that the loop gives the worker nothing more of the tenant behind the barrier; events of the engine that are still on their way
 * to the loop find nobody. Stopping ends the waiting, as the loop and the worker may then have ended: node_erase_stop. */
#include "cloud/node_internal.h"
#include "shared/log.h"
#include <stdio.h>
#include <time.h>

#define WHY      "the data of this tenant has been erased"
#define AGAIN_NS 10000000 /* until a full queue is tried again */

void node_erase_init(struct node *n)
{
    pthread_mutex_init(&n->erase.lock, NULL);
    pthread_cond_init(&n->erase.changed, NULL);
}

void node_erase_deinit(struct node *n)
{
    pthread_cond_destroy(&n->erase.changed);
    pthread_mutex_destroy(&n->erase.lock);
}

void node_erase_stop(struct node *n)
{
    pthread_mutex_lock(&n->erase.lock);
    n->erase.stopping = true;
    pthread_cond_broadcast(&n->erase.changed);
    pthread_mutex_unlock(&n->erase.lock);
}

static bool is_stopping(struct node *n)
{
    pthread_mutex_lock(&n->erase.lock);
    bool stopping = n->erase.stopping;
    pthread_mutex_unlock(&n->erase.lock);
    return stopping;
}

static void answer(struct node *n, int status)
{
    pthread_mutex_lock(&n->erase.lock);
    n->erase.answered = true;
    n->erase.status = status;
    pthread_cond_broadcast(&n->erase.changed);
    pthread_mutex_unlock(&n->erase.lock);
}

/* ---- on the loop and the worker ------------------------------------------------------------------------------- */

static void nothing(struct io_job *job)
{
    (void)job;
}

static void at_barrier(struct io_job *job)
{
    answer((struct node *)((char *)job - offsetof(struct node, erase.barrier)), 0);
}

/* What reads blocks for edges to keep comes to the end of that, too. */
static void at_first_barrier(struct io_job *job)
{
    struct node *n = (struct node *)((char *)job - offsetof(struct node, erase.barrier));
    n->erase.barrier = (struct io_job){.work = nothing, .done = at_barrier};
    int rc = io_worker_submit(n->service.fetcher, &n->erase.barrier);
    if (rc < 0)
        answer(n, rc);
}

static void close_door(void *arg)
{
    struct node *n = arg;
    if (is_stopping(n))
        return;
    memcpy(n->service.erasing, n->erase.tenant, sizeof n->service.erasing);
    edge_server_end_tenant(n->edges, n->erase.tenant, WHY);
    direct_end_tenant(n->direct, n->erase.tenant, WHY);
    n->erase.barrier = (struct io_job){.work = nothing, .done = at_first_barrier};
    int rc = io_worker_submit(n->service.io, &n->erase.barrier);
    if (rc < 0)
        answer(n, rc);
}

static void open_door(void *arg)
{
    struct node *n = arg;
    n->service.erasing[0] = '\0';
    answer(n, 0);
}

/* ---- on the admin listener's thread --------------------------------------------------------------------------- */

/* fn on the loop, and wait for what it, or the barrier, answers. Again while a queue is full or there is no memory: a door must not stay closed. */
static int on_loop(struct node *n, void (*fn)(void *node))
{
    int rc = -TD_ERR_FULL;
    while (rc < 0 && rc != -TD_ERR_CLOSED && !is_stopping(n)) {
        n->erase.answered = false;
        rc = net_loop_post(n->service.loop, fn, n);
        pthread_mutex_lock(&n->erase.lock);
        while (rc == 0 && !n->erase.answered && !n->erase.stopping)
            pthread_cond_wait(&n->erase.changed, &n->erase.lock);
        rc = rc < 0 ? rc : n->erase.answered ? n->erase.status : -TD_ERR_CLOSED;
        pthread_mutex_unlock(&n->erase.lock);
        if (rc < 0)
            nanosleep(&(struct timespec){.tv_nsec = AGAIN_NS}, NULL);
    }
    return rc;
}

static int erase(struct node *n, const char *tenant, struct td_error *err)
{
    int rc = on_loop(n, close_door);
    rc = rc < 0 ? rc : engine_forget(n->engine, tenant);
    if (rc < 0)
        return td_fail(err, rc, "cannot erase a tenant: %s", td_status_text(rc));
    rc = tiers_erase_tenant(n->tiers, tenant, err);
    if (rc < 0)
        return rc;
    tenant_keys_forget(n->service.keys, tenant);
    conv_index_forget_tenant(n->service.conversations, tenant);
    log_info("cloud", "a tenant was erased");
    return 0;
}

int node_erase_tenant(void *node, const char *tenant, struct td_error *err)
{
    struct node *n = node;
    if (!store_has_tenant(n->service.store, tenant))
        return td_fail(err, -TD_ERR_NOTFOUND, "the store has no tenant of this name");
    snprintf(n->erase.tenant, sizeof n->erase.tenant, "%s", tenant);
    int rc = erase(n, tenant, err);
    on_loop(n, open_door);
    return rc;
}
