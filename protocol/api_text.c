/* api_text: UTF-8 out of whatever bytes tokens hold. The rule is the Unicode standard's recommended one
 * (chapter 3, "maximal subparts", the same as in the WHATWG decoder): a sequence that stops being valid is
 * one U+FFFD up to the byte where it stopped. */
#include "protocol/api_internal.h"
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

int utf8_step(const uint8_t *data, size_t size)
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

char *utf8_repair(const char *data, size_t size, size_t *out_size)
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
