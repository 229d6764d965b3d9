/* base: clocks and hex. The half-precision conversions are in f16.c, the checksum in crc32c.c. */
#include "shared/base.h"
#include "shared/status.h"
#include <time.h>

static uint64_t clock_read_us(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now); /* cannot fail for these two clocks and a valid pointer */
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

uint64_t clock_mono_us(void)
{
    return clock_read_us(CLOCK_MONOTONIC);
}

uint64_t clock_wall_us(void)
{
    return clock_read_us(CLOCK_REALTIME);
}

void hex_encode(const void *data, size_t size, char *out)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *bytes = data;
    for (size_t i = 0; i < size; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * size] = '\0';
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

int hex_decode(const char *text, void *out, size_t size)
{
    uint8_t *bytes = out;
    for (size_t i = 0; i < size; i++) {
        int high = hex_digit(text[2 * i]);
        int low = high < 0 ? -1 : hex_digit(text[2 * i + 1]); /* never look past a NUL */
        if (low < 0)
            return -TD_ERR_FORMAT;
        bytes[i] = (uint8_t)(high << 4 | low);
    }
    return text[2 * size] == '\0' ? 0 : -TD_ERR_FORMAT;
}
