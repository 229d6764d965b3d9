/* ini: one pass over the text, line by line, in place. ini.h has the form. */
#include "shared/ini.h"
#include "shared/base.h"

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* A quoted value, unquoted in place; NULL when it is not closed or something other than a comment follows. */
static char *unquote(char *value)
{
    char *out = value, *in = value + 1;
    for (; *in && *in != '"'; in++) {
        if (*in == '\\' && (in[1] == '"' || in[1] == '\\'))
            in++;
        *out++ = *in;
    }
    if (*in != '"')
        return NULL;
    do
        in++;
    while (is_blank(*in));
    if (*in && *in != '#' && *in != ';')
        return NULL;
    *out = '\0';
    return value;
}

/* A value as written, without its comment and the blanks around it, in place. */
static char *plain(char *value)
{
    size_t size = 0;
    while (value[size] &&
           !((value[size] == '#' || value[size] == ';') && (size == 0 || is_blank(value[size - 1]))))
        size++;
    while (size > 0 && is_blank(value[size - 1]))
        size--;
    value[size] = '\0';
    return value;
}

/* Split "key = value" in place. Returns NULL, or what is wrong with the line. An empty line gives an empty
 * key. */
static const char *split_line(char *line, char **key, char **value)
{
    while (is_blank(*line))
        line++;
    *key = *value = line;
    if (*line == '\0' || *line == '#' || *line == ';') {
        *line = '\0';
        return NULL;
    }
    if (*line == '[') {
        bool closed = strchr(line, ']') != NULL;
        *line = '\0';
        return closed ? NULL : "a section needs a closing ']'";
    }
    char *equals = strchr(line, '=');
    if (!equals || equals == line)
        return "expected key = value";
    char *end = equals;
    while (end > line && is_blank(end[-1]))
        end--;
    *value = equals + 1;
    *end = '\0';
    while (is_blank(**value))
        ++*value;
    *value = **value == '"' ? unquote(*value) : plain(*value);
    return *value ? NULL : "a quoted value needs a closing quote, and only a comment may follow it";
}

int ini_parse(char *text, size_t size, const char *path, ini_entry_fn entry, void *ctx, struct td_error *err)
{
    if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) { /* a byte order mark, as some editors leave it */
        text += 3;
        size -= 3;
    }
    unsigned line = 1;
    for (char *end = text + size; text < end; line++) {
        char *newline = memchr(text, '\n', (size_t)(end - text));
        char *stop = newline ? newline : end;
        *stop = '\0';
        if (strlen(text) != (size_t)(stop - text))
            return td_fail(err, -TD_ERR_FORMAT, "cannot read %s:%u: the line holds a NUL byte", path, line);
        char *key, *value;
        const char *wrong = split_line(text, &key, &value);
        if (wrong)
            return td_fail(err, -TD_ERR_FORMAT, "cannot read %s:%u: %s", path, line, wrong);
        int status = *key ? entry(ctx, key, value, line, err) : 0;
        if (status != 0)
            return status;
        text = stop + 1;
    }
    return 0;
}
