/* tandem-cloud: the decode service. `tandem-cloud token …` manages credentials; everything else starts a node.
 * Exit codes: 0, 1 for trouble (one line on stderr says what and what to do), 2 for usage. */
#include "cloud/auth_command.h"
#include "cloud/node.h"
#include "shared/forget.h"
#include "shared/heap.h"
#include "shared/paths.h"
#include "shared/crypto.h"
#include <stdio.h>
#include <sys/prctl.h>

/* A core dump would hold prompts and keys. Sanitizers need to trace themselves, so not with them. */
static void forbid_core_dumps(void)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    prctl(PR_SET_DUMPABLE, 0);
#endif
}

static int serve(int argc, char **argv)
{
    struct settings settings;
    struct config *config;
    struct node *node;
    struct td_error err = {0};
    int rc = settings_load(argc, argv, &settings, &config, &err);
    if (rc == 1)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "tandem-cloud: %s\n", err.text);
        return 2;
    }
    log_set_level(settings.level);
    rc = node_start(&settings, &node, &err);
    if (rc == 0) {
        rc = node_run(node);
        node_destroy(node);
        if (rc < 0)
            log_error("cloud", "stopped by a failure: %s", td_status_text(rc));
        else
            log_info("cloud", "stopped");
    } else {
        fprintf(stderr, "tandem-cloud: %s\n", err.text);
    }
    config_free(config);
    return rc == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    heap_settle();
    forget_enable();
    files_settle();
    if (crypto_init() < 0) {
        fprintf(stderr, "tandem-cloud: the cryptographic library does not work on this machine\n");
        return 1;
    }
    if (argc > 1 && strcmp(argv[1], "token") == 0)
        return auth_command(argc - 1, argv + 1);
    forbid_core_dumps();
    node_block_signals();
    return serve(argc, argv);
}
