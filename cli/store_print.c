/* store_print: what `tandem store` shows people. The same objects come from a directory and from a running node. */
#include "cli/store_cmd.h"
#include <stdio.h>

static uint64_t number(json_t *o, const char *name)
{
    return (uint64_t)json_integer_value(json_object_get(o, name));
}

int store_cmd_print_tenants(const struct store_settings *s, json_t *stats)
{
    char size[32], total[32];
    size_t i;
    json_t *t;
    if (s->json)
        return cli_print_json(stats);
    printf("%-24s %10s %12s %12s %10s %10s %10s\n", "tenant", "blocks", "size", "from device", "lossless",
           "L1", "L2");
    json_array_foreach(json_object_get(stats, "tenants"), i, t)
    {
        const char *name = json_string_value(json_object_get(t, "tenant"));
        printf("%-24s %10llu %12s %12llu %10llu %10llu %10llu\n", name ? name : "?",
               (unsigned long long)number(t, "blocks"), cli_bytes(number(t, "bytes"), size),
               (unsigned long long)number(t, "from_device"), (unsigned long long)number(t, "lossless"),
               (unsigned long long)number(t, "l1"), (unsigned long long)number(t, "l2"));
    }
    uint64_t blocks = number(stats, "blocks"), conversations = number(stats, "conversations"),
             segments = number(stats, "segments");
    printf("%llu block%s of 64 tokens, %llu conversation%s, %llu segment%s (%s, of which %s dead)\n",
           (unsigned long long)blocks, TD_S(blocks), (unsigned long long)conversations, TD_S(conversations),
           (unsigned long long)segments, TD_S(segments), cli_bytes(number(stats, "segment_bytes"), total),
           cli_bytes(number(stats, "dead_bytes"), size));
    json_decref(stats);
    return CLI_OK;
}

int store_cmd_print_stats(const struct store_settings *s, json_t *stats)
{
    char size[32];
    const char *name;
    json_t *value;
    if (s->json)
        return cli_print_json(stats);
    json_object_foreach(stats, name, value)
    {
        if (json_is_boolean(value))
            printf("%-16s %s\n", name, json_is_true(value) ? "yes" : "no");
        else if (json_is_integer(value) && strstr(name, "bytes"))
            printf("%-16s %s\n", name, cli_bytes((uint64_t)json_integer_value(value), size));
        else if (json_is_integer(value))
            printf("%-16s %lld\n", name, (long long)json_integer_value(value));
    }
    json_decref(stats);
    return CLI_OK;
}

int store_cmd_print_freed(const struct store_settings *s, json_t *result)
{
    char size[32];
    if (s->json)
        return cli_print_json(result);
    uint64_t blocks = number(result, "blocks");
    if (json_object_get(result, "blocks"))
        printf("%llu block%s let go, ", (unsigned long long)blocks, TD_S(blocks));
    printf("%s freed\n", cli_bytes(number(result, "freed_bytes"), size));
    json_decref(result);
    return CLI_OK;
}
