/* base: the few small helpers that every module uses: little-endian access, spans, alignment, time, hex.
 *
 * Every multi-byte integer in a Tandem format is little-endian. Readers work through `struct reader`, which
 * never runs past its end: after the first short read it is `bad` and yields zeros. */
#ifndef TANDEM_SHARED_BASE_H
#define TANDEM_SHARED_BASE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TD_COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define TD_MIN(a, b)    ((a) < (b) ? (a) : (b))
#define TD_MAX(a, b)    ((a) > (b) ? (a) : (b))
#define TD_S(count)     ((count) == 1 ? "" : "s") /* behind a noun that is counted */

#define TD_HASH_SIZE 32 /* bytes of every SHA-256 value */

struct span { /* borrowed bytes, not NUL-terminated */
    const uint8_t *data;
    size_t size;
};

static inline size_t align_up(size_t n, size_t align)
{
    return (n + align - 1) / align * align;
}

static inline uint16_t load_le16(const void *p)
{
    const uint8_t *b = p;
    return (uint16_t)(b[0] | b[1] << 8);
}
static inline uint32_t load_le32(const void *p)
{
    const uint8_t *b = p;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}
static inline uint64_t load_le64(const void *p)
{
    return (uint64_t)load_le32(p) | (uint64_t)load_le32((const uint8_t *)p + 4) << 32;
}
static inline void store_le16(void *p, uint16_t v)
{
    uint8_t *b = p;
    b[0] = (uint8_t)v, b[1] = (uint8_t)(v >> 8);
}
static inline void store_le32(void *p, uint32_t v)
{
    store_le16(p, (uint16_t)v), store_le16((uint8_t *)p + 2, (uint16_t)(v >> 16));
}
static inline void store_le64(void *p, uint64_t v)
{
    store_le32(p, (uint32_t)v), store_le32((uint8_t *)p + 4, (uint32_t)(v >> 32));
}

struct reader { /* a bounded cursor over borrowed bytes */
    const uint8_t *next, *end;
    bool bad;
};
static inline struct reader reader_over(const void *data, size_t size)
{
    return (struct reader){data, (const uint8_t *)data + size, false};
}
static inline const uint8_t *reader_take(struct reader *r, size_t size)
{
    if (r->bad || size > (size_t)(r->end - r->next)) {
        r->bad = true;
        return NULL;
    }
    const uint8_t *p = r->next;
    r->next += size;
    return p;
}
static inline uint8_t reader_u8(struct reader *r)
{
    const uint8_t *p = reader_take(r, 1);
    return p ? *p : 0;
}
static inline uint16_t reader_u16(struct reader *r)
{
    const uint8_t *p = reader_take(r, 2);
    return p ? load_le16(p) : 0;
}
static inline uint32_t reader_u32(struct reader *r)
{
    const uint8_t *p = reader_take(r, 4);
    return p ? load_le32(p) : 0;
}
static inline uint64_t reader_u64(struct reader *r)
{
    const uint8_t *p = reader_take(r, 8);
    return p ? load_le64(p) : 0;
}

/* Time. Monotonic for intervals, wall for stored dates. Modules that must run under a fake clock take `now_us`
 * as an argument instead of calling these. */
uint64_t clock_mono_us(void);
uint64_t clock_wall_us(void);

/* hex_encode: out must hold 2 * size + 1 chars. hex_decode: returns 0 or -TD_ERR_FORMAT (size bytes wanted). */
void hex_encode(const void *data, size_t size, char *out);
int hex_decode(const char *text, void *out, size_t size);

/* f16 <-> f32, IEEE binary16, round to nearest even, subnormals kept. Bulk forms use F16C when the CPU has it and
 * give the same bits without it (NaN payloads are canonicalised to 0x7e00 | sign). */
float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);
void f16_to_f32_row(const uint16_t *src, float *dst, size_t count);
void f32_to_f16_row(const float *src, uint16_t *dst, size_t count);

/* crc32c: Castagnoli, as in iSCSI (reflected, init and xorout all ones); hardware when the CPU has it.
 * crc32c(0, "123456789", 9) == 0xe3069283; chain by passing the previous result. */
uint32_t crc32c(uint32_t crc, const void *data, size_t size);
uint32_t crc32c_portable(uint32_t crc, const void *data, size_t size); /* the twin without hardware */

#endif
