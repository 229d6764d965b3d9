/* node_erase: a tenant is erased on a running node. The order: what the engine has of it ends and nothing is left on its way to the store; then the store
 * and its tiers; then what was remembered of its keys and conversations, so that whoever comes next under that name finds new ones. A tenant that
 * is still let in can begin anew at once: revoke its tokens first, which also closes its connections. */
#include "cloud/node_internal.h"

int node_erase_tenant(void *node, const char *tenant, struct td_error *err)
{
    struct node *n = node;
    if (!store_has_tenant(n->service.store, tenant))
        return td_fail(err, -TD_ERR_NOTFOUND, "the store has no tenant of this name");
    int rc = engine_forget(n->engine, tenant);
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
