/* openai_parse: the body of a chat or text completion request, from hostile JSON to struct api_request.
 *
 * Rules: unknown fields are ignored, null means "not given", and a known field of a wrong type or out of
 * range refuses the request with the field's name and what it may be. No message quotes what the client
 * wrote: messages may end in a log.
 *
 * jansson spends up to 250 bytes on a two-byte value, so the text is first scanned for how many containers
 * and values it holds and how deep they nest (api_json_check); what passes costs a bounded multiple of the
 * body's size. */
#include "protocol/openai.h"
#include "protocol/api_internal.h"
#include "shared/conversation_id.h"
#include "shared/kv_block.h"
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct parse {
    json_t *root;
    struct api_request *out;
    const char **param;
    struct td_error *err;
};

static int refuse(struct parse *p, int code, const char *param, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int refuse(struct parse *p, int code, const char *param, const char *format, ...)
{
    char text[TD_ERROR_TEXT_SIZE];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    *p->param = param;
    return td_fail(p->err, code, "%s", text);
}

static int no_memory(struct parse *p)
{
    return refuse(p, -TD_ERR_NOMEM, NULL, "not enough memory for the request");
}

/* A field that is there and not null. */
static json_t *field(const struct parse *p, const char *name)
{
    json_t *v = json_object_get(p->root, name);
    return v && !json_is_null(v) ? v : NULL;
}

/* ---- scalars ---- */

struct number_field {
    const char *name;
    double min, max;
    size_t offset; /* of a float in struct sampler_params */
};

static const struct number_field number_fields[] = {
    {"temperature", 0, 2, offsetof(struct sampler_params, temperature)},
    {"top_p", 0, 1, offsetof(struct sampler_params, top_p)},
    {"min_p", 0, 1, offsetof(struct sampler_params, min_p)},
    {"repeat_penalty", 0.01, 10, offsetof(struct sampler_params, repetition_penalty)},
    {"repetition_penalty", 0.01, 10, offsetof(struct sampler_params, repetition_penalty)},
    {"presence_penalty", -2, 2, offsetof(struct sampler_params, presence_penalty)},
    {"frequency_penalty", -2, 2, offsetof(struct sampler_params, frequency_penalty)},
};

static int parse_numbers(struct parse *p)
{
    for (size_t i = 0; i < TD_COUNT(number_fields); i++) {
        const struct number_field *f = &number_fields[i];
        const json_t *v = field(p, f->name);
        if (!v)
            continue;
        double x = json_is_number(v) ? json_number_value(v) : NAN;
        if (!(x >= f->min && x <= f->max))
            return refuse(p, -TD_ERR_ARG, f->name, "'%s' must be a number from %g to %g", f->name, f->min,
                          f->max);
        float value = (float)x;
        memcpy((char *)&p->out->sampling + f->offset, &value, sizeof value);
    }
    return 0;
}

/* 1: *out is set; 0: not given; negative: refused. */
static int get_integer(struct parse *p, const char *name, int64_t min, int64_t max, int64_t *out)
{
    const json_t *v = field(p, name);
    if (!v)
        return 0;
    json_int_t x = json_integer_value(v);
    if (!json_is_integer(v) || x < min || x > max)
        return refuse(p, -TD_ERR_ARG, name, "'%s' must be a whole number from %lld to %lld", name,
                      (long long)min, (long long)max);
    *out = x;
    return 1;
}

static int get_bool(struct parse *p, const char *name, bool *out)
{
    const json_t *v = field(p, name);
    if (!v)
        return 0;
    if (!json_is_boolean(v))
        return refuse(p, -TD_ERR_ARG, name, "'%s' must be true or false", name);
    *out = json_is_true(v);
    return 1;
}

/* A string without NUL, at most `max` bytes, copied. */
static int get_string(struct parse *p, const char *name, size_t max, char **out)
{
    const json_t *v = field(p, name);
    if (!v)
        return 0;
    size_t size = json_string_length(v);
    if (!json_is_string(v) || size > max || memchr(json_string_value(v), 0, size))
        return refuse(p, -TD_ERR_ARG, name, "'%s' must be a string of at most %zu bytes", name, max);
    *out = strdup(json_string_value(v));
    return *out ? 1 : no_memory(p);
}

static int parse_integers(struct parse *p)
{
    struct api_request *r = p->out;
    int64_t x;
    int code;
    if ((code = get_integer(p, "top_k", -1, INT32_MAX, &x)) < 0)
        return code;
    if (code)
        r->sampling.top_k = x < 0 ? 0 : (int32_t)x;
    if ((code = get_integer(p, "repeat_last_n", -1, INT32_MAX, &x)) < 0)
        return code;
    if (code)
        r->sampling.repetition_window = x < 0 ? INT32_MAX : (int32_t)x;
    if ((code = get_integer(p, "seed", INT64_MIN, INT64_MAX, &x)) < 0)
        return code;
    if (code)
        r->sampling.seed = (uint64_t)x, r->has_seed = true;
    r->max_tokens = r->chat ? 0 : 16;
    static const char *const limits[] = {"max_tokens", "max_completion_tokens"}; /* the later one wins */
    for (size_t i = 0; i < TD_COUNT(limits); i++) {
        if ((code = get_integer(p, limits[i], 1, INT32_MAX, &x)) < 0)
            return code;
        if (code)
            r->max_tokens = (uint32_t)x, r->max_tokens_field = limits[i];
    }
    static const char *const choices[] = {"n", "best_of"};
    for (size_t i = 0; i < TD_COUNT(choices); i++)
        if ((code = get_integer(p, choices[i], 1, LIMIT_API_CHOICES, &x)) < 0)
            return refuse(p, -TD_ERR_UNSUPPORTED, choices[i],
                          "'%s' must be 1: one reply a request is supported", choices[i]);
    return 0;
}

/* ---- stream, extensions ---- */

static int parse_stream(struct parse *p)
{
    struct api_request *r = p->out;
    int code = get_bool(p, "stream", &r->stream);
    if (code < 0)
        return code;
    json_t *options = field(p, "stream_options");
    if (!options)
        return 0;
    if (!json_is_object(options))
        return refuse(p, -TD_ERR_ARG, "stream_options", "'stream_options' must be an object");
    if (!r->stream)
        return refuse(p, -TD_ERR_ARG, "stream_options",
                      "'stream_options' is allowed only with \"stream\": true");
    const json_t *usage = json_object_get(options, "include_usage");
    if (usage && !json_is_null(usage) && !json_is_boolean(usage))
        return refuse(p, -TD_ERR_ARG, "stream_options",
                      "'stream_options.include_usage' must be true or false");
    r->include_usage = json_is_true(usage);
    return 0;
}

static int parse_fidelity(struct parse *p)
{
    static const struct {
        const char *name;
        enum kv_accept accept;
    } levels[] = {
        {"exact", KV_ACCEPT_EXACT}, {"visible-lossless", KV_ACCEPT_VISIBLE_LOSSLESS}, {"any", KV_ACCEPT_ANY}};
    p->out->accept = KV_ACCEPT_VISIBLE_LOSSLESS;
    const json_t *v = field(p, "fidelity");
    if (!v)
        return 0;
    for (size_t i = 0; i < TD_COUNT(levels); i++)
        if (json_is_string(v) && strcmp(json_string_value(v), levels[i].name) == 0) {
            p->out->accept = levels[i].accept;
            p->out->has_accept = true;
            return 0;
        }
    return refuse(p, -TD_ERR_ARG, "fidelity",
                  "'fidelity' must be \"exact\", \"visible-lossless\" or \"any\"");
}

static int parse_prefer(struct parse *p)
{
    static const char *const names[] = {[API_PREFER_LATENCY] = "latency",
                                        [API_PREFER_CLOUD_COST] = "cloud-cost",
                                        [API_PREFER_PRIVATE] = "private"};
    const json_t *v = field(p, "prefer");
    p->out->prefer = API_PREFER_NONE;
    if (!v)
        return 0;
    for (size_t i = API_PREFER_LATENCY; i < TD_COUNT(names); i++)
        if (json_is_string(v) && strcmp(json_string_value(v), names[i]) == 0) {
            p->out->prefer = (enum api_prefer)i;
            return 0;
        }
    return refuse(p, -TD_ERR_ARG, "prefer", "'prefer' must be \"latency\", \"cloud-cost\" or \"private\"");
}

static int parse_extensions(struct parse *p)
{
    struct api_request *r = p->out;
    bool cache = true;
    int code;
    if ((code = get_string(p, "model", API_MODEL_SIZE, &r->model)) < 0 ||
        (code = get_string(p, "user", API_USER_SIZE, &r->user)) < 0 ||
        (code = get_string(p, "conversation", LIMIT_NAME_SIZE, &r->conversation)) < 0 ||
        (code = get_bool(p, "timings", &r->echo_timings)) < 0 || (code = get_bool(p, "cache", &cache)) < 0 ||
        (code = get_bool(p, "ignore_eos", &r->ignore_end)) < 0 || (code = parse_fidelity(p)) < 0 ||
        (code = parse_prefer(p)) < 0)
        return code;
    r->no_cache = !cache;
    if (!r->model && !(r->model = strdup("")))
        return no_memory(p);
    if (r->conversation && !conversation_id_valid(r->conversation))
        return refuse(p, -TD_ERR_ARG, "conversation",
                      "'conversation' must be 1 to %u letters, digits or any of - _ . :", LIMIT_NAME_SIZE);
    return 0;
}

/* ---- stop, bias, logprobs ---- */

static int add_stop(struct parse *p, const json_t *v)
{
    size_t size = json_string_length(v);
    if (!json_is_string(v) || size == 0 || size > LIMIT_API_STOP_SIZE ||
        memchr(json_string_value(v), 0, size))
        return refuse(p, -TD_ERR_ARG, "stop", "each 'stop' must be a string of 1 to %u bytes",
                      LIMIT_API_STOP_SIZE);
    char *copy = strdup(json_string_value(v));
    if (!copy)
        return no_memory(p);
    p->out->stops[p->out->stop_count++] = copy;
    return 0;
}

static int parse_stops(struct parse *p)
{
    json_t *v = field(p, "stop");
    if (!v)
        return 0;
    if (!json_is_array(v))
        return add_stop(p, v);
    if (json_array_size(v) > LIMIT_API_STOPS)
        return refuse(p, -TD_ERR_ARG, "stop", "'stop' may hold at most %u strings", LIMIT_API_STOPS);
    for (size_t i = 0; i < json_array_size(v); i++) {
        int code = add_stop(p, json_array_get(v, i));
        if (code)
            return code;
    }
    return 0;
}

static bool parse_token_id(const char *text, int32_t *out)
{
    int64_t id = 0;
    size_t digits = 0;
    for (; *text >= '0' && *text <= '9' && digits < 11; text++, digits++)
        id = id * 10 + (*text - '0');
    *out = (int32_t)id;
    return digits > 0 && *text == '\0' && id <= INT32_MAX;
}

static int parse_bias(struct parse *p)
{
    struct sampler_params *s = &p->out->sampling;
    json_t *v = field(p, "logit_bias");
    if (!v)
        return 0;
    if (!json_is_object(v) || json_object_size(v) > SAMPLER_BIAS_MAX)
        return refuse(p, -TD_ERR_ARG, "logit_bias", "'logit_bias' must be an object of at most %d token ids",
                      SAMPLER_BIAS_MAX);
    const char *key;
    json_t *bias;
    json_object_foreach(v, key, bias)
    {
        double x = json_is_number(bias) ? json_number_value(bias) : NAN;
        if (!parse_token_id(key, &s->bias[s->bias_count].id) || !(x >= -100 && x <= 100))
            return refuse(p, -TD_ERR_ARG, "logit_bias",
                          "'logit_bias' must map token ids to numbers from -100 to 100");
        s->bias[s->bias_count++].bias = (float)x;
    }
    return 0;
}

/* Chat: a flag and a count. Completions: the count alone, and 0 means "the chosen token only". */
static int parse_logprobs(struct parse *p)
{
    struct sampler_params *s = &p->out->sampling;
    int64_t count = 0;
    int code;
    if (!p->out->chat) {
        if ((code = get_integer(p, "logprobs", 0, SAMPLER_LOGPROBS_MAX, &count)) < 0)
            return code;
        s->want_logprobs = code > 0;
    } else {
        if ((code = get_bool(p, "logprobs", &s->want_logprobs)) < 0 ||
            (code = get_integer(p, "top_logprobs", 0, SAMPLER_LOGPROBS_MAX, &count)) < 0)
            return code;
        if (code > 0 && !s->want_logprobs)
            return refuse(p, -TD_ERR_ARG, "top_logprobs",
                          "'top_logprobs' is allowed only with \"logprobs\": true");
    }
    s->logprob_count = (uint32_t)count;
    return 0;
}

/* ---- what is not served ---- */

static bool is_text(const json_t *v)
{
    return json_is_string(v) && strcmp(json_string_value(v), "text") == 0;
}

static const char *find_unserved(const struct parse *p)
{
    static const char *const lists[] = {"tools", "functions"};
    for (size_t i = 0; i < TD_COUNT(lists); i++) {
        const json_t *v = field(p, lists[i]);
        if (v && !(json_is_array(v) && json_array_size(v) == 0))
            return lists[i];
    }
    const json_t *choice = field(p, "tool_choice");
    if (choice && !(json_is_string(choice) && (strcmp(json_string_value(choice), "none") == 0 ||
                                               strcmp(json_string_value(choice), "auto") == 0)))
        return "tool_choice";
    const json_t *format = field(p, "response_format");
    return format && !is_text(json_object_get(format, "type")) ? "response_format" : NULL;
}

static int refuse_unserved(struct parse *p)
{
    bool echo = false;
    int code = get_bool(p, "echo", &echo);
    if (code < 0)
        return code;
    if (echo && !p->out->chat)
        return refuse(p, -TD_ERR_UNSUPPORTED, "echo", "'echo' is not supported");
    const json_t *suffix = field(p, "suffix");
    if (suffix && !p->out->chat && !(json_is_string(suffix) && json_string_length(suffix) == 0))
        return refuse(p, -TD_ERR_UNSUPPORTED, "suffix", "'suffix' is not supported");
    json_t *modalities = field(p, "modalities");
    for (size_t i = 0; i < json_array_size(modalities); i++)
        if (!is_text(json_array_get(modalities, i)))
            return refuse(p, -TD_ERR_UNSUPPORTED, "modalities", "'modalities' may hold \"text\" only");
    if (field(p, "audio"))
        return refuse(p, -TD_ERR_UNSUPPORTED, "audio", "'audio' is not supported");
    return 0;
}

/* ---- messages ---- */

/* The template's name of a role, or NULL. */
static const char *role_of(const json_t *v)
{
    static const char *const roles[][2] = {{"system", "system"},
                                           {"developer", "system"},
                                           {"user", "user"},
                                           {"assistant", "assistant"},
                                           {"tool", "tool"}};
    for (size_t i = 0; i < TD_COUNT(roles); i++)
        if (json_is_string(v) && strcmp(json_string_value(v), roles[i][0]) == 0)
            return roles[i][1];
    return NULL;
}

/* Text parts, joined by line ends. */
static int join_parts(struct parse *p, json_t *parts, size_t index, char **out, size_t *out_size)
{
    size_t size = 0, count = json_array_size(parts);
    for (size_t i = 0; i < count; i++) {
        json_t *part = json_array_get(parts, i);
        if (!is_text(json_object_get(part, "type")) || !json_is_string(json_object_get(part, "text")))
            return refuse(
                p, -TD_ERR_UNSUPPORTED, "messages",
                "messages[%zu].content[%zu]: only parts {\"type\": \"text\", \"text\": …} are supported",
                index, i);
        size += json_string_length(json_object_get(part, "text")) + (i > 0);
    }
    char *text = malloc(size + 1), *next = text;
    if (!text)
        return no_memory(p);
    for (size_t i = 0; i < count; i++) {
        const json_t *part = json_object_get(json_array_get(parts, i), "text");
        if (i > 0)
            *next++ = '\n';
        memcpy(next, json_string_value(part), json_string_length(part));
        next += json_string_length(part);
    }
    *next = '\0';
    *out = text, *out_size = size;
    return 0;
}

static int parse_content(struct parse *p, json_t *v, const char *role, size_t index, char **out,
                         size_t *out_size)
{
    if (json_is_array(v) && json_array_size(v) > 0)
        return join_parts(p, v, index, out, out_size);
    const char *text = json_string_value(v);
    size_t size = json_string_length(v);
    if (!v || json_is_null(v)) /* a reply of nothing but a refusal or tool calls comes back like this */
        text = strcmp(role, "assistant") == 0 ? "" : NULL;
    if (!text)
        return refuse(p, -TD_ERR_ARG, "messages",
                      "messages[%zu].content must be a string or a list of text parts", index);
    if (!(*out = malloc(size + 1)))
        return no_memory(p);
    memcpy(*out, text, size);
    (*out)[size] = '\0';
    *out_size = size;
    return 0;
}

static int parse_message(struct parse *p, json_t *v, size_t index)
{
    struct chat_message *m = &p->out->messages[index];
    if (!json_is_object(v))
        return refuse(p, -TD_ERR_ARG, "messages", "messages[%zu] must be an object", index);
    m->role = role_of(json_object_get(v, "role"));
    if (!m->role)
        return refuse(
            p, -TD_ERR_ARG, "messages",
            "messages[%zu].role must be \"system\", \"developer\", \"user\", \"assistant\" or \"tool\"",
            index);
    const json_t *calls = json_object_get(v, "tool_calls");
    if (calls && !json_is_null(calls) && !(json_is_array(calls) && json_array_size(calls) == 0))
        return refuse(p, -TD_ERR_UNSUPPORTED, "messages", "messages[%zu].tool_calls: tools are not supported",
                      index);
    char *content = NULL;
    int code = parse_content(p, json_object_get(v, "content"), m->role, index, &content, &m->content_size);
    m->content = content;
    return code;
}

static int parse_messages(struct parse *p)
{
    json_t *v = field(p, "messages");
    size_t count = json_array_size(v);
    if (count == 0)
        return refuse(p, -TD_ERR_ARG, "messages", "'messages' must be a list of at least one message");
    if (count > LIMIT_API_MESSAGES)
        return refuse(p, -TD_ERR_LIMIT, "messages", "'messages' may hold at most %u messages",
                      LIMIT_API_MESSAGES);
    p->out->messages = calloc(count, sizeof *p->out->messages);
    if (!p->out->messages)
        return no_memory(p);
    p->out->message_count = count;
    for (size_t i = 0; i < count; i++) {
        int code = parse_message(p, json_array_get(v, i), i);
        if (code)
            return code;
    }
    return 0;
}

/* ---- prompt ---- */

static int parse_prompt_ids(struct parse *p, json_t *v)
{
    size_t count = json_array_size(v);
    if (count > LIMIT_PROMPT_TOKENS)
        return refuse(p, -TD_ERR_LIMIT, "prompt", "'prompt' may hold at most %u token ids",
                      LIMIT_PROMPT_TOKENS);
    p->out->prompt_ids = malloc(count * sizeof *p->out->prompt_ids);
    if (!p->out->prompt_ids)
        return no_memory(p);
    for (size_t i = 0; i < count; i++) {
        const json_t *id = json_array_get(v, i);
        json_int_t x = json_integer_value(id);
        if (!json_is_integer(id) || x < 0 || x > INT32_MAX)
            return refuse(p, -TD_ERR_ARG, "prompt", "'prompt' must be a string or a list of token ids");
        p->out->prompt_ids[i] = (int32_t)x;
    }
    p->out->prompt_id_count = count;
    return 0;
}

/* A string, [ids], or a list of one of these: several prompts would be several replies. */
static int parse_prompt(struct parse *p)
{
    json_t *v = field(p, "prompt");
    json_t *first = json_array_get(v, 0);
    if (first && !json_is_integer(first)) {
        if (json_array_size(v) != 1)
            return refuse(p, -TD_ERR_UNSUPPORTED, "prompt",
                          "'prompt' must be one prompt: several a request are not supported");
        v = first;
    }
    if (json_is_array(v) && json_array_size(v) > 0)
        return parse_prompt_ids(p, v);
    if (!json_is_string(v))
        return refuse(p, -TD_ERR_ARG, "prompt", "'prompt' must be a string or a list of token ids");
    size_t size = json_string_length(v);
    if (!(p->out->prompt = malloc(size + 1)))
        return no_memory(p);
    memcpy(p->out->prompt, json_string_value(v), size);
    p->out->prompt[size] = '\0';
    p->out->prompt_size = size;
    return 0;
}

/* ---- the whole ---- */

int api_json_check(const char *text, size_t size, struct td_error *err)
{
    size_t depth = 0, containers = 0, values = 0;
    bool in_string = false;
    for (size_t i = 0; i < size; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            depth++, containers++;
        } else if (c == ']' || c == '}') {
            depth -= depth > 0;
        } else if (c == ',' || c == ':') {
            values++;
        }
        if (depth > LIMIT_JSON_DEPTH || containers > LIMIT_JSON_CONTAINERS || values > LIMIT_JSON_VALUES)
            return td_fail(err, -TD_ERR_LIMIT,
                           "the body holds more values, or nests deeper, than is accepted");
    }
    return 0;
}

json_t *api_json_load(const char *body, size_t size, struct td_error *err)
{
    if (size == 0) {
        td_fail(err, -TD_ERR_FORMAT, "the request has no body; send a JSON object, with its Content-Length");
        return NULL;
    }
    if (api_json_check(body, size, err) < 0)
        return NULL;
    json_error_t why;
    json_t *root = json_loadb(body, size, JSON_ALLOW_NUL, &why);
    if (!root)
        td_fail(err, -TD_ERR_FORMAT, "the body is not valid JSON (line %d, column %d)", why.line, why.column);
    else if (!json_is_object(root)) {
        td_fail(err, -TD_ERR_FORMAT, "the body must be a JSON object");
        json_decref(root);
        root = NULL;
    }
    return root;
}

static void set_defaults(struct api_request *r, bool chat)
{
    *r = (struct api_request){.chat = chat};
    sampler_defaults(&r->sampling);
    r->sampling.repetition_window = API_REPETITION_WINDOW;
}

int api_request_parse(const char *body, size_t size, bool chat, struct api_request *out, const char **param,
                      struct td_error *err)
{
    static int (*const steps[])(struct parse * p) = {parse_extensions, parse_numbers,  parse_integers,
                                                     parse_stream,     parse_stops,    parse_bias,
                                                     parse_logprobs,   refuse_unserved};
    struct td_error own;
    struct parse p = {NULL, out, param, err ? err : &own};
    *param = NULL;
    set_defaults(out, chat);
    p.root = api_json_load(body, size, p.err);
    if (!p.root)
        return p.err->code;
    int code = 0;
    for (size_t i = 0; i < TD_COUNT(steps) && code >= 0; i++)
        code = steps[i](&p);
    if (code >= 0)
        code = chat ? parse_messages(&p) : parse_prompt(&p);
    if (code >= 0)
        out->unserved = find_unserved(&p);
    json_decref(p.root);
    if (code < 0)
        api_request_free(out);
    return code < 0 ? code : 0;
}

void api_request_free(struct api_request *r)
{
    for (size_t i = 0; i < r->message_count; i++)
        free((void *)(uintptr_t)r->messages[i].content);
    for (size_t i = 0; i < r->stop_count; i++)
        free(r->stops[i]);
    free(r->messages);
    free(r->model);
    free(r->prompt);
    free(r->prompt_ids);
    free(r->conversation);
    free(r->user);
    *r = (struct api_request){0};
}
