/* ui: what every subcommand shows people. */
#include "cli/cli.h"
#include "shared/config_help.h"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int cli_fail(const char *what, const struct td_error *err)
{
    fprintf(stderr, "tandem %s: %s\n", what, err->text[0] ? err->text : td_status_text(err->code));
    return CLI_FAILED;
}

int cli_usage(const struct config_spec *spec)
{
    config_print_usage(spec, stderr);
    return CLI_USAGE;
}

int cli_usage_of_verb(const struct config_spec *spec, const char *verb, bool known)
{
    if (!verb)
        fprintf(stderr, "%s: no command is given\n\n", spec->program);
    else
        fprintf(stderr, known ? "%s: '%s' takes other arguments\n\n" : "%s: there is no command '%s'\n\n",
                spec->program, verb);
    return cli_usage(spec);
}

bool cli_is_terminal(int fd)
{
    const char *term = getenv("TERM");
    return isatty(fd) && term && strcmp(term, "dumb") != 0;
}

void cli_progress(void *label, uint64_t done, uint64_t total)
{
    enum { WIDTH = 40 };
    static uint64_t shown_us;
    uint64_t now = clock_mono_us();
    if (!cli_is_terminal(STDERR_FILENO) || total == 0 || (done < total && now - shown_us < 50000))
        return;
    shown_us = now;
    int filled = (int)(done * WIDTH / total);
    fprintf(stderr, "\r%s [%.*s%.*s] %3d %%%s", (const char *)label, filled,
            "########################################", WIDTH - filled,
            "                                        ", (int)(done * 100 / total), done >= total ? "\n" : "");
}

const char *cli_bytes(uint64_t size, char out[32])
{
    static const char *const UNITS[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)size;
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < TD_COUNT(UNITS))
        value /= 1024, unit++;
    snprintf(out, 32, unit ? "%.1f %s" : "%.0f %s", value, UNITS[unit]);
    return out;
}

int cli_print_json(json_t *json)
{
    char *text = json_dumps(json, JSON_COMPACT | JSON_REAL_PRECISION(6));
    json_decref(json);
    if (!text) {
        fprintf(stderr, "tandem: out of memory\n");
        return CLI_FAILED;
    }
    puts(text);
    free(text);
    return CLI_OK;
}

int cli_load(const struct config_spec *spec, int argc, char **argv, void *settings, struct config **config,
             char ***rest, int *rest_count, int *exit_code)
{
    struct td_error err = {0};
    int rc = config_load(spec, argc, argv, settings, config, rest, rest_count, &err);
    if (rc == 1)
        *exit_code = CLI_OK;
    if (rc < 0) {
        fprintf(stderr, "%s: %s\n", spec->program, err.text);
        *exit_code = CLI_USAGE;
    }
    return rc;
}
