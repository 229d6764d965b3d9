/* status: texts of the error codes and the formatting of one-line messages.
 *
 * Messages often quote what a file or a peer sent, so td_fail makes them safe to print: control characters
 * become
 * '?', and a message that is too long is cut before a UTF-8 sequence, never inside one. */
#include "shared/status.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *td_status_text(int code)
{
    switch (code < 0 ? -(long)code : (long)code) {
    case 0:
        return "success";
#define X(name, value, text)                                                                                 \
    case value:                                                                                              \
        return text;
        TD_STATUS_LIST(X)
#undef X
    default:
        return "unknown error";
    }
}

/* Drop the last, perhaps incomplete, UTF-8 sequence of a text that was cut. */
static void trim_cut_sequence(char *text)
{
    size_t size = strlen(text);
    while (size > 0 && ((unsigned char)text[size - 1] & 0xc0) == 0x80)
        size--;
    if (size > 0 && (unsigned char)text[size - 1] >= 0xc0)
        size--;
    text[size] = '\0';
}

int td_fail(struct td_error *err, int code, const char *format, ...)
{
    if (!err)
        return code;
    va_list args;
    va_start(args, format);
    int needed = vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    err->code = code;
    if (needed < 0)
        snprintf(err->text, sizeof err->text, "%s", td_status_text(code));
    else if ((size_t)needed >= sizeof err->text)
        trim_cut_sequence(err->text);
    for (unsigned char *c = (unsigned char *)err->text; *c; c++)
        if (*c < 0x20 || *c == 0x7f)
            *c = '?';
    return code;
}
