/* tandem: talks to edge and cloud through their APIs; works on model files and stores directly. */
#include "cli/cli.h"
#include "shared/crypto.h"
#include <signal.h>
#include <stdio.h>

static const struct {
    const char *name, *help;
    int (*run)(int argc, char **argv);
} COMMANDS[] = {
    {"chat", "talk to a model; the conversation is kept and can be resumed", cli_chat},
    {"conv", "ls | show | rm | fork | pin | unpin | export | import: stored conversations", cli_conv},
    {"model", "inspect | fingerprint | verify | slice: model files", cli_model},
    {"store",
     "ls | stat | verify | rebuild | compact | gc | pin | unpin | erase-tenant | rotate-key | export | "
     "import: a KV store",
     cli_store},
    {"bench",
     "engine | codec | store | trace: how fast this machine runs a model; what KV levels do to it; "
     "what a cache would have hit",
     cli_bench},
};

static void print_help(FILE *out)
{
    fprintf(out,
            "tandem %s: one language model on a device and in a data centre\n\nUsage: tandem COMMAND "
            "[OPTIONS]\n\n",
            TANDEM_VERSION);
    for (size_t i = 0; i < TD_COUNT(COMMANDS); i++)
        fprintf(out, "  %-7s %s\n", COMMANDS[i].name, COMMANDS[i].help);
    fprintf(out, "\nExamples:\n"
                 "  tandem chat\n"
                 "  tandem chat --conversation conv-1f0c… 'And in winter?'\n"
                 "  tandem model inspect SmolLM2-135M-Instruct.Q4_1.gguf\n"
                 "  tandem bench engine --model model.gguf --threads 2 --prompt 512 --gen 64 --json\n"
                 "\n`tandem COMMAND --help` tells more. Exit codes: 0 done, 1 failed, 2 wrong usage.\n");
}

/* A result that did not get to where it was sent is none: the disk may be full. */
static int finish(int code)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    fprintf(stderr, "tandem: cannot write all of the output: is the disk full?\n");
    return code == CLI_OK ? CLI_FAILED : code;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "tandem: no command is given\n\n");
        print_help(stderr);
        return CLI_USAGE;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        print_help(stdout);
        return CLI_OK;
    }
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V")) {
        printf("tandem %s\n", TANDEM_VERSION);
        return CLI_OK;
    }
    signal(SIGXFSZ, SIG_IGN); /* beyond `ulimit -f` a write fails, like on a full disk, and does not end us */
    if (crypto_init() < 0) {
        fprintf(stderr, "tandem: the system gives no random numbers\n");
        return CLI_FAILED;
    }
    for (size_t i = 0; i < TD_COUNT(COMMANDS); i++)
        if (!strcmp(argv[1], COMMANDS[i].name))
            return finish(COMMANDS[i].run(argc - 1, argv + 1));
    fprintf(stderr, "tandem: there is no command '%s'; see tandem --help\n", argv[1]);
    return CLI_USAGE;
}
