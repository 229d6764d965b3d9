/* crc32c: CRC-32 with the Castagnoli polynomial, reflected (RFC 3720, appendix B.4 has its test vectors).
 *
 * With SSE4.2, long inputs go through three streams at once, because the instruction takes three cycles but
 * one can start every cycle. The streams' results are joined by "append n zero bytes", a linear map on the 32
 * state bits, kept as four tables of 256. Without it, eight bytes a step through eight tables ("slicing by
 * 8"). */
#include "shared/base.h"
#include <pthread.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define POLYNOMIAL  0x82f63b78u
#define STREAM_SIZE 1024 /* bytes of one of the three streams */
#define STREAM_STEP 8

static uint32_t slice_table[8][256]; /* [k][b]: state after byte b and k zero bytes */
static uint32_t skip_table[4][256];  /* [k][b]: STREAM_SIZE zero bytes after a state whose byte k is b */
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void make_tables(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t state = b;
        for (int bit = 0; bit < 8; bit++)
            state = state >> 1 ^ (state & 1 ? POLYNOMIAL : 0);
        slice_table[0][b] = state;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t b = 0; b < 256; b++) {
            uint32_t before = slice_table[k - 1][b];
            slice_table[k][b] = before >> 8 ^ slice_table[0][before & 255];
        }
    for (int k = 0; k < 4; k++)
        for (uint32_t b = 0; b < 256; b++) {
            uint32_t state = b << (8 * k);
            for (int i = 0; i < STREAM_SIZE; i++)
                state = state >> 8 ^ slice_table[0][state & 255];
            skip_table[k][b] = state;
        }
}

/* The state (already inverted) after `size` more bytes. */
static uint32_t update_tables(uint32_t state, const uint8_t *p, size_t size)
{
    for (; size >= 8; p += 8, size -= 8) {
        uint64_t word = load_le64(p) ^ state;
        state = 0;
        for (int k = 0; k < 8; k++)
            state ^= slice_table[7 - k][word >> (8 * k) & 255];
    }
    for (; size > 0; p++, size--)
        state = state >> 8 ^ slice_table[0][(state ^ *p) & 255];
    return state;
}

uint32_t crc32c_portable(uint32_t crc, const void *data, size_t size)
{
    pthread_once(&tables_once, make_tables);
    return ~update_tables(~crc, data, size);
}

#if defined(__x86_64__)

static uint32_t skip_stream(uint32_t state)
{
    return skip_table[0][state & 255] ^ skip_table[1][state >> 8 & 255] ^ skip_table[2][state >> 16 & 255] ^
           skip_table[3][state >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t update_sse42(uint32_t start, const uint8_t *p, size_t size)
{
    uint64_t state = start;
    for (; size >= 3 * STREAM_SIZE; p += 3 * STREAM_SIZE, size -= 3 * STREAM_SIZE) {
        uint64_t second = 0, third = 0;
        for (const uint8_t *q = p; q < p + STREAM_SIZE; q += STREAM_STEP) {
            state = _mm_crc32_u64(state, load_le64(q));
            second = _mm_crc32_u64(second, load_le64(q + STREAM_SIZE));
            third = _mm_crc32_u64(third, load_le64(q + 2 * STREAM_SIZE));
        }
        state = skip_stream((uint32_t)state) ^ second;
        state = skip_stream((uint32_t)state) ^ third;
    }
    for (; size >= STREAM_STEP; p += STREAM_STEP, size -= STREAM_STEP)
        state = _mm_crc32_u64(state, load_le64(p));
    for (; size > 0; p++, size--)
        state = _mm_crc32_u8((uint32_t)state, *p);
    return (uint32_t)state;
}

uint32_t crc32c(uint32_t crc, const void *data, size_t size)
{
    if (!__builtin_cpu_supports("sse4.2"))
        return crc32c_portable(crc, data, size);
    if (size >= 3 * STREAM_SIZE)
        pthread_once(&tables_once, make_tables);
    return ~update_sse42(~crc, data, size);
}

#else

uint32_t crc32c(uint32_t crc, const void *data, size_t size)
{
    return crc32c_portable(crc, data, size);
}

#endif
