/* api_text: text out of the bytes of tokens: valid UTF-8 at every moment, and stop strings that are never shown.
 *
 * A token may end inside a character, and a stop string may begin in one token and end in another. So what could still become either is
 * held back: the start of a character, and the longest end of the text that is a beginning of a stop string. A stop counts when its last
 * byte arrives (of two at the same byte, the longer one), which gives the same reply however the tokens came in batches.
 *
 * The rule for bytes that are no UTF-8 is the Unicode standard's recommended one
 * (chapter 3, "maximal subparts", the same as in the WHATWG decoder): a sequence that stops being valid is
 * one U+FFFD up to the byte where it stopped. */
#include "protocol/api_text.h"
#include "shared/base.h"
#include "shared/status.h"
#include <stdlib.h>

/* Length of the sequence that `lead` opens and the range of the byte after it; 0 if it opens none. */
static int sequence_of(uint8_t lead, uint8_t *low, uint8_t *high)
{
    *low = 0x80, *high = 0xbf;
    if (lead < 0x80)
        return 1;
    if (lead >= 0xc2 && lead <= 0xdf)
        return 2;
    if (lead >= 0xe0 && lead <= 0xef) {
        if (lead == 0xe0)
            *low = 0xa0; /* shorter forms exist */
        if (lead == 0xed)
            *high = 0x9f; /* surrogates */
        return 3;
    }
    if (lead >= 0xf0 && lead <= 0xf4) {
        if (lead == 0xf0)
            *low = 0x90;
        if (lead == 0xf4)
            *high = 0x8f; /* beyond U+10FFFF */
        return 4;
    }
    return 0;
}

/* Bytes of the UTF-8 sequence at the start of data: its length if it is valid; 0 if it is the beginning of a
 * valid one that the data cuts short; -n if the first n bytes can be no part of any, and stand for one
 * U+FFFD. size > 0. */
static int utf8_step(const uint8_t *data, size_t size)
{
    uint8_t low, high;
    int length = sequence_of(data[0], &low, &high);
    if (length == 0)
        return -1;
    for (int i = 1; i < length; i++) {
        if ((size_t)i == size)
            return 0;
        if (data[i] < low || data[i] > high)
            return -i;
        low = 0x80, high = 0xbf;
    }
    return length;
}

char *api_utf8_repair(const char *data, size_t size, size_t *out_size)
{
    if (size > (SIZE_MAX - 1) / 3)
        return NULL;
    char *out = malloc(size * 3 + 1); /* each bad byte may become the three of U+FFFD */
    size_t used = 0;
    if (!out)
        return NULL;
    for (size_t i = 0; i < size;) {
        int step = utf8_step((const uint8_t *)data + i, size - i);
        if (step > 0) {
            memcpy(out + used, data + i, (size_t)step);
            used += (size_t)step, i += (size_t)step;
        } else {
            memcpy(out + used, "\xef\xbf\xbd", 3);
            used += 3, i += step < 0 ? (size_t)-step : size - i;
        }
    }
    out[used] = '\0';
    *out_size = used;
    return out;
}

/* ---- growing text ------------------------------------------------------------------------------------------ */

int api_text_append(struct api_text *b, const void *data, size_t size)
{
    if (size >= b->capacity - b->size) { /* room for a NUL stays */
        size_t capacity = TD_MAX(2 * b->capacity, b->size + size + 64);
        char *grown = realloc(b->data, capacity);
        if (!grown)
            return -TD_ERR_NOMEM;
        b->data = grown, b->capacity = capacity;
    }
    if (size)
        memcpy(b->data + b->size, data, size);
    b->size += size;
    b->data[b->size] = '\0';
    return 0;
}

void api_text_free(struct api_text *b)
{
    free(b->data);
    *b = (struct api_text){0};
}

/* ---- the stream -------------------------------------------------------------------------------------------- */

/* Bytes become characters at the end of `held`; the start of an unfinished one waits in `partial`. */
static int take_characters(struct api_text_stream *t, const uint8_t *data, size_t size, bool flush)
{
    for (size_t i = 0; i < size || (flush && t->partial_size > 0);) {
        uint8_t window[4];
        size_t fresh = TD_MIN(size - i, sizeof window - t->partial_size);
        memcpy(window, t->partial, t->partial_size);
        if (fresh)
            memcpy(window + t->partial_size, data + i, fresh);
        int step = utf8_step(window, t->partial_size + fresh);
        if (step == 0 && !flush) { /* all that there is, and too short */
            memcpy(t->partial, window, t->partial_size + fresh);
            t->partial_size += fresh;
            return 0;
        }
        size_t used = step > 0 ? (size_t)step : step < 0 ? (size_t)-step : t->partial_size + fresh;
        int code =
            step > 0 ? api_text_append(&t->held, window, used) : api_text_append(&t->held, "\xef\xbf\xbd", 3);
        if (code)
            return code;
        i += used - t->partial_size;
        t->partial_size = 0;
    }
    return 0;
}

/* The longest stop string that ends at text[end), or 0. */
static size_t stop_ending_at(const struct api_text_stream *t, size_t end)
{
    size_t longest = 0;
    for (size_t i = 0; i < t->stop_count; i++) {
        size_t size = t->stop_sizes[i];
        if (size <= end && size > longest && memcmp(t->held.data + end - size, t->stops[i], size) == 0)
            longest = size;
    }
    return longest;
}

/* How much of the text's end may be the beginning of a stop string. */
static size_t stop_prefix_size(const struct api_text_stream *t)
{
    size_t longest = 0;
    for (size_t i = 0; i < t->stop_count; i++) {
        size_t most = TD_MIN(t->stop_sizes[i] - 1, t->held.size);
        for (size_t n = most; n > longest; n--)
            if (memcmp(t->held.data + t->held.size - n, t->stops[i], n) == 0)
                longest = n;
    }
    return longest;
}

static int show(struct api_text_stream *t, size_t size, struct api_text *out)
{
    size_t skip = t->strip_space && t->shown_size == 0 && size > 0 && t->held.data[0] == ' ';
    if (size > 0)
        t->strip_space = false;
    t->shown_size += size;
    int code = api_text_append(out, t->held.data + skip, size - skip);
    memmove(t->held.data, t->held.data + size, t->held.size - size);
    t->held.size -= size;
    return code;
}

void api_text_stream_init(struct api_text_stream *t, char *const *stops, size_t stop_count, bool strip_space)
{
    *t = (struct api_text_stream){.stops = stops, .stop_count = stop_count, .strip_space = strip_space};
    for (size_t i = 0; i < stop_count; i++)
        t->stop_sizes[i] = strlen(stops[i]);
}

void api_text_stream_deinit(struct api_text_stream *t)
{
    api_text_free(&t->held);
}

int api_text_stream_feed(struct api_text_stream *t, const void *data, size_t size, bool flush,
                         struct api_text *out)
{
    size_t scanned = t->held.size;
    if (t->stopped)
        return 0;
    int code = take_characters(t, data, size, flush);
    if (code || t->held.size == 0)
        return code;
    for (size_t end = scanned + 1; end <= t->held.size; end++) {
        size_t stop = stop_ending_at(t, end);
        if (stop) {
            t->stopped = true;
            return show(t, end - stop, out);
        }
    }
    return show(t, t->held.size - (flush ? 0 : stop_prefix_size(t)), out);
}
