/* fuzz_config: a configuration file and a command line, from one input: what comes before the first 0xff byte
 * is the file, each piece after it one argument. Whatever comes in, config_load must end with settings that
 * hold what their table promises, or with a one-line message and the settings untouched. */
#include "shared/base.h"
#include "shared/config.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define ARGUMENTS_MAX 16
#define SEPARATOR     0xff

struct settings {
    const char *text, *secret;
    int64_t number;
    double ratio;
    bool flag;
    uint64_t size;
};

static const struct config_option options[] = {
    {.name = "text", .type = CONFIG_STRING, .offset = offsetof(struct settings, text)},
    {.name = "secret", .type = CONFIG_STRING, .offset = offsetof(struct settings, secret), .secret = true},
    {.name = "number",
     .type = CONFIG_INT,
     .offset = offsetof(struct settings, number),
     .min = -5,
     .max = 100},
    {.name = "ratio", .type = CONFIG_FLOAT, .offset = offsetof(struct settings, ratio), .min = 0, .max = 1},
    {.name = "flag-name", .type = CONFIG_BOOL, .offset = offsetof(struct settings, flag)},
    {.name = "size", .type = CONFIG_SIZE, .offset = offsetof(struct settings, size), .min = 4096},
};
static const struct config_spec spec = {.program = "fuzz",
                                        .env_prefix = "TDFUZZ",
                                        .summary = "Fuzz.",
                                        .options = options,
                                        .option_count = TD_COUNT(options)};

static void require(bool holds)
{
    if (!holds)
        abort();
}

static void check(int status, const struct settings *s, const struct config *config,
                  const struct td_error *err)
{
    static const struct settings untouched;
    require((status == 0) == (config != NULL));
    if (status == 0) {
        require(s->number >= -5 && s->number <= 100 && s->ratio >= 0 && s->ratio <= 1 &&
                (s->size == 0 || s->size >= 4096));
        require(strlen(s->text) + strlen(s->secret) < 1u << 20);
    } else {
        require(memcmp(s, &untouched, sizeof *s) == 0);
        require(status == 1 || (err->code == status && *err->text && !strchr(err->text, '\n')));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int file = -1; /* one memory file for the whole run: 0600, so that secrets in it are taken */
    static char path[64];
    if (file < 0) {
        file = memfd_create("fuzz", 0);
        require(file >= 0 && fchmod(file, 0600) == 0);
        snprintf(path, sizeof path, "--config=/proc/self/fd/%d", file);
        require(freopen("/dev/null", "w", stdout) != NULL); /* --help is a valid argument */
    }
    char *text = malloc(size + 1);
    require(text != NULL);
    memcpy(text, data, size);
    text[size] = '\0';
    char *end = memchr(text, SEPARATOR, size);
    size_t file_size = end ? (size_t)(end - text) : size;
    require(ftruncate(file, 0) == 0 && pwrite(file, text, file_size, 0) == (ssize_t)file_size);

    char *argv[ARGUMENTS_MAX + 1] = {path, path};
    int argc = 2;
    while (end && argc < ARGUMENTS_MAX) {
        *end++ = '\0';
        argv[argc++] = end;
        end = memchr(end, SEPARATOR, size - (size_t)(end - text));
    }
    struct settings settings = {0};
    struct config *config;
    struct td_error err = {0};
    char **rest;
    int rest_count;
    int status = config_load(&spec, argc, argv, &settings, &config, &rest, &rest_count, &err);
    check(status, &settings, config, &err);
    config_free(config);
    free(text);
    return 0;
}
