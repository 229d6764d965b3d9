/* chat_show: what `tandem chat` says beside a reply: its numbers, the plan behind it, how to go on. */
#include "cli/chat_cmd.h"
#include <ctype.h>

static double member(const json_t *o, const char *name)
{
    return json_number_value(json_object_get(o, name));
}

static double timing(const struct chat *c, const char *name)
{
    return member(c->timings, name);
}

/* "1 token", "2 tokens" */
static const char *counted(double n, const char *what, char out[48])
{
    snprintf(out, 48, "%.0f %s%s", n, what, n == 1 ? "" : "s");
    return out;
}

void chat_print_stats(const struct chat *c)
{
    char prompt[48], reply[48];
    double made = member(c->usage, "completion_tokens");
    fprintf(stderr, "[%s, %.0f cached; ", counted(member(c->usage, "prompt_tokens"), "prompt token", prompt),
            member(json_object_get(c->usage, "prompt_tokens_details"), "cached_tokens"));
    if (timing(c, "first_token_ms") > 0)
        fprintf(stderr, "first token %.0f ms; ", timing(c, "first_token_ms"));
    fprintf(stderr, "%s", counted(made, "token", reply));
    if (timing(c, "tokens_per_s") > 0)
        fprintf(stderr, " at %.1f/s", timing(c, "tokens_per_s"));
    fprintf(stderr, "; uplink %.1f KiB]\n", timing(c, "uplink_bytes") / 1024);
}

/* ---- the plan ----------------------------------------------------------------------------------------------- */

static void print_offline(const json_t *offline)
{
    char tokens[48];
    fprintf(stderr,
            "[the cloud was away: %s from token %.0f on made here; the first was expected in %.0f ms]\n",
            counted(member(offline, "tokens"), "token", tokens), member(offline, "from_token"),
            member(offline, "estimate_ms"));
}

static void print_estimates(const json_t *e)
{
    double alone_ms = member(e, "edge_alone_first_token_ms"); /* 0: it cannot, or is not to */
    fprintf(stderr, "[estimates: first token %.0f ms, 16th %.0f ms (the cloud alone: %.0f, %.0f",
            member(e, "first_token_ms"), member(e, "t16_ms"), member(e, "cloud_alone_first_token_ms"),
            member(e, "cloud_alone_t16_ms"));
    if (alone_ms > 0)
        fprintf(stderr, "; this device alone: %.0f, %.0f", alone_ms, member(e, "edge_alone_t16_ms"));
    fprintf(stderr,
            "); a token and layer %.1f us here, %.1f us there; uplink %.1f Mbit/s, %.1f ms; queue %.0f ms]\n",
            member(e, "edge_layer_us"), member(e, "cloud_layer_us"), member(e, "uplink_mbit"),
            member(e, "delay_ms"), member(e, "queue_ms"));
}

/* Why there are no estimates; "" where that is not known. */
static const char *why_none(const json_t *plan)
{
    static const char *const texts[][2] = {{"given", "; the number of layers was given"},
                                           {"continued", "; the reply was taken up again"},
                                           {"unable", "; this device could have no part in it"}};
    const char *why = json_string_value(json_object_get(plan, "why"));
    for (size_t i = 0; why && i < TD_COUNT(texts); i++)
        if (!strcmp(why, texts[i][0]))
            return texts[i][1];
    return "";
}

static void print_decision(const json_t *plan)
{
    char layers[48], tokens[48];
    const char *codec = json_string_value(json_object_get(plan, "codec")),
               *hidden = json_string_value(json_object_get(plan, "hidden"));
    fprintf(stderr, "[plan: %s here of %s from token %.0f on; KV of %.0f of them sent%s%s%s%s%s]\n",
            counted(member(plan, "layers"), "layer", layers),
            counted(member(plan, "tokens"), "prompt token", tokens), member(plan, "first_token"),
            member(plan, "kv_tokens"), codec ? " in " : "", codec ? codec : "", hidden ? ", rows in " : "",
            hidden ? hidden : "", why_none(plan));
    if (member(plan, "restored_tokens") > 0)
        fprintf(stderr, "[restored: KV of %s that the cloud had lost, as this device held it]\n",
                counted(member(plan, "restored_tokens"), "token", tokens));
    if (json_is_true(json_object_get(plan, "local")))
        fprintf(stderr, "[first tokens here: all layers of the prompt on this device too, until the cloud's "
                        "are sooner]\n");
}

/* A reply that the device has made to its end is whole before the cloud has told its part. */
static void print_computing(const struct chat *c)
{
    char tokens[48];
    bool told = json_object_get(c->timings, "cloud_prefill_ms") != NULL;
    fprintf(stderr, "; computing %.0f ms here", timing(c, "edge_prefill_ms"));
    if (told)
        fprintf(stderr, ", %.0f ms there; ", timing(c, "cloud_prefill_ms"));
    else
        fprintf(stderr, "; what it took there is not told (%s confirmed by the end); ",
                counted(timing(c, "confirmed_tokens"), "token", tokens));
    fprintf(stderr, "%.1f KiB sent; ", timing(c, "uplink_bytes") / 1024);
    if (told)
        fprintf(stderr, "%s recomputed there; ", counted(timing(c, "recomputed_tokens"), "token", tokens));
}

static void print_outcome(const struct chat *c, const json_t *plan)
{
    char plans[48], left[48], made[48];
    fprintf(stderr, "[what happened: ");
    if (timing(c, "first_token_ms") > 0)
        fprintf(stderr, "first token %.0f ms", timing(c, "first_token_ms"));
    else
        fprintf(stderr, "no token");
    if (timing(c, "t16_ms") > 0) /* there was one */
        fprintf(stderr, ", 16th %.0f ms", timing(c, "t16_ms"));
    print_computing(c);
    if (plan)
        fprintf(stderr, "%s, %s left to the cloud under way; ", counted(member(plan, "plans"), "plan", plans),
                counted(member(plan, "left_to_cloud_tokens"), "token", left));
    fprintf(stderr, "%s made here]\n", counted(timing(c, "local_tokens"), "token", made));
}

/* What the device decided, by which estimates, and what came of it. A node that is asked directly plans nothing, nor does a device without a cloud. */
void chat_print_plan(const struct chat *c)
{
    const json_t *offline = json_object_get(c->timings, "offline");
    const json_t *plan = json_object_get(c->timings, "plan"), *e = json_object_get(plan, "estimates");
    if (offline)
        print_offline(offline);
    if (plan)
        print_decision(plan);
    else if (timing(c, "local_tokens") > 0)
        fprintf(stderr, "[no plan was needed: this device did it all, prompt and reply]\n");
    else
        fprintf(stderr, "[no plan: no device had a part in this prompt]\n");
    if (e)
        print_estimates(e);
    if (plan || offline)
        print_outcome(c, plan);
}

/* ---- for programs, and for later ---------------------------------------------------------------------------- */

int chat_print_object(const struct chat *c)
{
    json_t *o = json_pack("{s:s,s:s%,s:s,s:b}", "conversation", c->conversation, "content", c->reply_text,
                          c->reply_size, "finish_reason", c->finish, "conversation_kept", !c->not_kept);
    if (c->usage)
        json_object_set(o, "usage", c->usage);
    if (c->timings)
        json_object_set(o, "timings", c->timings);
    return cli_print_json(o);
}

/* A word as a shell takes it. */
static void print_word(const char *name, const char *word)
{
    bool plain = *word != '\0';
    for (const char *p = word; *p; p++)
        plain = plain && (isalnum((unsigned char)*p) || strchr("-_./:@%+,=[]", *p));
    fprintf(stderr, " --%s ", name);
    if (plain) {
        fputs(word, stderr);
        return;
    }
    fputc('\'', stderr);
    for (const char *p = word; *p; p++)
        fputs(*p == '\'' ? "'\\''" : (char[]){*p, '\0'}, stderr);
    fputc('\'', stderr);
}

void chat_print_resume(const struct chat *c, const char *lead)
{
    const struct cli_server *server = &c->settings->server;
    fprintf(stderr, "%s tandem chat", lead);
    print_word("url", server->url);
    if (server->ca_path[0])
        print_word("ca", server->ca_path);
    if (server->key_file[0])
        print_word("key-file", server->key_file);
    if (c->settings->prefer[0]) /* private is a wish of each request */
        print_word("prefer", c->settings->prefer);
    print_word("conversation", c->conversation[0] ? c->conversation : "ID");
    fputc('\n', stderr);
}
