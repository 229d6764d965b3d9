/* operator: see operator.h. */
#include "store/operator.h"
#include "store/keys.h"
#include <stdlib.h>
#include <string.h>

void operator_token(const uint8_t master[CRYPTO_KEY_SIZE], char out[OPERATOR_TOKEN_SIZE + 1])
{
    static const char label[] = "tandem-admin";
    uint8_t token[CRYPTO_KEY_SIZE];
    hkdf_sha256(master, NULL, 0, label, sizeof label - 1, token);
    hex_encode(token, sizeof token, out);
    crypto_wipe(token, sizeof token);
}

/* ---- counts ------------------------------------------------------------------------------------------------ */

static int tenant_json(void *tenants, const char *tenant, const struct store_tenant_stats *n)
{
    return json_array_append_new(
        tenants, json_pack("{s:s,s:I,s:I,s:I,s:I,s:I,s:I}", "tenant", tenant, "blocks", (json_int_t)n->blocks,
                           "bytes", (json_int_t)n->size, "from_device", (json_int_t)n->from_device,
                           "lossless", (json_int_t)n->by_level[KV_L0], "l1", (json_int_t)n->by_level[KV_L1],
                           "l2", (json_int_t)n->by_level[KV_L2]));
}

/* NULL if it is not whole. */
static json_t *tenants_json(struct store *s)
{
    json_t *tenants = json_array();
    if (store_each_tenant(s, tenant_json, tenants) == 0)
        return tenants;
    json_decref(tenants);
    return NULL;
}

json_t *operator_stats(struct store *s)
{
    struct store_stats n;
    store_stats(s, &n);
    json_t *tenants = tenants_json(s);
    if (!tenants)
        return NULL;
    const struct {
        const char *name;
        uint64_t value;
    } counts[] = {{"blocks", n.blocks},
                  {"block_bytes", n.block_bytes},
                  {"conversations", n.conversations},
                  {"pins", store_pin_count(s)},
                  {"segments", n.segments},
                  {"segment_bytes", n.segment_bytes},
                  {"dead_bytes", n.dead_bytes},
                  {"limit_bytes", n.limit_bytes},
                  {"queue_bytes", n.queue_bytes},
                  {"policy_bytes", n.policy_bytes},
                  {"hits", n.hits},
                  {"misses", n.misses},
                  {"evictions", n.evictions},
                  {"demotions", n.demotions},
                  {"demoted_bytes", n.demoted_bytes},
                  {"puts", n.puts},
                  {"put_failures", n.put_failures},
                  {"reads", n.reads},
                  {"read_failures", n.read_failures},
                  {"damaged", n.damaged},
                  {"bytes_written", n.bytes_written},
                  {"bytes_read", n.bytes_read},
                  {"fsyncs", n.fsyncs}};
    json_t *root = json_object();
    for (size_t i = 0; i < TD_COUNT(counts); i++)
        json_object_set_new(root, counts[i].name, json_integer((json_int_t)counts[i].value));
    if (n.limit_bytes == UINT64_MAX)
        json_object_set_new(root, "limit_bytes", json_null());
    json_object_set_new(root, "writes_off", json_boolean(n.writes_off));
    json_object_set_new(root, "disk_answers", json_boolean(!n.silent));
    json_object_set_new(root, "tenants", tenants);
    return root;
}

/* ---- pins -------------------------------------------------------------------------------------------------- */

static int pin_conversation(struct store *s, const char *tenant, const char *principal, const char *name,
                            bool pinned, struct td_error *err)
{
    uint64_t version;
    uint8_t *body;
    size_t size;
    int rc = store_conv_get(s, tenant, principal, name, &version, &body, &size);
    if (rc < 0)
        return td_fail(err, rc, "cannot pin: %s",
                       rc == -TD_ERR_NOTFOUND ? "this principal has no such conversation"
                                              : td_status_text(rc));
    crypto_wipe(body, size);
    free(body);
    return store_conv_pin(s, tenant, principal, name, pinned, err);
}

int operator_pin(struct store *s, json_t *request, struct td_error *err)
{
    const char *tenant = json_string_value(json_object_get(request, "tenant")),
               *principal = json_string_value(json_object_get(request, "principal")),
               *conversation = json_string_value(json_object_get(request, "conversation")),
               *block = json_string_value(json_object_get(request, "block"));
    json_t *pinned = json_object_get(request, "pinned");
    struct kv_block_id id;
    if (!tenant || !keys_name_is_valid(tenant) || !json_is_boolean(pinned))
        return td_fail(err, -TD_ERR_ARG, "cannot pin: 'tenant' and 'pinned' (true or false) are needed");
    if (principal && conversation && !block)
        return pin_conversation(s, tenant, principal, conversation, json_is_true(pinned), err);
    if (!block || strlen(block) != 2 * sizeof id.bytes || hex_decode(block, id.bytes, sizeof id.bytes) < 0)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot pin: name a 'principal' with a 'conversation', or a 'block' (64 hex digits)");
    return store_pin(s, tenant, &id, json_is_true(pinned), err);
}
