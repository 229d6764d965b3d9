/* Requests: what is accepted, what is refused and with which field's name. Responses: JSON as the OpenAI API writes it. Text: UTF-8 and
 * stop strings against a naive twin. */
#include "protocol/api_internal.h"
#include "protocol/openai.h"
#include "shared/kv_block.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#define USER "\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]"

static int parse(const char *body, bool chat, struct api_request *out, const char **param)
{
    struct td_error err = {0};
    int code = api_request_parse(body, strlen(body), chat, out, param, &err);
    assert_true((code != 0) == (err.text[0] != 0));
    return code;
}

static struct api_request good(const char *body, bool chat)
{
    struct api_request r;
    const char *param;
    struct td_error err = {0};
    if (api_request_parse(body, strlen(body), chat, &r, &param, &err))
        fail_msg("%s: %s", body, err.text);
    return r;
}

/* ---- what is accepted --------------------------------------------------------------------------------------- */

static void test_defaults(void **state)
{
    (void)state;
    struct api_request r = good("{" USER "}", true);
    assert_string_equal(r.model, "");
    assert_int_equal(r.message_count, 1);
    assert_string_equal(r.messages[0].role, "user");
    assert_true(r.sampling.temperature == 1 && r.sampling.top_p == 1 && r.sampling.min_p == 0);
    assert_true(r.sampling.repetition_penalty == 1 && r.sampling.presence_penalty == 0 &&
                r.sampling.frequency_penalty == 0);
    assert_int_equal(r.sampling.top_k, 0);
    assert_false(r.has_seed || r.sampling.want_logprobs || r.stream || r.include_usage || r.echo_timings);
    assert_int_equal(r.max_tokens, 0);
    assert_int_equal(r.accept, KV_ACCEPT_VISIBLE_LOSSLESS);
    assert_false(r.no_cache || r.ignore_end || r.unserved || r.max_tokens_field);
    assert_null(r.conversation);
    api_request_free(&r);
    r = good("{\"prompt\":\"x\"}", false);
    assert_int_equal(r.max_tokens, 16);
    api_request_free(&r);
}

static void test_all_fields(void **state)
{
    (void)state;
    struct api_request r = good("{\"model\":\"m\",\"temperature\":0,\"top_p\":0.5,\"min_p\":0.125,\"top_k\":"
                                "40,\"repeat_penalty\":1.25,\"repeat_last_n\":128,"
                                "\"presence_penalty\":-2,\"frequency_penalty\":2,\"seed\":-1,\"max_tokens\":"
                                "5,\"max_completion_tokens\":7,\"stop\":[\"a\",\"bc\"],"
                                "\"stream\":true,\"stream_options\":{\"include_usage\":true},\"logprobs\":"
                                "true,\"top_logprobs\":20,\"logit_bias\":{\"3\":-100,\"7\":1.5},"
                                "\"n\":1,\"user\":\"u\",\"conversation\":\"c.1\",\"timings\":true,\"cache\":"
                                "false,\"ignore_eos\":true,\"fidelity\":\"exact\","
                                "\"response_format\":{\"type\":\"text\"},\"tools\":[],\"tool_choice\":"
                                "\"auto\",\"metadata\":{\"any\":[1]}," USER "}",
                                true);
    const struct sampler_params *s = &r.sampling;
    assert_string_equal(r.model, "m");
    assert_true(s->temperature == 0 && s->top_p == 0.5f && s->min_p == 0.125f &&
                s->repetition_penalty == 1.25f);
    assert_true(s->presence_penalty == -2 && s->frequency_penalty == 2);
    assert_int_equal(s->top_k, 40);
    assert_int_equal(s->repetition_window, 128);
    assert_true(r.has_seed && s->seed == UINT64_MAX);
    assert_int_equal(r.max_tokens, 7);
    assert_int_equal(r.stop_count, 2);
    assert_string_equal(r.stops[1], "bc");
    assert_true(r.stream && r.include_usage && s->want_logprobs && r.echo_timings && r.no_cache &&
                r.ignore_end);
    assert_int_equal(s->logprob_count, 20);
    assert_int_equal(s->bias_count, 2);
    assert_int_equal(s->bias[1].id, 7);
    assert_true(s->bias[0].bias == -100 && s->bias[1].bias == 1.5f);
    assert_string_equal(r.user, "u");
    assert_string_equal(r.conversation, "c.1");
    assert_int_equal(r.accept, KV_ACCEPT_EXACT);
    assert_null(r.unserved);
    api_request_free(&r);
}

static void test_null_is_not_given(void **state)
{
    (void)state;
    struct api_request r = good(
        "{\"model\":null,\"temperature\":null,\"max_tokens\":null,\"stop\":null,\"stream\":null,\"stream_"
        "options\":null,"
        "\"logprobs\":null,\"top_logprobs\":null,\"logit_bias\":null,\"n\":null,\"seed\":null,\"tools\":null,"
        "\"response_format\":null,\"user\":null,\"top_p\":null," USER "}",
        true);
    assert_true(r.sampling.temperature == 1);
    assert_false(r.stream || r.has_seed);
    api_request_free(&r);
}

static void test_messages(void **state)
{
    (void)state;
    struct api_request r = good("{\"messages\":[{\"role\":\"developer\",\"content\":\"s\"},{\"role\":"
                                "\"user\",\"content\":[{\"type\":\"text\",\"text\":\"one\"},"
                                "{\"type\":\"text\",\"text\":\"two\"}],\"name\":\"n\"},{\"role\":"
                                "\"assistant\",\"content\":null},{\"role\":\"tool\",\"content\":\"t\"},"
                                "{\"role\":\"user\",\"content\":\"nul \\u0000 \xe2\x82\xac\"}]}",
                                true);
    assert_int_equal(r.message_count, 5);
    assert_string_equal(r.messages[0].role, "system");
    assert_string_equal(r.messages[1].content, "one\ntwo");
    assert_int_equal(r.messages[1].content_size, 7);
    assert_int_equal(r.messages[2].content_size, 0);
    assert_string_equal(r.messages[3].role, "tool");
    assert_int_equal(r.messages[4].content_size, 9);
    assert_memory_equal(r.messages[4].content, "nul \0 \xe2\x82\xac", 9);
    api_request_free(&r);
}

static void test_prompts(void **state)
{
    (void)state;
    struct api_request r = good("{\"prompt\":\"a\\u0000b\"}", false);
    assert_int_equal(r.prompt_size, 3);
    api_request_free(&r);
    r = good("{\"prompt\":[\"only\"],\"logprobs\":0}", false);
    assert_string_equal(r.prompt, "only");
    assert_true(r.sampling.want_logprobs && r.sampling.logprob_count == 0);
    api_request_free(&r);
    r = good("{\"prompt\":[1,2,2147483647]}", false);
    assert_null(r.prompt);
    assert_int_equal(r.prompt_id_count, 3);
    assert_int_equal(r.prompt_ids[2], INT32_MAX);
    api_request_free(&r);
    r = good("{\"prompt\":[[5,6]]}", false);
    assert_int_equal(r.prompt_id_count, 2);
    api_request_free(&r);
    r = good("{\"prompt\":\"\"}", false);
    assert_int_equal(r.prompt_size, 0);
    assert_non_null(r.prompt);
    api_request_free(&r);
}

static void test_tools_and_format_are_seen(void **state)
{
    (void)state;
    static const char *const fields[][2] = {{"tools", "[{}]"},
                                            {"functions", "[{}]"},
                                            {"tool_choice", "\"required\""},
                                            {"tool_choice", "{}"},
                                            {"response_format", "{\"type\":\"json_object\"}"},
                                            {"response_format", "{}"},
                                            {"tools", "7"}};
    for (size_t i = 0; i < TD_COUNT(fields); i++) {
        char body[256];
        snprintf(body, sizeof body, "{\"%s\":%s," USER "}", fields[i][0], fields[i][1]);
        struct api_request r = good(body, true);
        if (!r.unserved || strcmp(r.unserved, fields[i][0]) != 0)
            fail_msg("%s: %s is not seen", fields[i][0], fields[i][1]);
        api_request_free(&r);
    }
}

/* ---- what is refused ---------------------------------------------------------------------------------------- */

struct bad {
    const char *fields, *param;
};

static void refuse_all(const struct bad *cases, size_t count, bool chat, const char *rest)
{
    for (size_t i = 0; i < count; i++) {
        char body[1024];
        struct api_request r;
        const char *param = "?";
        snprintf(body, sizeof body, "{%s%s}", cases[i].fields, rest);
        int code = parse(body, chat, &r, &param);
        if (code == 0 || !param || strcmp(param, cases[i].param) != 0)
            fail_msg("%s: code %d, param %s", body, code, param ? param : "none");
        assert_int_equal(api_http_status(code), 400);
    }
}

static void test_refused_fields(void **state)
{
    (void)state;
    static const struct bad cases[] = {
        {"\"temperature\":2.1", "temperature"},
        {"\"temperature\":-0.1", "temperature"},
        {"\"temperature\":\"1\"", "temperature"},
        {"\"top_p\":1.01", "top_p"},
        {"\"min_p\":true", "min_p"},
        {"\"repeat_penalty\":0", "repeat_penalty"},
        {"\"presence_penalty\":2.5", "presence_penalty"},
        {"\"frequency_penalty\":-2.5", "frequency_penalty"},
        {"\"top_k\":-2", "top_k"},
        {"\"top_k\":1.5", "top_k"},
        {"\"seed\":1.5", "seed"},
        {"\"seed\":\"1\"", "seed"},
        {"\"max_tokens\":0", "max_tokens"},
        {"\"max_tokens\":-5", "max_tokens"},
        {"\"max_tokens\":5.0", "max_tokens"},
        {"\"max_completion_tokens\":0", "max_completion_tokens"},
        {"\"max_tokens\":2147483648", "max_tokens"},
        {"\"n\":2", "n"},
        {"\"n\":0", "n"},
        {"\"stop\":7", "stop"},
        {"\"stop\":\"\"", "stop"},
        {"\"stop\":[\"a\",7]", "stop"},
        {"\"stop\":\"a\\u0000b\"", "stop"},
        {"\"stream\":1", "stream"},
        {"\"stream_options\":{\"include_usage\":true}", "stream_options"},
        {"\"stream\":true,\"stream_options\":7", "stream_options"},
        {"\"stream\":true,\"stream_options\":{\"include_usage\":1}", "stream_options"},
        {"\"logprobs\":5", "logprobs"},
        {"\"top_logprobs\":5", "top_logprobs"},
        {"\"logprobs\":true,\"top_logprobs\":21", "top_logprobs"},
        {"\"logit_bias\":[]", "logit_bias"},
        {"\"logit_bias\":{\"a\":1}", "logit_bias"},
        {"\"logit_bias\":{\"\":1}", "logit_bias"},
        {"\"logit_bias\":{\"-1\":1}", "logit_bias"},
        {"\"logit_bias\":{\"4294967296\":1}", "logit_bias"},
        {"\"logit_bias\":{\"1\":101}", "logit_bias"},
        {"\"logit_bias\":{\"1\":\"1\"}", "logit_bias"},
        {"\"model\":7", "model"},
        {"\"model\":\"a\\u0000\"", "model"},
        {"\"user\":[]", "user"},
        {"\"conversation\":\"\"", "conversation"},
        {"\"conversation\":\"a b\"", "conversation"},
        {"\"conversation\":\"a/b\"", "conversation"},
        {"\"conversation\":\"a\\r\\nX: y\"", "conversation"},
        {"\"conversation\":\"12345678901234567890123456789012345678901234567890123456789012345\"",
         "conversation"},
        {"\"timings\":1", "timings"},
        {"\"cache\":\"no\"", "cache"},
        {"\"ignore_eos\":0", "ignore_eos"},
        {"\"fidelity\":\"best\"", "fidelity"},
        {"\"modalities\":[\"text\",\"audio\"]", "modalities"},
    };
    refuse_all(cases, TD_COUNT(cases), true, "," USER);
}

static void test_refused_messages(void **state)
{
    (void)state;
    static const struct bad cases[] = {
        {"\"messages\":null", "messages"},
        {"\"messages\":[]", "messages"},
        {"\"messages\":\"x\"", "messages"},
        {"\"messages\":[7]", "messages"},
        {"\"messages\":[{}]", "messages"},
        {"\"messages\":[{\"role\":\"user\"}]", "messages"},
        {"\"messages\":[{\"role\":\"robot\",\"content\":\"x\"}]", "messages"},
        {"\"messages\":[{\"role\":\"user\",\"content\":7}]", "messages"},
        {"\"messages\":[{\"role\":\"user\",\"content\":null}]", "messages"},
        {"\"messages\":[{\"role\":\"user\",\"content\":[]}]", "messages"},
        {"\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{}}]}]",
         "messages"},
        {"\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]", "messages"},
        {"\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{}]}]", "messages"},
    };
    refuse_all(cases, TD_COUNT(cases), true, "");
    static const struct bad prompts[] = {
        {"\"model\":\"m\"", "prompt"},
        {"\"prompt\":[]", "prompt"},
        {"\"prompt\":7", "prompt"},
        {"\"prompt\":[\"a\",\"b\"]", "prompt"},
        {"\"prompt\":[[1],[2]]", "prompt"},
        {"\"prompt\":[1,\"a\"]", "prompt"},
        {"\"prompt\":[-1]", "prompt"},
        {"\"prompt\":[2147483648]", "prompt"},
        {"\"prompt\":[[]]", "prompt"},
        {"\"prompt\":\"x\",\"echo\":true", "echo"},
        {"\"prompt\":\"x\",\"suffix\":\"y\"", "suffix"},
        {"\"prompt\":\"x\",\"best_of\":2", "best_of"},
        {"\"prompt\":\"x\",\"logprobs\":21", "logprobs"},
        {"\"prompt\":\"x\",\"logprobs\":true", "logprobs"},
    };
    refuse_all(prompts, TD_COUNT(prompts), false, "");
}

static void test_bodies_that_are_no_json(void **state)
{
    (void)state;
    static const char *const bodies[] = {"",
                                         " ",
                                         "{",
                                         "null",
                                         "7",
                                         "[]",
                                         "\"x\"",
                                         "{\"a\":1}}",
                                         "{'a':1}",
                                         "{\"a\":\"\xff\"}",
                                         "{\"a\":\"\\ud800\"}",
                                         "{\"a\":NaN}",
                                         "{\"a\":99999999999999999999}",
                                         "{\"secret-word\" 1}"};
    for (size_t i = 0; i < TD_COUNT(bodies); i++) {
        struct api_request r;
        const char *param;
        struct td_error err = {0};
        assert_int_equal(api_request_parse(bodies[i], strlen(bodies[i]), true, &r, &param, &err),
                         -TD_ERR_FORMAT);
        assert_null(param);
        assert_null(strstr(err.text, "secret-word")); /* messages may be logged */
    }
}

static void test_limits(void **state)
{
    (void)state;
    struct api_request r;
    const char *param;
    char *body = malloc(16u << 20);
    /* nesting */
    for (unsigned depth = LIMIT_JSON_DEPTH; depth <= LIMIT_JSON_DEPTH + 1; depth++) {
        size_t n = (size_t)sprintf(body, "{" USER ",\"x\":");
        memset(body + n, '[', depth - 1); /* the body's own brace is one */
        memset(body + n + depth - 1, ']', depth - 1);
        strcpy(body + n + 2 * (depth - 1), "}");
        assert_int_equal(parse(body, true, &r, &param), depth > LIMIT_JSON_DEPTH ? -TD_ERR_LIMIT : 0);
        api_request_free(&r);
    }
    /* containers: {, [, {, then many more; brackets in strings do not count */
    for (unsigned more = 0; more <= 1; more++) {
        size_t n = (size_t)sprintf(body, "{" USER ",\"s\":\"[[{{\\\"[[\",\"x\":[");
        for (unsigned i = 0; i < LIMIT_JSON_CONTAINERS - 4 + more; i++)
            n += (size_t)sprintf(body + n, "%s[]", i ? "," : "");
        strcpy(body + n, "]}");
        assert_int_equal(parse(body, true, &r, &param), more ? -TD_ERR_LIMIT : 0);
        api_request_free(&r);
    }
    /* messages */
    for (unsigned more = 0; more <= 1; more++) {
        size_t n = (size_t)sprintf(body, "{\"messages\":[");
        for (unsigned i = 0; i < LIMIT_API_MESSAGES + more; i++)
            n += (size_t)sprintf(body + n, "%s{\"role\":\"user\",\"content\":\"\"}", i ? "," : "");
        strcpy(body + n, "]}");
        assert_int_equal(parse(body, true, &r, &param), more ? -TD_ERR_LIMIT : 0);
        api_request_free(&r);
    }
    /* token ids */
    for (unsigned more = 0; more <= 1; more++) {
        size_t n = (size_t)sprintf(body, "{\"prompt\":[");
        for (unsigned i = 0; i < LIMIT_PROMPT_TOKENS + more; i++)
            n += (size_t)sprintf(body + n, "%s", i ? ",1" : "1");
        strcpy(body + n, "]}");
        assert_int_equal(parse(body, false, &r, &param), more ? -TD_ERR_LIMIT : 0);
        api_request_free(&r);
    }
    free(body);
}

static void test_stop_limits(void **state)
{
    (void)state;
    struct api_request r;
    const char *param;
    char body[8192], stop[LIMIT_API_STOP_SIZE + 2];
    for (unsigned more = 0; more <= 1; more++) {
        memset(stop, 's', sizeof stop);
        stop[LIMIT_API_STOP_SIZE + more] = '\0';
        snprintf(body, sizeof body, "{\"stop\":\"%s\"," USER "}", stop);
        assert_int_equal(parse(body, true, &r, &param), more ? -TD_ERR_ARG : 0);
        api_request_free(&r);
        size_t n = (size_t)sprintf(body, "{" USER ",\"stop\":[");
        for (unsigned i = 0; i < LIMIT_API_STOPS + more; i++)
            n += (size_t)sprintf(body + n, "%s\"s\"", i ? "," : "");
        strcpy(body + n, "]}");
        assert_int_equal(parse(body, true, &r, &param), more ? -TD_ERR_ARG : 0);
        api_request_free(&r);
        n = (size_t)sprintf(body, "{" USER ",\"logit_bias\":{");
        for (unsigned i = 0; i < 300 + more; i++)
            n += (size_t)sprintf(body + n, "%s\"%u\":1", i ? "," : "", i);
        strcpy(body + n, "}}");
        assert_int_equal(parse(body, true, &r, &param), more ? -TD_ERR_ARG : 0);
        api_request_free(&r);
    }
}

/* ---- responses ---------------------------------------------------------------------------------------------- */

static const struct api_reply chat_reply = {
    .chat = true, .id = "chatcmpl-1", .model = "m", .created_s = 1700000000};
static const struct api_reply text_reply = {
    .id = "cmpl-1", .model = "m", .created_s = 1700000000, .text_offset = 5};

static void assert_json(char *json, const char *expected)
{
    assert_non_null(json);
    assert_string_equal(json, expected);
    free(json);
}

static void test_response_json(void **state)
{
    (void)state;
    struct api_usage usage = {7, 3, 5};
    assert_json(api_json_response(&chat_reply, "a\"\n\xe2\x82\xac", 6, "stop", &usage, NULL, NULL, 0),
                "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":"
                "\"m\",\"system_fingerprint\":null,"
                "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
                "\"a\\\"\\n\xe2\x82\xac\",\"refusal\":null},"
                "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":7,\"completion_"
                "tokens\":3,\"total_tokens\":10,"
                "\"prompt_tokens_details\":{\"cached_tokens\":5}}}");
    assert_json(
        api_json_response(&text_reply, "", 0, "length", &usage, NULL, NULL, 0),
        "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"m\",\"system_"
        "fingerprint\":null,"
        "\"choices\":[{\"text\":\"\",\"index\":0,\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{"
        "\"prompt_tokens\":7,"
        "\"completion_tokens\":3,\"total_tokens\":10,\"prompt_tokens_details\":{\"cached_tokens\":5}}}");
    assert_null(
        api_json_response(&chat_reply, "\xff", 1, "stop", &usage, NULL, NULL, 0)); /* never broken JSON */
}

static void assert_plan_json(const struct api_plan *plan, const char *expected)
{
    struct api_timings timings = {.plan = *plan};
    char *json = api_json_response(&text_reply, "", 0, "stop", &(struct api_usage){0}, &timings, NULL, 0);
    const char *shown = json ? strstr(json, "\"plan\":") : NULL;
    assert_non_null(shown);
    assert_memory_equal(shown, expected, strlen(expected));
    free(json);
}

/* The cloud's part is left out where it was not told; how far it was is there then. */
static void test_cloud_part_json(void **state)
{
    (void)state;
    static const char *const parts[] = {
        "\"cloud_prefill_ms\":3.5",   "\"queue_ms\":",           "\"load_ms\":",
        "\"cloud_prefill_tokens\":0", "\"recomputed_tokens\":2", "\"confirmed_tokens\":56"};
    for (int told = 0; told < 2; told++) {
        struct api_timings timings = {
            .cloud_told = told, .cloud_prefill_ms = 3.5, .recomputed_tokens = 2, .confirmed_tokens = 56};
        char *json = api_json_response(&text_reply, "", 0, "stop", &(struct api_usage){0}, &timings, NULL, 0);
        assert_non_null(json);
        for (size_t i = 0; i < TD_COUNT(parts); i++)
            assert_int_equal(strstr(json, parts[i]) != NULL, i + 1 < TD_COUNT(parts) ? told : !told);
        free(json);
    }
}

/* What is not there is not shown: forms of what is not sent, estimates where none were made, else why there are none. */
static void test_plan_json(void **state)
{
    (void)state;
    assert_plan_json(
        &(struct api_plan){.plan_count = 1,
                           .why = "given",
                           .layers = 8,
                           .token_count = 70,
                           .kv_tokens = 64,
                           .codec = "l1",
                           .hidden_dtype = "f16"},
        "\"plan\":{\"layers\":8,\"first_token\":0,\"tokens\":70,\"kv_tokens\":64,\"restored_tokens\":0,"
        "\"plans\":1,"
        "\"left_to_cloud_tokens\":0,\"local\":false,\"codec\":\"l1\",\"hidden\":\"f16\",\"why\":\"given\"}}");
    assert_plan_json(
        &(struct api_plan){.plan_count = 2, .chosen = true, .local = true, .token_count = 70},
        "\"plan\":{\"layers\":0,\"first_token\":0,\"tokens\":70,\"kv_tokens\":0,\"restored_tokens\":0,"
        "\"plans\":2,\"left_to_cloud_tokens\":0,\"local\":true,\"estimates\":{");
}

#define CHUNK                                                                                                \
    "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"m\","    \
    "\"system_fingerprint\":null,"

static void test_chunk_json(void **state)
{
    (void)state;
    struct api_usage usage = {7, 3, 0};
    assert_json(api_json_chunk(&chat_reply, true, NULL, 0, NULL, NULL, 0, true),
                CHUNK "\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\","
                      "\"refusal\":null},\"logprobs\":null,"
                      "\"finish_reason\":null}],\"usage\":null}");
    assert_json(api_json_chunk(&chat_reply, false, "hi", 2, NULL, NULL, 0, false),
                CHUNK "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"},\"logprobs\":null,\"finish_"
                      "reason\":null}]}");
    assert_json(api_json_chunk(&chat_reply, false, NULL, 0, "stop", NULL, 0, false), CHUNK
                "\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]}");
    assert_json(api_json_usage_chunk(&chat_reply, &usage, NULL), CHUNK
                "\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\"total_tokens\":10,"
                "\"prompt_tokens_details\":{\"cached_tokens\":0}}}");
    struct api_reply with = chat_reply;
    with.conversation = "c";
    assert_json(api_json_chunk(&with, false, "x", 1, NULL, NULL, 0, false),
                CHUNK "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"},\"logprobs\":null,\"finish_"
                      "reason\":null}],\"conversation\":\"c\"}");
}

static void test_logprobs_json(void **state)
{
    (void)state;
    struct api_token_logprob tokens[2] = {{.text = "hi", .size = 2, .logprob = -0.5f, .top_count = 1},
                                          {.text = "\xf0\x9f", .size = 2, .logprob = -INFINITY}};
    tokens[0].top[0].text = "ho", tokens[0].top[0].size = 2, tokens[0].top[0].logprob = -1.25f;
    assert_json(
        api_json_chunk(&chat_reply, false, "hi", 2, NULL, tokens, 2, false), CHUNK
        "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"},\"logprobs\":{\"content\":[{\"token\":"
        "\"hi\",\"logprob\":-0.5,"
        "\"bytes\":[104,105],\"top_logprobs\":[{\"token\":\"ho\",\"logprob\":-1.25,\"bytes\":[104,111]}]},"
        "{\"token\":\"\xef\xbf\xbd\",\"logprob\":-9999.0,\"bytes\":[240,159],\"top_logprobs\":[]}],"
        "\"refusal\":null},"
        "\"finish_reason\":null}]}");
    assert_json(api_json_chunk(&text_reply, false, "hi", 2, NULL, tokens, 2, false),
                "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"m\","
                "\"system_fingerprint\":null,"
                "\"choices\":[{\"text\":\"hi\",\"index\":0,\"logprobs\":{\"tokens\":[\"hi\",\"bytes:"
                "\\\\xf0\\\\x9f\"],"
                "\"token_logprobs\":[-0.5,-9999.0],\"top_logprobs\":[{\"ho\":-1.25},{}],\"text_offset\":[5,7]"
                "},\"finish_reason\":null}]}");
}

static void test_error_json(void **state)
{
    (void)state;
    assert_json(api_json_error(400, "no \xff good", "stop", NULL),
                "{\"error\":{\"message\":\"no \xef\xbf\xbd "
                "good\",\"type\":\"invalid_request_error\",\"param\":\"stop\",\"code\":null}}");
    assert_json(api_json_error(503, "later", NULL, "overloaded"),
                "{\"error\":{\"message\":\"later\",\"type\":\"server_error\",\"param\":null,\"code\":"
                "\"overloaded\"}}");
    char *json = api_json_context_error("max_tokens", 2048, 3000, 1000);
    assert_non_null(strstr(json, "\"code\":\"context_length_exceeded\""));
    assert_non_null(strstr(
        json,
        "2048 tokens. However, you requested 3000 tokens (1000 in the prompt, 2000 in the completion)"));
    free(json);
    json = api_json_context_error("messages", 2048, 3000, 3000);
    assert_non_null(strstr(json, "your prompt has 3000 tokens"));
    free(json);
    const char *const ids[] = {"m"};
    assert_json(api_json_models(ids, 1, 1700000000),
                "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":1700000000,"
                "\"owned_by\":\"tandem\"}]}");
    assert_int_equal(api_http_status(-TD_ERR_CONTEXT), 400);
    assert_int_equal(api_http_status(-TD_ERR_AUTH), 401);
    assert_int_equal(api_http_status(-TD_ERR_NOTFOUND), 404);
    assert_int_equal(api_http_status(-TD_ERR_CONFLICT), 409);
    assert_int_equal(api_http_status(-TD_ERR_FULL), 429);
    assert_int_equal(api_http_status(-TD_ERR_INTERNAL), 500);
    assert_int_equal(api_http_status(-TD_ERR_CLOSED), 503);
}

/* ---- text -------------------------------------------------------------------------------------------------- */

static void test_utf8_repair(void **state)
{
    (void)state;
    /* From the table of the Unicode standard on maximal subparts (chapter 3, U+FFFD substitution), and the borders of each length. */
    static const struct {
        const char *bytes, *expected;
    } cases[] = {
        {"a\xf1\x80\x80\xe1\x80\xc2"
         "b\x80"
         "c\x80\xbf"
         "d",
         "a\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
         "b\xef\xbf\xbd"
         "c\xef\xbf\xbd\xef\xbf\xbd"
         "d"},
        {"\xc0\xaf\xe0\x80\xbf", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xf4\x91\x92\x93", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
        {"\xc2\x80\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf\xf0\x90\x80\x80\xf4\x8f\xbf\xbf",
         "\xc2\x80\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf\xf0\x90\x80\x80\xf4\x8f\xbf\xbf"},
        {"\xf0\x9f\x98", "\xef\xbf\xbd"},
        {"", ""},
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        size_t size;
        char *text = api_utf8_repair(cases[i].bytes, strlen(cases[i].bytes), &size);
        assert_string_equal(text, cases[i].expected);
        assert_int_equal(size, strlen(cases[i].expected));
        free(text);
    }
}

/* The twin: the whole text at once, cut before the stop string that ends first. */
static char *naive(const char *bytes, size_t size, char *const *stops, size_t stop_count)
{
    size_t whole;
    char *text = api_utf8_repair(bytes, size, &whole);
    for (size_t end = 1; end <= whole; end++) {
        size_t longest = 0;
        for (size_t i = 0; i < stop_count; i++) {
            size_t n = strlen(stops[i]);
            if (n <= end && memcmp(text + end - n, stops[i], n) == 0)
                longest = TD_MAX(longest, n);
        }
        if (longest) {
            text[end - longest] = '\0';
            return text;
        }
    }
    return text;
}

static uint32_t next_random(uint32_t *x)
{
    *x ^= *x << 13, *x ^= *x >> 17, *x ^= *x << 5;
    return *x;
}

static void test_text_stream_against_naive(void **state)
{
    (void)state;
    static const char *const alphabet[] = {"a",    "b",    "c",   "\xe2\x82\xac", "\xf0\x9f\x98\x80",
                                           "\xe2", "\x82", "\xff"};
    uint32_t seed = 12345;
    for (int round = 0; round < 4000; round++) {
        char bytes[128] = "", stop_texts[3][16] = {"", "", ""};
        char *stops[3] = {stop_texts[0], stop_texts[1], stop_texts[2]};
        size_t stop_count = next_random(&seed) % 4, size, at = 0;
        for (unsigned i = next_random(&seed) % 24; i > 0; i--)
            strcat(bytes, alphabet[next_random(&seed) % TD_COUNT(alphabet)]);
        for (size_t s = 0; s < stop_count; s++)
            for (unsigned i = 1 + next_random(&seed) % 3; i > 0; i--)
                strcat(stops[s], alphabet[next_random(&seed) % 4]);
        size = strlen(bytes);
        struct api_text_stream t;
        struct api_text out = {0};
        api_text_stream_init(&t, stops, stop_count, false);
        while (at < size) { /* pieces of any size */
            size_t piece = TD_MIN(size - at, 1 + next_random(&seed) % 5);
            assert_int_equal(api_text_stream_feed(&t, bytes + at, piece, false, &out), 0);
            at += piece;
            size_t repaired;
            char *shown = api_utf8_repair(out.data ? out.data : "", out.size, &repaired);
            assert_int_equal(repaired, out.size); /* whole characters at every moment */
            free(shown);
        }
        assert_int_equal(api_text_stream_feed(&t, NULL, 0, true, &out), 0);
        char *expected = naive(bytes, size, stops, stop_count);
        assert_string_equal(out.data ? out.data : "", expected);
        free(expected);
        api_text_free(&out);
        api_text_stream_deinit(&t);
    }
}

static void test_text_is_not_held_longer_than_needed(void **state)
{
    (void)state;
    char *stops[] = {(char[]){"stop"}};
    struct api_text_stream t;
    struct api_text out = {0};
    api_text_stream_init(&t, stops, 1, true);
    api_text_stream_feed(&t, " a s", 4, false, &out); /* the first space is the tokenizer's */
    assert_string_equal(out.data, "a ");
    api_text_stream_feed(&t, "tx", 2, false, &out);
    assert_string_equal(out.data, "a stx");
    api_text_stream_feed(&t, " y", 2, false, &out); /* a later one is not */
    assert_string_equal(out.data, "a stx y");
    api_text_stream_feed(&t, "stopper", 7, false, &out);
    assert_string_equal(out.data, "a stx y");
    assert_true(t.stopped);
    api_text_free(&out);
    api_text_stream_deinit(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_all_fields),
        cmocka_unit_test(test_null_is_not_given),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_tools_and_format_are_seen),
        cmocka_unit_test(test_refused_fields),
        cmocka_unit_test(test_refused_messages),
        cmocka_unit_test(test_bodies_that_are_no_json),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_stop_limits),
        cmocka_unit_test(test_response_json),
        cmocka_unit_test(test_cloud_part_json),
        cmocka_unit_test(test_plan_json),
        cmocka_unit_test(test_chunk_json),
        cmocka_unit_test(test_logprobs_json),
        cmocka_unit_test(test_error_json),
        cmocka_unit_test(test_utf8_repair),
        cmocka_unit_test(test_text_stream_against_naive),
        cmocka_unit_test(test_text_is_not_held_longer_than_needed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
