/* config: every option has a slot; sources fill the slots from the weakest to the strongest, each value is
 * checked where it is read (so a bad line in the file is found even if a flag overrides it), and only when
 * all is well are the slots copied to the caller's struct. So a failed load leaves the settings as they were.
 *
 * In the file (ini.h has its form) '-' and '_' in keys are the same; a key that is unknown or given twice is
 * an error. A flag may be repeated; its last value counts. An empty environment variable counts as absent,
 * and variables with the program's prefix that name no option are left alone: Kubernetes sets such ones for
 * every service. */
#include "shared/config.h"
#include "shared/arena.h"
#include "shared/base.h"
#include "shared/config_help.h"
#include "shared/ini.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIG_FILE_SIZE_MAX (1u << 20)
#define CONFIG_SOURCE_SIZE   320
#define CONFIG_MEMORY_MAX    (16u << 20)

union config_value {
    const char *text;
    int64_t integer;
    double number;
    bool flag;
    uint64_t size;
};

struct slot {
    union config_value value;
    unsigned line; /* of the INI file that set it; 0: it has not */
};

struct config {
    struct arena arena;
    struct slot *slots; /* one an option */
    char **rest;        /* positional arguments; NULL when the program takes none */
    int rest_count;
    const char *file_path; /* --config, or NULL */
};

/* --- values --- */

static bool equals_any(const char *text, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcasecmp(text, words[i]) == 0)
            return true;
    return false;
}

static bool parse_bool(const char *text, bool *out)
{
    static const char *const yes[] = {"true", "yes", "on", "1"}, *const no[] = {"false", "no", "off", "0"};
    *out = equals_any(text, yes, TD_COUNT(yes));
    return *out || equals_any(text, no, TD_COUNT(no));
}

/* The C library's parsers skip blanks of every kind, and would take "nan"; a setting is a number from its
 * first character. */
static bool starts_like_number(const char *text)
{
    return *text != '\0' && strchr("+-.0123456789", *text) != NULL;
}

static bool parse_int(const char *text, int64_t *out)
{
    char *end;
    errno = 0;
    long long parsed = strtoll(text, &end, 10);
    *out = parsed;
    return starts_like_number(text) && end != text && *end == '\0' && errno == 0;
}

static bool parse_float(const char *text, double *out)
{
    char *end;
    *out = strtod(text, &end);
    return starts_like_number(text) && end != text && *end == '\0' && isfinite(*out);
}

/* Digits, then nothing, B, or K, M, G, T (powers of 1024) with an optional B or iB. */
static bool parse_size(const char *text, uint64_t *out)
{
    if (*text < '0' || *text > '9')
        return false;
    char *end;
    errno = 0;
    unsigned long long parsed = strtoull(text, &end, 10);
    if (errno != 0)
        return false;
    static const char units[] = "KMGT";
    unsigned shift = 0;
    const char *unit = *end ? strchr(units, *end >= 'a' ? *end - 'a' + 'A' : *end) : NULL;
    if (unit) {
        shift = 10 * (unsigned)(unit - units + 1);
        end++;
    }
    static const char *const tails[] = {"", "B", "iB"};
    if (!equals_any(end, tails, unit ? 3 : 2) || parsed > UINT64_MAX >> shift)
        return false;
    *out = parsed << shift;
    return true;
}

static bool parse_value(struct config *c, enum config_type type, const char *text, union config_value *out,
                        double *number)
{
    bool good = false;
    switch (type) {
    case CONFIG_STRING:
        out->text = arena_strndup(&c->arena, text, strlen(text));
        return out->text != NULL;
    case CONFIG_BOOL:
        return parse_bool(text, &out->flag);
    case CONFIG_INT:
        good = parse_int(text, &out->integer);
        *number = (double)out->integer;
        break;
    case CONFIG_FLOAT:
        good = parse_float(text, &out->number);
        *number = out->number;
        break;
    case CONFIG_SIZE:
        good = parse_size(text, &out->size);
        *number = (double)out->size;
        break;
    }
    return good;
}

static const char *type_wanted(enum config_type type)
{
    static const char *const wanted[] = {
        [CONFIG_STRING] = "a shorter text", /* only memory can be short */
        [CONFIG_INT] = "a whole number",    [CONFIG_FLOAT] = "a number",
        [CONFIG_BOOL] = "true or false",    [CONFIG_SIZE] = "a size such as 4096, 64K, 2M or 4G",
    };
    return wanted[type];
}

static const char *shown_value(const struct config_option *o, const char *text)
{
    return o->secret ? "(hidden)" : text;
}

/* Who forgets the unit of a size should not get a few bytes. 0 has a meaning of its own everywhere. */
static int check_size(const struct config_option *o, uint64_t size, const char *source, struct td_error *err)
{
    uint64_t least = (uint64_t)o->min, shown = least;
    unsigned unit = 0;
    while (unit < 4 && shown % 1024 == 0 && shown > 0)
        shown /= 1024, unit++;
    if (size == 0 || size >= least)
        return 0;
    return td_fail(
        err, -TD_ERR_ARG,
        "cannot use %s: %s must be at least %llu%.1s (or 0), and this is %llu bytes; the units are "
        "K, M, G and T",
        source, o->name, (unsigned long long)shown, &"\0KMGT"[unit], (unsigned long long)size);
}

/* Check `text` and put it in the option's slot. `source` says where it came from, as in "edge.ini:3" or
 * "--port". */
static int set_option(struct config *c, const struct config_option *o, struct slot *slot, const char *text,
                      const char *source, struct td_error *err)
{
    union config_value value = {0};
    double number = 0;
    if (!parse_value(c, o->type, text, &value, &number))
        return td_fail(err, -TD_ERR_ARG, "cannot use %s: %s needs %s, not \"%s\"", source, o->name,
                       type_wanted(o->type), shown_value(o, text));
    if (o->type == CONFIG_SIZE && check_size(o, value.size, source, err) < 0)
        return err->code;
    bool bounded = o->type != CONFIG_SIZE && (o->min != 0 || o->max != 0) && o->type != CONFIG_STRING &&
                   o->type != CONFIG_BOOL;
    if (bounded && (number < o->min || number > o->max))
        return td_fail(err, -TD_ERR_ARG, "cannot use %s: %s must be from %.15g to %.15g, not %s", source,
                       o->name, o->min, o->max, shown_value(o, text));
    slot->value = value;
    return 0;
}

static void store_settings(const struct config_spec *spec, const struct slot *slots, void *settings)
{
    static const size_t sizes[] = {
        [CONFIG_STRING] = sizeof(const char *), [CONFIG_INT] = sizeof(int64_t),
        [CONFIG_FLOAT] = sizeof(double),        [CONFIG_BOOL] = sizeof(bool),
        [CONFIG_SIZE] = sizeof(uint64_t),
    };
    for (size_t i = 0; i < spec->option_count; i++) {
        const struct config_option *o = &spec->options[i];
        memcpy((char *)settings + o->offset, &slots[i].value, sizes[o->type]);
    }
}

static int load_defaults(struct config *c, const struct config_spec *spec, struct td_error *err)
{
    static const char *const zero[] = {[CONFIG_STRING] = "",
                                       [CONFIG_INT] = "0",
                                       [CONFIG_FLOAT] = "0",
                                       [CONFIG_BOOL] = "false",
                                       [CONFIG_SIZE] = "0"};
    for (size_t i = 0; i < spec->option_count; i++) {
        const struct config_option *o = &spec->options[i];
        if (!o->fallback) { /* zero may lie out of range: then it means "not set" */
            double number;
            if (!parse_value(c, o->type, zero[o->type], &c->slots[i].value, &number))
                return td_fail(err, -TD_ERR_NOMEM, "cannot load settings: out of memory");
            continue;
        }
        int status = set_option(c, o, &c->slots[i], o->fallback, "a built-in default", err);
        if (status != 0)
            return status;
    }
    return 0;
}

/* --- the INI file --- */

/* Same name, with '-' and '_' alike. */
static bool names_match(const char *a, const char *b, size_t b_size)
{
    for (size_t i = 0; i < b_size; i++) {
        char x = a[i] == '_' ? '-' : a[i], y = b[i] == '_' ? '-' : b[i];
        if (x != y || x == '\0')
            return false;
    }
    return a[b_size] == '\0';
}

static const struct config_option *find_option(const struct config_spec *spec, const char *name, size_t size)
{
    for (size_t i = 0; i < spec->option_count; i++)
        if (names_match(spec->options[i].name, name, size))
            return &spec->options[i];
    return NULL;
}

struct file { /* --config while it is read */
    struct config *config;
    const struct config_spec *spec;
    bool private; /* nobody but the owner can read it */
};

static int apply_entry(void *ctx, const char *key, const char *value, unsigned line, struct td_error *err)
{
    const struct file *f = ctx;
    const char *path = f->config->file_path;
    const struct config_option *o = find_option(f->spec, key, strlen(key));
    if (!o)
        return td_fail(err, -TD_ERR_ARG, "cannot use %s:%u: there is no setting \"%s\"; see %s --help", path,
                       line, key, f->spec->program);
    struct slot *slot = &f->config->slots[o - f->spec->options];
    if (slot->line)
        return td_fail(err, -TD_ERR_ARG, "cannot use %s:%u: %s was already set in line %u", path, line,
                       o->name, slot->line);
    if (o->secret && !f->private)
        return td_fail(
            err, -TD_ERR_AUTH,
            "cannot use %s:%u: %s is a secret, but other users can read this file; run: chmod 600 %s", path,
            line, o->name, path);
    slot->line = line;
    char source[CONFIG_SOURCE_SIZE];
    snprintf(source, sizeof source, "%s:%u", path, line);
    return set_option(f->config, o, slot, value, source, err);
}

/* Read to the end (it may be a pipe); at most `capacity` bytes. Returns the size or a negative code. */
static int64_t read_all(int fd, char *out, size_t capacity, const char *path, struct td_error *err)
{
    size_t size = 0;
    while (size < capacity) {
        ssize_t got = read(fd, out + size, capacity - size);
        if (got == 0)
            return (int64_t)size;
        if (got < 0 && errno != EINTR)
            return td_fail(err, -TD_ERR_IO, "cannot read configuration file %s: %s", path, strerror(errno));
        if (got > 0)
            size += (size_t)got;
    }
    return td_fail(err, -TD_ERR_LIMIT, "cannot read configuration file %s: it has more than %u bytes", path,
                   CONFIG_FILE_SIZE_MAX);
}

static int load_file(struct config *c, const struct config_spec *spec, struct td_error *err)
{
    const char *path = c->file_path;
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY |
                            O_NONBLOCK); /* a FIFO must not hold us up before it is refused */
    if (fd < 0 || fstat(fd, &info) < 0)
        return td_fail(err, errno == ENOENT ? -TD_ERR_NOTFOUND : -TD_ERR_IO,
                       "cannot read configuration file %s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) {
        close(fd);
        return td_fail(err, -TD_ERR_ARG, "cannot read configuration file %s: it is not a regular file", path);
    }
    struct file f = {.config = c, .spec = spec, .private = (info.st_mode & 077) == 0};
    char *text = malloc(CONFIG_FILE_SIZE_MAX + 1);
    int64_t size =
        text ? read_all(fd, text, CONFIG_FILE_SIZE_MAX + 1, path, err)
             : td_fail(err, -TD_ERR_NOMEM, "cannot read configuration file %s: out of memory", path);
    close(fd);
    int status = size < 0 ? (int)size : ini_parse(text, (size_t)size, path, apply_entry, &f, err);
    if (size > 0)
        explicit_bzero(text, (size_t)size); /* it may hold secrets */
    free(text);
    return status;
}

/* --- the environment --- */

void config_env_name(const struct config_spec *spec, const char *option, char out[CONFIG_NAME_SIZE])
{
    snprintf(out, CONFIG_NAME_SIZE, "%s_%s", spec->env_prefix, option);
    for (char *c = out; *c; c++)
        *c = *c == '-' ? '_' : *c >= 'a' && *c <= 'z' ? (char)(*c - 'a' + 'A') : *c;
}

static const char *env_value(const struct config_spec *spec, const char *option, char name[CONFIG_NAME_SIZE])
{
    config_env_name(spec, option, name);
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static int load_environment(struct config *c, const struct config_spec *spec, struct td_error *err)
{
    for (size_t i = 0; i < spec->option_count; i++) {
        char name[CONFIG_NAME_SIZE];
        const char *value = env_value(spec, spec->options[i].name, name);
        int status = value ? set_option(c, &spec->options[i], &c->slots[i], value, name, err) : 0;
        if (status != 0)
            return status;
    }
    return 0;
}

/* --- the command line --- */

struct flag { /* one argument that starts with "--", taken apart */
    const struct config_option *option;
    const char *name; /* without the dashes; name_size chars */
    size_t name_size;
    const char *value; /* after '=', or NULL */
    bool negated;      /* --no-name */
};

static struct flag split_flag(const struct config_spec *spec, const char *arg)
{
    struct flag f = {.name = arg + 2};
    f.name_size = strcspn(f.name, "=");
    f.value = f.name[f.name_size] == '=' ? f.name + f.name_size + 1 : NULL;
    f.option = find_option(spec, f.name, f.name_size);
    if (!f.option && strncmp(f.name, "no-", 3) == 0) {
        f.option = find_option(spec, f.name + 3, f.name_size - 3);
        f.negated = f.option != NULL;
        if (f.negated && f.option->type != CONFIG_BOOL)
            f.option = NULL;
    }
    return f;
}

static int refuse_secret_flag(const struct config_spec *spec, const struct config_option *o,
                              struct td_error *err)
{
    char name[CONFIG_NAME_SIZE];
    config_env_name(spec, o->name, name);
    return td_fail(err, -TD_ERR_ARG,
                   "cannot take --%s from the command line, which every user can see: set %s, or %s in the "
                   "--config file",
                   o->name, name, o->name);
}

/* argv[*index] is a flag of the table; moves *index to the last argument that it uses. */
static int apply_flag(struct config *c, const struct config_spec *spec, int argc, char **argv, int *index,
                      struct td_error *err)
{
    struct flag f = split_flag(spec, argv[*index]);
    const struct config_option *o = f.option;
    if (!o)
        return td_fail(err, -TD_ERR_ARG,
                       "cannot read the command line: there is no option --%.*s; see %s --help",
                       (int)TD_MIN(f.name_size, (size_t)CONFIG_NAME_SIZE), f.name, spec->program);
    if (o->secret)
        return refuse_secret_flag(spec, o, err);
    if (f.negated && f.value)
        return td_fail(err, -TD_ERR_ARG, "cannot read the command line: --no-%s takes no value", o->name);
    if (!f.value && o->type == CONFIG_BOOL)
        f.value = f.negated ? "false" : "true";
    if (!f.value && (*index + 1 >= argc || strncmp(argv[*index + 1], "--", 2) == 0))
        return td_fail(err, -TD_ERR_ARG,
                       "cannot read the command line: --%s needs a value (--%s=VALUE if it starts with --)",
                       o->name, o->name);
    if (!f.value)
        f.value = argv[++*index];
    char source[CONFIG_NAME_SIZE];
    snprintf(source, sizeof source, "--%s", o->name);
    return set_option(c, o, &c->slots[o - spec->options], f.value, source, err);
}

/* --config FILE or --config=FILE: 1 and *index at its last argument, 0 if it is something else, or an error.
 */
static int take_config_flag(struct config *c, int argc, char **argv, int *index, struct td_error *err)
{
    const char *arg = argv[*index];
    if (strncmp(arg, "--config=", 9) == 0) {
        c->file_path = arg + 9;
    } else if (strcmp(arg, "--config") == 0) {
        if (*index + 1 >= argc)
            return td_fail(err, -TD_ERR_ARG, "cannot read the command line: --config needs a file");
        c->file_path = argv[++*index];
    } else {
        return 0;
    }
    return 1;
}

/* Walk over argv. With `apply`, set options and keep positional arguments; without, only find --config, which
 * must be read before the flags that override it, and answer --help and --version (then the result is 1). */
static int walk_arguments(struct config *c, const struct config_spec *spec, int argc, char **argv, bool apply,
                          struct td_error *err)
{
    bool only_rest = false;
    for (int i = 1; i < argc; i++) {
        if (!apply && !only_rest && config_print_wanted(spec, argv[i], c->rest != NULL))
            return 1;
        int taken = only_rest ? 0 : take_config_flag(c, argc, argv, &i, err);
        if (taken < 0)
            return taken;
        if (taken > 0)
            continue;
        if (!only_rest && strcmp(argv[i], "--") == 0) {
            only_rest = true;
        } else if (!only_rest && strncmp(argv[i], "--", 2) == 0) {
            struct flag f = split_flag(spec, argv[i]);
            int status = apply ? apply_flag(c, spec, argc, argv, &i, err) : 0;
            if (status != 0)
                return status;
            if (!apply && f.option && f.option->type != CONFIG_BOOL && !f.value)
                i++; /* its value, even if that reads "--config" */
        } else if (!only_rest && argv[i][0] == '-' && argv[i][1]) {
            return td_fail(err, -TD_ERR_ARG,
                           "cannot read the command line: there is no option %s; see %s --help", argv[i],
                           spec->program);
        } else if (apply && !c->rest) {
            return td_fail(err, -TD_ERR_ARG,
                           "cannot read the command line: unexpected argument \"%s\"; see %s --help", argv[i],
                           spec->program);
        } else if (apply) {
            c->rest[c->rest_count++] = argv[i];
        }
    }
    return 0;
}

/* --- loading --- */

static int load_sources(struct config *c, const struct config_spec *spec, int argc, char **argv,
                        struct td_error *err)
{
    int status = walk_arguments(c, spec, argc, argv, false, err);
    if (status != 0)
        return status;
    char name[CONFIG_NAME_SIZE];
    if (!c->file_path)
        c->file_path = env_value(spec, "config", name);
    status = load_defaults(c, spec, err);
    if (status == 0 && c->file_path)
        status = load_file(c, spec, err);
    if (status == 0)
        status = load_environment(c, spec, err);
    if (status == 0)
        status = walk_arguments(c, spec, argc, argv, true, err);
    return status;
}

int config_load(const struct config_spec *spec, int argc, char **argv, void *settings, struct config **out,
                char ***rest, int *rest_count, struct td_error *err)
{
    *out = NULL;
    struct config *c = calloc(1, sizeof *c);
    if (!c)
        return td_fail(err, -TD_ERR_NOMEM, "cannot load settings: out of memory");
    arena_init(&c->arena, CONFIG_MEMORY_MAX);
    c->slots = calloc(spec->option_count + 1, sizeof *c->slots);
    c->rest = rest ? calloc((size_t)argc + 1, sizeof *c->rest) : NULL;
    int status = !c->slots || (rest && !c->rest)
                     ? td_fail(err, -TD_ERR_NOMEM, "cannot load settings: out of memory")
                     : load_sources(c, spec, argc, argv, err);
    if (status != 0) {
        config_free(c);
        return status;
    }
    store_settings(spec, c->slots, settings);
    if (rest) {
        *rest = c->rest;
        *rest_count = c->rest_count;
    }
    *out = c;
    return 0;
}

void config_free(struct config *c)
{
    if (!c)
        return;
    arena_deinit(&c->arena);
    free(c->slots);
    free(c->rest);
    free(c);
}

/* --- secrets --- */

static int check_secret_file(int fd, const char *path, struct td_error *err)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return td_fail(err, -TD_ERR_IO, "cannot read secret file %s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        return td_fail(err, -TD_ERR_ARG, "cannot read secret file %s: it is not a regular file", path);
    if (info.st_mode & 077)
        return td_fail(
            err, -TD_ERR_AUTH,
            "cannot use secret file %s: other users have access to it (mode %04o); run: chmod 600 %s", path,
            (unsigned)info.st_mode & 07777, path);
    if (info.st_uid != geteuid() && info.st_uid != 0)
        return td_fail(err, -TD_ERR_AUTH,
                       "cannot use secret file %s: it belongs to user %u, not to this process's user %u; "
                       "run: chown %u %s",
                       path, (unsigned)info.st_uid, (unsigned)geteuid(), (unsigned)geteuid(), path);
    return 0;
}

/* Cut `out`, which holds the first `got` bytes of the file, after its first line. */
static int cut_secret(const char *path, char *out, size_t got, size_t size, struct td_error *err)
{
    char *newline = memchr(out, '\n', got);
    size_t length = newline ? (size_t)(newline - out) : got;
    if (length >= size)
        return td_fail(err, -TD_ERR_LIMIT,
                       "cannot use secret file %s: its first line has more than %zu characters", path,
                       size - 1);
    if (length > 0 && out[length - 1] == '\r')
        length--;
    if (length == 0 || memchr(out, '\0', length))
        return td_fail(err, -TD_ERR_FORMAT, "cannot use secret file %s: its first line %s", path,
                       length == 0 ? "is empty" : "holds a NUL byte");
    memset(out + length, 0, size - length);
    return 0;
}

int config_read_secret(const char *path, char *out, size_t size, struct td_error *err)
{
    if (size < 2)
        return td_fail(err, -TD_ERR_ARG, "cannot read secret file %s: no room for it", path);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY |
                            O_NONBLOCK); /* a FIFO must not hold us up before it is refused */
    if (fd < 0)
        return td_fail(err, errno == ENOENT ? -TD_ERR_NOTFOUND : -TD_ERR_IO, "cannot read secret file %s: %s",
                       path, strerror(errno));
    int status = check_secret_file(fd, path, err);
    size_t got = 0;
    ssize_t part = 1;
    while (status == 0 && part != 0 && got < size) {
        part = read(fd, out + got, size - got);
        if (part < 0 && errno != EINTR)
            status = td_fail(err, -TD_ERR_IO, "cannot read secret file %s: %s", path, strerror(errno));
        else if (part > 0)
            got += (size_t)part;
    }
    close(fd);
    if (status == 0)
        status = cut_secret(path, out, got, size, err);
    if (status != 0)
        explicit_bzero(out, size);
    return status;
}
