/* config_help: two columns, options on the left, wrapped texts on the right, never wider than a classic
 * terminal. */
#include "shared/config_help.h"
#include "shared/base.h"
#include <stdio.h>

#define HELP_WIDTH  80
#define HELP_COLUMN 30   /* where texts start */
#define HELP_TEXT   1024 /* bytes of one option's text */

static const char *metavar_of(const struct config_option *o)
{
    static const char *const by_type[] = {
        [CONFIG_STRING] = "TEXT", [CONFIG_INT] = "N",     [CONFIG_FLOAT] = "X",
        [CONFIG_BOOL] = "",       [CONFIG_SIZE] = "SIZE",
    };
    return o->metavar ? o->metavar : by_type[o->type];
}

/* Print words from column `at` on, in lines that start at HELP_COLUMN. */
static void print_wrapped(size_t at, const char *text)
{
    if (at + 2 > HELP_COLUMN) {
        printf("\n");
        at = 0;
    }
    printf("%*s", (int)(HELP_COLUMN - at), "");
    at = HELP_COLUMN;
    while (*(text += strspn(text, " "))) {
        size_t word = strcspn(text, " ");
        if (at > HELP_COLUMN && at + 1 + word > HELP_WIDTH) {
            printf("\n%*s", HELP_COLUMN, "");
            at = HELP_COLUMN;
        }
        bool spaced = at > HELP_COLUMN;
        printf("%s%.*s", spaced ? " " : "", (int)word, text);
        at += word + spaced;
        text += word;
    }
    printf("\n");
}

static void print_option(const struct config_option *o)
{
    char left[128], text[HELP_TEXT];
    const char *metavar = metavar_of(o);
    int length = snprintf(left, sizeof left, "  %s%s%s%s",
                          o->secret                ? ""
                          : o->type == CONFIG_BOOL ? "--[no-]"
                                                   : "--",
                          o->name, *metavar && !o->secret ? " " : "", o->secret ? "" : metavar);
    bool ranged = o->type != CONFIG_STRING && o->type != CONFIG_BOOL && (o->min != 0 || o->max != 0);
    char range[64] = "", fallback[256] = "";
    if (ranged && o->type != CONFIG_SIZE)
        snprintf(range, sizeof range, " (%.15g to %.15g)", o->min, o->max);
    if (o->fallback && *o->fallback && !o->secret)
        snprintf(fallback, sizeof fallback, " [%s]", o->fallback);
    snprintf(text, sizeof text, "%s%s%s%s", o->help ? o->help : "", range, fallback,
             o->secret ? " (from the environment or the file only)" : "");
    fputs(left, stdout);
    print_wrapped((size_t)length, text);
}

/* The forms of the command's arguments, one a line. */
static void print_forms(const struct config_spec *spec, bool takes_arguments, FILE *out)
{
    if (!spec->usage) {
        fprintf(out, "Usage: %s [options]%s\n", spec->program, takes_arguments ? " [arguments]" : "");
        return;
    }
    const char *lead = "Usage:";
    for (const char *form = spec->usage; *form; lead = "      ") {
        size_t length = strcspn(form, "\n");
        fprintf(out, "%s %s %.*s\n", lead, spec->program, (int)length, form);
        form += length + (form[length] == '\n');
    }
}

static void print_examples(const struct config_spec *spec, FILE *out)
{
    if (spec->examples && *spec->examples)
        fprintf(out, "\nExamples:\n%s%s", spec->examples,
                spec->examples[strlen(spec->examples) - 1] == '\n' ? "" : "\n");
}

/* The option that serves as the example of the three spellings: one with a dash in its name shows the most. */
static size_t example_option(const struct config_spec *spec)
{
    for (size_t i = spec->option_count; i-- > 0;)
        if (!spec->options[i].secret && strchr(spec->options[i].name, '-'))
            return i;
    return 0;
}

static void print_help(const struct config_spec *spec, bool takes_arguments)
{
    printf("%s\n\n", spec->summary);
    print_forms(spec, takes_arguments, stdout);
    printf("\nOptions:\n");
    for (size_t i = 0; i < spec->option_count; i++)
        print_option(&spec->options[i]);
    static const struct config_option own[] = {
        {.name = "config",
         .metavar = "FILE",
         .help = "read settings from this file, one \"name = value\" a line"},
        {.name = "help", .metavar = "", .help = "show this text"},
        {.name = "version", .metavar = "", .help = "show the version"},
    };
    for (size_t i = 0; i < TD_COUNT(own); i++)
        print_option(&own[i]);
    const struct config_option *example = &spec->options[example_option(spec)];
    char variable[CONFIG_NAME_SIZE];
    config_env_name(spec, example->name, variable);
    printf("\nEvery option can also be set in the file or in the environment: --%s is\n"
           "%s in the file and %s in the environment.\n"
           "Flags win over the environment, the environment wins over the file.\n",
           example->name, example->name, variable);
    print_examples(spec, stdout);
}

void config_print_usage(const struct config_spec *spec, FILE *out)
{
    print_forms(spec, true, out);
    print_examples(spec, out);
    fprintf(out, "\n%s --help tells more.\n", spec->program);
}

bool config_print_wanted(const struct config_spec *spec, const char *arg, bool takes_arguments)
{
    if (strcmp(arg, "--version") == 0 || strcmp(arg, "-V") == 0) {
        printf("%s %s\n", spec->program, TANDEM_VERSION);
        return true;
    }
    if (strcmp(arg, "--help") != 0 && strcmp(arg, "-h") != 0)
        return false;
    print_help(spec, takes_arguments);
    return true;
}
