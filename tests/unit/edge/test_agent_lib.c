/* libtandem: the C API over an agent with a fake cloud: replies, ends, errors, threads, and structs of an older header. */
#include "agent_rig.h"
#include "edge/settings.h"
#include "edge/tandem.h"

struct heard { /* by the callbacks' thread; the semaphore is posted at the end */
    sem_t ended;
    char text[4096];
    size_t size;
    struct tandem_result result;
    char error[200], conversation[80], finish[16];
    struct tandem *cancel_from;
    uint64_t id;
    unsigned ends;
    pthread_t thread;
};

static void on_text(void *context, const char *text, size_t size)
{
    struct heard *h = context;
    assert_true(h->size + size < sizeof h->text);
    memcpy(h->text + h->size, text, size);
    h->size += size;
    if (h->cancel_from)
        tandem_cancel(h->cancel_from, h->id);
}

static void on_end(void *context, const struct tandem_result *result)
{
    struct heard *h = context;
    h->result = *result;
    h->ends++;
    h->thread = pthread_self();
    snprintf(h->error, sizeof h->error, "%s", result->error);
    snprintf(h->conversation, sizeof h->conversation, "%s", result->conversation);
    snprintf(h->finish, sizeof h->finish, "%s", result->finish);
    sem_post(&h->ended);
}

struct lib {
    struct rig rig; /* model file, folder, cloud; no agent of its own */
    struct tandem *tandem;
    struct tandem_options options;
    char cloud[32];
};

static void make(struct lib *l)
{
    rig_make(&l->rig, 1);
    snprintf(l->cloud, sizeof l->cloud, "localhost:%u", l->rig.cloud.port);
    l->options = (struct tandem_options)TANDEM_OPTIONS_INIT;
    l->options.model_path = l->rig.model;
    l->options.cloud = l->cloud;
    l->options.token = "secret";
    l->options.data_dir = l->rig.data;
    l->options.chat_template = "chatml";
    l->options.plain = 1;
    l->options.edge_layers = 1; /* fixed: the device makes no tokens of its own */
    l->options.threads = 1;
    l->options.cloud_timeout_s = 60;
}

static void open_lib(struct lib *l)
{
    char error[TANDEM_ERROR_SIZE];
    fake_cloud_run(&l->rig.cloud);
    if (tandem_open(&l->options, &l->tandem, error, sizeof error) < 0)
        fail_msg("%s", error);
}

static void finish(struct lib *l)
{
    tandem_close(l->tandem);
    fake_cloud_stop(&l->rig.cloud);
    fake_cloud_free(&l->rig.cloud);
    nftw(l->rig.dir, rig_remove, 16, FTW_DEPTH | FTW_PHYS);
}

static struct tandem_message hello = {"user", "hello, I am zoe@example.org"};

static struct tandem_request request_of(struct heard *h)
{
    struct tandem_request r = TANDEM_REQUEST_INIT;
    memset(h, 0, sizeof *h);
    sem_init(&h->ended, 0, 0);
    r.messages = &hello;
    r.message_count = 1;
    return r;
}

static void wait_end(struct heard *h)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    assert_int_equal(sem_timedwait(&h->ended, &until), 0);
    sem_destroy(&h->ended);
}

static void a_reply_comes_through_callbacks(void **state)
{
    (void)state;
    struct lib l;
    struct heard h;
    make(&l);
    open_lib(&l);
    assert_int_equal(tandem_wait_ready(l.tandem, 60000), 0);
    struct tandem_request r = request_of(&h);
    r.temperature = 0.5f;
    r.max_tokens = 30;
    r.has_seed = 1;
    r.seed = 77;
    uint64_t id = 0;
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, &id), 0);
    assert_true(id > 0);
    wait_end(&h);
    assert_int_equal(h.result.code, 0);
    assert_string_equal(h.finish, "stop");
    assert_int_equal(h.result.completion_tokens, FAKE_REPLY);
    assert_int_equal(l.rig.cloud.token_count_max, 30);
    assert_int_equal(l.rig.cloud.seed, 77);
    assert_true(l.rig.cloud.temperature == 0.5f);
    assert_true(h.size > 0);
    char *json;
    assert_int_equal(tandem_conversation_show(l.tandem, h.conversation, &json), 0);
    assert_non_null(strstr(json, "zoe@example.org")); /* restored on the device */
    tandem_free(json);
    assert_int_equal(tandem_conversations(l.tandem, &json), 0);
    assert_non_null(strstr(json, h.conversation));
    tandem_free(json);
    assert_int_equal(tandem_conversation_delete(l.tandem, h.conversation), 0);
    assert_int_equal(tandem_conversation_show(l.tandem, h.conversation, &json), -TANDEM_ERR_NOTFOUND);
    finish(&l);
}

static void a_stop_text_is_not_shown(void **state)
{
    (void)state;
    struct lib l;
    struct heard whole, cut;
    make(&l);
    open_lib(&l);
    struct tandem_request r = request_of(&whole);
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &whole, NULL), 0);
    wait_end(&whole);
    char stop[2] = {whole.text[whole.size / 2], 0};
    size_t shown = (size_t)(strchr(whole.text, stop[0]) - whole.text);
    const char *const stops[] = {stop};
    r = request_of(&cut);
    r.stops = stops;
    r.stop_count = 1;
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &cut, NULL), 0);
    wait_end(&cut);
    assert_int_equal(cut.result.code, 0);
    assert_string_equal(cut.finish, "stop");
    assert_int_equal(cut.size, shown);
    assert_memory_equal(cut.text, whole.text, shown);
    finish(&l);
}

static void a_busy_cloud_says_when_to_ask_again(void **state)
{
    (void)state;
    struct lib l;
    struct heard h;
    make(&l);
    l.rig.cloud.error_code = TD_ERR_FULL;
    l.rig.cloud.error_retry = true;
    open_lib(&l);
    struct tandem_request r = request_of(&h);
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), 0);
    wait_end(&h);
    assert_int_equal(h.result.code, -TANDEM_ERR_FULL);
    assert_int_equal(h.result.retry_after_ms, FAKE_RETRY_MS);
    finish(&l);
}

static void what_the_context_does_not_hold_is_refused_in_numbers(void **state)
{
    (void)state;
    struct lib l;
    struct heard h;
    uint32_t asked, prompt, holds;
    make(&l);
    open_lib(&l);
    struct tandem_request r = request_of(&h);
    r.max_tokens = 500;
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), 0);
    wait_end(&h);
    assert_int_equal(h.result.code, -TANDEM_ERR_CONTEXT);
    assert_int_equal(sscanf(h.error,
                            "prompt and reply want %u tokens (%u of them prompt), the context holds %u",
                            &asked, &prompt, &holds),
                     3);
    assert_int_equal(holds, 512);
    assert_int_equal(asked, prompt + 500);
    assert_true(prompt > 12);
    assert_int_equal(h.ends, 1);
    finish(&l);
}

static void a_cancelled_reply_ends_once(void **state)
{
    (void)state;
    struct lib l;
    struct heard h;
    make(&l);
    l.rig.cloud.token_count = 300;
    open_lib(&l);
    struct tandem_request r = request_of(&h);
    h.cancel_from = l.tandem;
    h.id = 1; /* the first call's */
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), 0);
    wait_end(&h);
    assert_int_equal(h.result.code, -TANDEM_ERR_CANCELLED);
    assert_int_equal(tandem_cancel(l.tandem, 1), 0); /* gone already: nothing happens */
    assert_int_equal(tandem_cancel(l.tandem, 4711), 0);
    finish(&l);
    assert_int_equal(h.ends, 1);
}

static void closing_ends_what_is_under_way(void **state)
{
    (void)state;
    struct lib l;
    struct heard h[3];
    make(&l);
    l.rig.cloud.silent = true;
    open_lib(&l);
    for (size_t i = 0; i < TD_COUNT(h); i++) {
        struct tandem_request r = request_of(&h[i]);
        assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h[i], NULL), 0);
    }
    finish(&l);
    for (size_t i = 0; i < TD_COUNT(h); i++) {
        assert_int_equal(h[i].ends, 1);
        assert_int_equal(h[i].result.code, -TANDEM_ERR_CLOSED);
        assert_false(pthread_equal(h[i].thread, pthread_self())); /* as all callbacks */
        sem_destroy(&h[i].ended);
    }
}

static void bad_arguments_are_refused(void **state)
{
    (void)state;
    struct lib l;
    struct heard h;
    char error[TANDEM_ERROR_SIZE];
    struct tandem *none;
    make(&l);
    struct tandem_options o = l.options;
    assert_string_equal(tandem_error_text(-TANDEM_ERR_CONTEXT), td_status_text(-TD_ERR_CONTEXT));
    assert_string_equal(tandem_version(), TANDEM_VERSION);
    o.codec = "l7";
    assert_int_equal(tandem_open(&o, &none, error, sizeof error), -TANDEM_ERR_ARG);
    assert_string_equal(error, "codec: want auto, raw, l0, l1, l2, l2-k5 or l2-5bit");
    o = l.options;
    o.cloud_timeout_s = EDGE_TIMEOUT_MAX + 1;
    assert_int_equal(tandem_open(&o, &none, error, sizeof error), -TANDEM_ERR_ARG);
    o = l.options;
    o.token = NULL;
    assert_int_equal(tandem_open(&o, &none, error, sizeof error), -TANDEM_ERR_ARG);
    o = l.options;
    o.model_path = "/nonexistent.gguf";
    assert_true(tandem_open(&o, &none, error, sizeof error) < 0);
    assert_non_null(strstr(error, "/nonexistent.gguf"));
    o.size = 0;
    assert_int_equal(tandem_open(&o, &none, NULL, 0), -TANDEM_ERR_ARG);
    open_lib(&l);
    struct tandem_request r = request_of(&h);
    r.temperature = 7;
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), -TANDEM_ERR_ARG);
    r = request_of(&h);
    r.message_count = 0;
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), -TANDEM_ERR_ARG);
    struct tandem_message damaged = {"user", "\xff"};
    r = request_of(&h);
    r.messages = &damaged;
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), -TANDEM_ERR_ARG);
    r = request_of(&h);
    r.conversation = "\xff"; /* not another conversation than was meant */
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), -TANDEM_ERR_ARG);
    const char *stops[] = {"end", "\xff"};
    r = request_of(&h);
    r.stops = stops;
    r.stop_count = TD_COUNT(stops);
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), -TANDEM_ERR_ARG);
    assert_int_equal(h.ends, 0);
    finish(&l);
}

/* The cloud goes away in the middle of a reply, and the device makes the rest of it; then a whole one. */
static void without_the_cloud_the_device_goes_on(void **state)
{
    (void)state;
    struct lib l;
    struct heard h;
    make(&l);
    l.options.edge_layers = -1;
    l.options.local = "off";
    l.options.offline = "continue";
    l.rig.cloud.token_count = 40;
    l.rig.cloud.cut_after = 10;
    l.rig.cloud.away_then = true;
    open_lib(&l);
    for (uint32_t from = 10; from != UINT32_MAX; from = from ? 0 : UINT32_MAX) {
        struct tandem_request r = request_of(&h);
        r.max_tokens = 24;
        assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), 0);
        wait_end(&h);
        assert_int_equal(h.result.code, 0);
        assert_true(h.result.completion_tokens > from);
        assert_int_equal(h.result.offline_from_token, from);
        assert_int_equal(h.result.offline_tokens, h.result.completion_tokens - from);
        assert_int_equal(h.result.local_tokens, h.result.offline_tokens);
        assert_true(h.result.offline_estimate_ms > 0);
        assert_int_equal(tandem_wait_ready(l.tandem, 60000), 0); /* requests are served */
    }
    assert_int_equal(l.rig.cloud.open_count, 1);
    finish(&l);
}

static void first_tokens_are_made_here(void **state)
{
    (void)state;
    struct lib l;
    struct heard h;
    make(&l);
    l.options.edge_layers = -1;
    l.options.local = "always";
    l.rig.cloud.silent = true;
    open_lib(&l);
    struct tandem_request r = request_of(&h);
    r.max_tokens = 5;
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), 0);
    wait_end(&h);
    assert_int_equal(h.result.code, 0);
    assert_int_equal(h.result.local_tokens, h.result.completion_tokens);
    assert_int_equal(h.result.offline_tokens, 0);
    finish(&l);
}

/* Requests that name no preference have the options', and a request's own goes before it. One layer is enough where that is said. */
static void private_may_be_the_rule(void **state)
{
    (void)state;
    static const struct {
        const char *prefer;
        bool is_private;
    } cases[] = {{NULL, true}, {"latency", false}};
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct lib l;
        struct heard h;
        make(&l);
        l.options.prefer = "private";
        l.options.private_min_layers = 1;
        open_lib(&l);
        struct tandem_request r = request_of(&h);
        r.prefer = cases[i].prefer;
        assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), 0);
        wait_end(&h);
        assert_int_equal(h.result.code, 0);
        assert_int_equal(l.rig.cloud.opens[0].is_private, cases[i].is_private);
        finish(&l);
    }
}

static void bad_policies_are_named(void **state)
{
    (void)state;
    struct lib l;
    make(&l);
    static const struct {
        const char *says;
        struct tandem_options with;
    } cases[] = {
        {"offline: want wait or continue", {.offline = "perhaps"}},
        {"local: want auto, always or off", {.local = "perhaps"}},
        {"prefer: want latency, cloud-cost or private", {.prefer = "perhaps"}},
        {"private_min_layers: want", {.private_min_layers = -1}},
        {"cloud_price: want", {.cloud_price = -1}},
        {"chunk_tokens: want a multiple of 64", {.chunk_tokens = 100}},
        {"--private-min-layers is 8", {.prefer = "private"}},          /* of which one is computed here */
        {"--local always needs the whole model", {.local = "always"}}, /* with layers fixed to 1 */
        {"--offline continue needs the whole model", {.offline = "continue"}}, /* with layers fixed to 1 */
        {"l2", {.codec = "l2"}}, /* of which this model has no record */
    };
    for (size_t i = 0; i < TD_COUNT(cases); i++) {
        struct tandem_options o = l.options;
        char error[TANDEM_ERROR_SIZE];
        struct tandem *none;
        o.offline = cases[i].with.offline, o.local = cases[i].with.local, o.prefer = cases[i].with.prefer;
        o.private_min_layers = cases[i].with.private_min_layers;
        o.cloud_price = cases[i].with.cloud_price;
        o.chunk_tokens = cases[i].with.chunk_tokens;
        o.codec = cases[i].with.codec;
        assert_true(tandem_open(&o, &none, error, sizeof error) < 0);
        if (!strstr(error, cases[i].says))
            fail_msg("'%s' does not say '%s'", error, cases[i].says);
    }
    l.options.codec = "l2";
    l.options.codec_unchecked = 1;
    l.options.chunk_tokens = 128;
    open_lib(&l);
    finish(&l);
}

/* A program that was built when the structs ended earlier: what lies behind its size must not be read. */
static void older_structs_are_understood(void **state)
{
    (void)state;
    struct lib l;
    struct heard h;
    make(&l);
    l.options.size = offsetof(struct tandem_options, offline);
    l.options.offline = l.options.local = "not read";
    open_lib(&l);
    struct tandem_request r = request_of(&h);
    r.size = offsetof(struct tandem_request, has_seed);
    r.has_seed = 1;
    r.stop_count = 999; /* would crash, if it were read */
    assert_int_equal(tandem_generate(l.tandem, &r, on_text, on_end, &h, NULL), 0);
    wait_end(&h);
    assert_int_equal(h.result.code, 0);
    finish(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_reply_comes_through_callbacks),
        cmocka_unit_test(a_stop_text_is_not_shown),
        cmocka_unit_test(a_busy_cloud_says_when_to_ask_again),
        cmocka_unit_test(what_the_context_does_not_hold_is_refused_in_numbers),
        cmocka_unit_test(a_cancelled_reply_ends_once),
        cmocka_unit_test(closing_ends_what_is_under_way),
        cmocka_unit_test(without_the_cloud_the_device_goes_on),
        cmocka_unit_test(first_tokens_are_made_here),
        cmocka_unit_test(private_may_be_the_rule),
        cmocka_unit_test(bad_policies_are_named),
        cmocka_unit_test(bad_arguments_are_refused),
        cmocka_unit_test(older_structs_are_understood),
    };
    return cmocka_run_group_tests(tests, rig_set_up, NULL);
}
