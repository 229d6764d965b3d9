/* kv_l0: the lossless codec. The high bytes of f16 values (sign, exponent, two bits of mantissa) are far from
 * evenly spread and shrink to 5-6 bits under zstd level 1, which here is little more than its entropy coder;
 * higher levels look for repeats that KV does not have. The low bytes are noise for values that were computed
 * in f16 or wider, and nearly empty for values that came from bf16: a sample of the plane decides whether
 * trying is worth the time.
 *
 * Payload: KV_FORMAT.md, L0. A plane that does not shrink is kept as it is, so the worst case is 8 bytes over
 * raw. */
#include "shared/kv_codec.h"
#include <zstd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define L0_ZSTD_LEVEL  1
#define L0_SAMPLE_SIZE 4096

enum plane_form { PLANE_RAW = 0, PLANE_ZSTD = 1 };

/* ---- planes -----------------------------------------------------------------------------------------------
 */

static void planes_split(const uint16_t *src, size_t count, uint8_t *high, uint8_t *low)
{
    size_t i = 0;
#if defined(__SSE2__)
    const __m128i mask = _mm_set1_epi16(0x00ff);
    for (; i + 16 <= count; i += 16) {
        __m128i a = _mm_loadu_si128((const __m128i *)(src + i)),
                b = _mm_loadu_si128((const __m128i *)(src + i + 8));
        __m128i l = _mm_packus_epi16(_mm_and_si128(a, mask), _mm_and_si128(b, mask));
        __m128i h = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
        _mm_storeu_si128((__m128i *)(low + i), l);
        _mm_storeu_si128((__m128i *)(high + i), h);
    }
#endif
    for (; i < count; i++) {
        low[i] = (uint8_t)src[i];
        high[i] = (uint8_t)(src[i] >> 8);
    }
}

static void planes_join(const uint8_t *high, const uint8_t *low, size_t count, uint16_t *dst)
{
    size_t i = 0;
#if defined(__SSE2__)
    for (; i + 16 <= count; i += 16) {
        __m128i l = _mm_loadu_si128((const __m128i *)(low + i)),
                h = _mm_loadu_si128((const __m128i *)(high + i));
        _mm_storeu_si128((__m128i *)(dst + i), _mm_unpacklo_epi8(l, h));
        _mm_storeu_si128((__m128i *)(dst + i + 8), _mm_unpackhi_epi8(l, h));
    }
#endif
    for (; i < count; i++)
        dst[i] = (uint16_t)(low[i] | high[i] << 8);
}

/* Would an entropy coder gain on this plane? Compares the chance that two bytes of a sample are equal with
 * that of even noise; the same bytes always give the same answer. */
static bool plane_is_uneven(const uint8_t *plane, size_t count)
{
    uint32_t histogram[256] = {0};
    size_t step = count / L0_SAMPLE_SIZE + 1, taken = 0;
    for (size_t i = 0; i < count; i += step, taken++)
        histogram[plane[i]]++;
    uint64_t pairs = 0;
    for (size_t v = 0; v < 256; v++)
        pairs += (uint64_t)histogram[v] * histogram[v];
    /* Even noise: pairs = taken^2 / 256 + taken, give or take. An eighth of a bit of entropy moves it by some
     * 20 %. */
    return pairs * 256 > (uint64_t)taken * taken * 5 / 4 + (uint64_t)taken * 256;
}

/* Write one plane in its shorter form; `try_zstd` false keeps it raw. Returns bytes written or
 * -TD_ERR_NOSPACE. */
static int64_t plane_encode(struct kv_codec_scratch *s, const uint8_t *plane, size_t count, bool try_zstd,
                            uint8_t *dst, size_t capacity, uint8_t *form)
{
    if (try_zstd && count > 1) {
        /* A destination one byte short of raw: zstd reports "too small" exactly when it would gain nothing.
         */
        size_t size =
            ZSTD_compressCCtx(s->compressor, dst, TD_MIN(capacity, count - 1), plane, count, L0_ZSTD_LEVEL);
        if (!ZSTD_isError(size)) {
            *form = PLANE_ZSTD;
            return (int64_t)size;
        }
    }
    if (capacity < count)
        return -TD_ERR_NOSPACE;
    memcpy(dst, plane, count);
    *form = PLANE_RAW;
    return (int64_t)count;
}

/* On success *plane points at the plane's bytes: into `data` if it is raw, else into `buffer`. */
static int plane_decode(struct kv_codec_scratch *s, uint8_t form, struct span data, uint8_t *buffer,
                        size_t count, const uint8_t **plane)
{
    if (form == PLANE_RAW) {
        *plane = data.data;
        return data.size == count ? 0 : -TD_ERR_FORMAT;
    }
    if (form != PLANE_ZSTD || ZSTD_getFrameContentSize(data.data, data.size) != count ||
        ZSTD_findFrameCompressedSize(data.data, data.size) != data.size)
        return -TD_ERR_FORMAT;
    size_t size = ZSTD_decompressDCtx(s->decompressor, buffer, count, data.data, data.size);
    if (ZSTD_isError(size) || size != count)
        return -TD_ERR_FORMAT;
    *plane = buffer;
    return 0;
}

/* ---- payload ----------------------------------------------------------------------------------------------
 */

int64_t kv_l0_encode(struct kv_codec_scratch *s, const uint16_t *src, size_t count, uint8_t *dst,
                     size_t capacity)
{
    if (capacity < KV_L0_HEAD_SIZE)
        return -TD_ERR_NOSPACE;
    planes_split(src, count, s->high, s->low);
    uint8_t high_form, low_form;
    size_t at = KV_L0_HEAD_SIZE;
    int64_t high_size = plane_encode(s, s->high, count, true, dst + at, capacity - at, &high_form);
    if (high_size < 0)
        return high_size;
    at += (size_t)high_size;
    bool try_low = plane_is_uneven(s->low, count);
    int64_t low_size = plane_encode(s, s->low, count, try_low, dst + at, capacity - at, &low_form);
    if (low_size < 0)
        return low_size;
    dst[0] = high_form;
    dst[1] = low_form;
    store_le16(dst + 2, 0);
    store_le32(dst + 4, (uint32_t)high_size);
    return (int64_t)at + low_size;
}

/* On success the planes point into the payload or into the scratch. */
static int planes_open(struct kv_codec_scratch *s, struct span payload, size_t count, const uint8_t **high,
                       const uint8_t **low)
{
    struct reader r = reader_over(payload.data, payload.size);
    uint8_t high_form = reader_u8(&r), low_form = reader_u8(&r);
    uint16_t reserved = reader_u16(&r);
    uint32_t high_size = reader_u32(&r);
    const uint8_t *high_data = reader_take(&r, high_size);
    if (r.bad || reserved != 0)
        return -TD_ERR_FORMAT;
    struct span high_span = {high_data, high_size}, low_span = {r.next, (size_t)(r.end - r.next)};
    int rc = plane_decode(s, high_form, high_span, s->high, count, high);
    return rc < 0 ? rc : plane_decode(s, low_form, low_span, s->low, count, low);
}

int kv_l0_planes(struct kv_codec_scratch *s, struct span payload, size_t count, uint8_t *high, uint8_t *low)
{
    const uint8_t *high_plane, *low_plane;
    int rc = planes_open(s, payload, count, &high_plane, &low_plane);
    if (rc < 0)
        return rc;
    memcpy(high, high_plane, count);
    memcpy(low, low_plane, count);
    return 0;
}

int kv_l0_decode(struct kv_codec_scratch *s, struct span payload, uint16_t *dst, size_t count)
{
    const uint8_t *high, *low;
    int rc = planes_open(s, payload, count, &high, &low);
    if (rc == 0)
        planes_join(high, low, count, dst);
    return rc;
}
