/* agent: what is a mistake is told at the start, in one line. */
#include "agent_rig.h"

static void layers_beyond_the_file_are_refused(void **state)
{
    (void)state;
    struct rig r;
    struct td_error err = {0};
    rig_make(&r, 3);
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "--edge-layers 2 or fewer"));
    r.config.edge_layers = PLANNER_AUTO;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), 0);
    assert_int_equal(agent_layers(r.agent), 2);
    fake_cloud_run(&r.cloud);
    rig_free(&r);
}

/* A wish that every request would be refused for, or that would do nothing. The default of 8 layers is no wish. */
static void wishes_beyond_the_device_are_refused(void **state)
{
    (void)state;
    struct rig r;
    struct td_error err = {0};
    rig_make(&r, 1);
    r.config.private_min_layers = 2;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "--private-min-layers is 2 and this device computes 1 of 2 layers"));
    r.config.private_min_layers = AGENT_PRIVATE_LAYERS;
    r.config.prefer_private = true;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "--private-min-layers is 8"));
    r.config.prefer_private = false;
    r.config.local = LOCAL_ALWAYS;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_ARG);
    assert_non_null(strstr(err.text, "--local always needs the whole model"));
    r.config.edge_layers = 2; /* all of them, but fixed */
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_ARG);
    r.config.edge_layers = PLANNER_AUTO;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), 0);
    fake_cloud_run(&r.cloud);
    rig_free(&r);
}

static void unusable_certificates_are_told_at_the_start(void **state)
{
    (void)state;
    struct rig r;
    struct td_error err = {0};
    rig_make(&r, 0);
    r.config.tls = true;
    r.config.ca_path = "/nonexistent/ca.crt";
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_NOTFOUND);
    assert_non_null(strstr(err.text, "/nonexistent/ca.crt"));
    r.config.ca_path = r.model;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_FORMAT);
    assert_non_null(strstr(err.text, "holds no PEM certificate"));
    char fifo[160];
    snprintf(fifo, sizeof fifo, "%s/fifo", r.dir);
    assert_int_equal(mkfifo(fifo, 0600), 0); /* must not wait for a writer */
    r.config.ca_path = fifo;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_ARG);
    r.config.ca_path = NULL;
    r.config.cert_path = r.model;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_ARG);
    r.config.key_path = r.model;
    assert_int_equal(agent_create(&r.config, r.cloud.loop, &r.agent, &err), -TD_ERR_FORMAT);
    fake_cloud_free(&r.cloud);
    rig_clear(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_beyond_the_file_are_refused),
        cmocka_unit_test(wishes_beyond_the_device_are_refused),
        cmocka_unit_test(unusable_certificates_are_told_at_the_start),
    };
    return cmocka_run_group_tests(tests, rig_set_up, NULL);
}
