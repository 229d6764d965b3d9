/* kv_l2: sign-flipped Hadamard, means taken out, 4 or 5 bits with a log scale for 64 values. KV_FORMAT.md has
 * the bytes, the encoder's rules and what each of them gains.
 *
 * Invariants
 *   - Every size follows from the head of the piece; a payload of another size is refused before it is read.
 *   - Decoded values are finite whatever the bytes are.
 *   - Plain C and AVX2 (kv_l2_avx2.c) give the same bits: both make the same f32 operations in the same order,
 *     and largest values do not depend on an order. Head sizes that are no multiple of 64 are always plain.
 *
 * A head's rows are transformed once, into scratch, as its mean is known only after the last of them. */
#include "shared/kv_codec.h"
#include <math.h>

#define GRID_ZERO 120 /* scale index of 1.0 */
#define F16_MAX   65504.0f
#define WIDE_BITS 4 /* that a wide row has more */

const uint8_t KV_L2_SIGNS[KV_HEAD_DIM_MAX / 8] =
    {/* SHA-512("tandem-kv-l2"): bit i set: value i of a row changes its sign */
     0xaa, 0xf0, 0x22, 0x6d, 0xb7, 0x6f, 0x9e, 0x5e, 0x3a, 0x22, 0x94, 0x88, 0x32, 0x38, 0x7b, 0x41,
     0x05, 0xa2, 0xdd, 0xda, 0x4c, 0xed, 0xd2, 0x17, 0xa4, 0x8d, 0x67, 0x1b, 0x5d, 0x00, 0x1a, 0x43,
     0x39, 0xef, 0x9f, 0x61, 0x51, 0x52, 0xb4, 0x0b, 0x47, 0xa3, 0x2b, 0xfb, 0xf3, 0x80, 0xbc, 0xbb,
     0x71, 0xd2, 0x1c, 0x05, 0x4b, 0x25, 0xc9, 0x3e, 0x11, 0x12, 0x1b, 0x08, 0xe2, 0xf2, 0x43, 0xa2};

static const float ZEROS[KV_HEAD_DIM_MAX];

/* ---- form -------------------------------------------------------------------------------------------------
 */

struct kv_l2_form kv_l2_form_of(const struct kv_piece_head *head)
{
    return (struct kv_l2_form){.head_count = head->kv_head_count,
                               .token_count = head->token_count,
                               .dim = head->head_dim,
                               .bits = 4u + head->table,
                               .wide = head->block_index == 0 && head->first_token == 0};
}

static uint32_t group_count(uint32_t dim)
{
    return (dim + KV_GROUP - 1) / KV_GROUP;
}
static uint32_t group_values(uint32_t dim, uint32_t group)
{
    return TD_MIN(dim - group * KV_GROUP, (uint32_t)KV_GROUP);
}
/* Bytes of a row when each group begins on a byte. Whole groups have whole bytes. */
static uint32_t row_low_size(uint32_t dim)
{
    return (dim + 1) / 2;
}
static uint32_t row_fifth_size(uint32_t dim)
{
    return (dim + 7) / 8;
}

struct parts { /* offsets of the payload's fields, and its size */
    uint32_t flag_size, low_size, fifth_size, groups, rows;
    size_t scales, low, fifth, wide, size;
};

static struct parts parts_of(const struct kv_l2_form *f)
{
    struct parts p = {.flag_size = (f->token_count + 7) / 8,
                      .low_size = row_low_size(f->dim),
                      .fifth_size = f->bits > 4 ? row_fifth_size(f->dim) : 0,
                      .groups = group_count(f->dim),
                      .rows = 1 + f->token_count};
    size_t rows = (size_t)f->head_count * p.rows;
    p.scales = (size_t)f->head_count * p.flag_size;
    p.low = p.scales + rows * p.groups;
    p.fifth = p.low + rows * p.low_size;
    p.wide = p.fifth + rows * p.fifth_size;
    p.size = p.wide + (f->wide ? (size_t)f->head_count * p.low_size : 0);
    return p;
}

size_t kv_l2_size(const struct kv_l2_form *f)
{
    return parts_of(f).size;
}

/* The codes of a row of a head; `wide` only where the row has wide codes. */
static struct kv_l2_codes row_codes(const struct parts *p, uint8_t *payload, uint32_t head, uint32_t row,
                                    bool wide)
{
    size_t index = (size_t)head * p->rows + row;
    return (struct kv_l2_codes){.low = payload + p->low + index * p->low_size,
                                .fifth = p->fifth_size ? payload + p->fifth + index * p->fifth_size : NULL,
                                .wide = wide ? payload + p->wide + (size_t)head * p->low_size : NULL};
}
static struct kv_l2_codes group_codes(struct kv_l2_codes row, uint32_t group)
{
    size_t low = (size_t)group * (KV_GROUP / 2);
    return (struct kv_l2_codes){.low = row.low + low,
                                .fifth = row.fifth ? row.fifth + (size_t)group * (KV_GROUP / 8) : NULL,
                                .wide = row.wide ? row.wide + low : NULL};
}

/* ---- scales -----------------------------------------------------------------------------------------------
 */

/* The smallest index whose step holds `peak` for codes of so many bits. */
static uint8_t scale_index(float peak, unsigned bits)
{
    /* Steps that a group's largest value may be away from 0: a little more than codes reach. */
    const float reach = bits == 4 ? 8.375f : bits == 5 ? 16.5f : bits == 8 ? 128.0f : 256.0f;
    if (peak == 0)
        return 0;
    float step = peak * (1.0f / reach);
    uint32_t raw;
    memcpy(&raw, &step, sizeof raw);
    int index = GRID_ZERO + 8 * ((int)(raw >> 23) - 127);
    for (size_t i = 0; i < TD_COUNT(KV_GRID_MANTISSAS); i++)
        index += (raw & 0x7fffff) > KV_GRID_MANTISSAS[i];
    return (uint8_t)(index < 1 ? 1 : index > 255 ? 255 : index);
}

static float step_of(uint8_t index)
{
    return index ? kv_power(index - GRID_ZERO) : 0.0f;
}
static float inverse_of(uint8_t index)
{
    return index ? kv_power(GRID_ZERO - index) : 0.0f;
}

/* ---- plain C ----------------------------------------------------------------------------------------------
 */

static bool is_negative(uint32_t i)
{
    return KV_L2_SIGNS[i / 8] >> i % 8 & 1;
}

/* The largest power of two that is at most `left`: the next block of a row. */
static uint32_t block_size(uint32_t left)
{
    return 1u << (31 - __builtin_clz(left));
}

/* Transform all blocks of a row; each is then multiplied by 2^-(exponent / 2), rounded up or down. */
static void transform(float *y, uint32_t dim, bool round_up)
{
    for (uint32_t left = dim, n; left > 0; left -= n, y += n) {
        n = block_size(left);
        for (uint32_t step = 1; step < n; step *= 2)
            for (uint32_t base = 0; base < n; base += 2 * step)
                for (uint32_t i = base; i < base + step; i++) {
                    float a = y[i], b = y[i + step];
                    y[i] = a + b;
                    y[i + step] = a - b;
                }
        int exponent = __builtin_ctz(n);
        float factor = kv_power(-8 * ((exponent + round_up) / 2));
        for (uint32_t i = 0; i < n; i++)
            y[i] *= factor;
    }
}

static bool forward_portable(const uint16_t *src, uint32_t dim, float *y)
{
    if (!kv_f16_all_finite(src, dim))
        return false;
    for (uint32_t i = 0; i < dim; i++) {
        float x = f16_to_f32(src[i]);
        y[i] = is_negative(i) ? -x : x;
    }
    transform(y, dim, true);
    return true;
}

static void inverse_portable(float *y, uint32_t dim, uint16_t *dst)
{
    transform(y, dim, false);
    for (uint32_t i = 0; i < dim; i++) {
        float x = is_negative(i) ? -y[i] : y[i];
        dst[i] = f32_to_f16(x < -F16_MAX ? -F16_MAX : x > F16_MAX ? F16_MAX : x);
    }
}

static void add_portable(float *sum, const float *y, uint32_t dim)
{
    for (uint32_t i = 0; i < dim; i++)
        sum[i] += y[i];
}

static void peaks_portable(const float *y, const float *mean, uint32_t count, float *plain, float *rest)
{
    float a = 0, b = 0;
    for (uint32_t i = 0; i < count; i++) {
        float x = fabsf(y[i]), r = fabsf(y[i] - mean[i]);
        a = x > a ? x : a;
        b = r > b ? r : b;
    }
    *plain = a;
    *rest = b;
}

static unsigned code_bits(const void *fifth, const void *wide)
{
    return 4u + (fifth ? 1 : 0) + (wide ? WIDE_BITS : 0);
}

static void put_portable(const float *y, const float *mean, uint32_t count, float inverse,
                         struct kv_l2_codes codes)
{
    unsigned bits = code_bits(codes.fifth, codes.wide);
    int most = (1 << bits) - 1;
    float middle = (float)most / 2;
    uint32_t half = (count + 1) / 2;
    memset(codes.low, 0, half);
    if (codes.wide)
        memset(codes.wide, 0, half);
    if (codes.fifth)
        memset(codes.fifth, 0, (count + 7) / 8);
    for (uint32_t i = 0; i < count; i++) {
        int q = kv_round_even((y[i] - mean[i]) * inverse + middle);
        q = q < 0 ? 0 : q > most ? most : q;
        uint32_t at = i < half ? i : i - half;
        unsigned shift = i < half ? 0 : 4;
        if (codes.wide) {
            codes.wide[at] |= (uint8_t)((q & 15) << shift);
            q >>= WIDE_BITS;
        }
        codes.low[at] |= (uint8_t)((q & 15) << shift);
        if (codes.fifth)
            codes.fifth[i / 8] |= (uint8_t)(q >> 4 << i % 8);
    }
}

static void get_portable(struct kv_l2_const_codes codes, uint32_t count, float step, const float *mean,
                         float *y)
{
    unsigned bits = code_bits(codes.fifth, codes.wide);
    float middle = (float)((1 << bits) - 1) / 2;
    uint32_t half = (count + 1) / 2;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = i < half ? i : i - half;
        unsigned shift = i < half ? 0 : 4;
        int q = codes.low[at] >> shift & 15;
        if (codes.fifth)
            q += (codes.fifth[i / 8] >> i % 8 & 1) << 4;
        if (codes.wide)
            q = q << WIDE_BITS | (codes.wide[at] >> shift & 15);
        /* A mean of +0 also turns the -0 of step 0 into +0. */
        y[i] = ((float)q - middle) * step + mean[i];
    }
}

const struct kv_l2_ops kv_l2_portable = {.forward = forward_portable,
                                         .inverse = inverse_portable,
                                         .add = add_portable,
                                         .peaks = peaks_portable,
                                         .put = put_portable,
                                         .get = get_portable};

static const struct kv_l2_ops *ops_for(uint32_t dim)
{
    const struct kv_l2_ops *fast = dim % KV_GROUP == 0 ? kv_l2_avx2() : NULL;
    return fast ? fast : &kv_l2_portable;
}

/* ---- encode -----------------------------------------------------------------------------------------------
 */

struct row_peaks {
    float group[KV_HEAD_DIM_MAX / KV_GROUP], all;
};

static void row_encode(const struct kv_l2_ops *ops, uint32_t dim, const float *y, const float *mean,
                       const struct row_peaks *peaks, uint8_t *scales, struct kv_l2_codes row)
{
    const struct kv_l2_ops *o = row.wide ? &kv_l2_portable : ops;
    unsigned bits = code_bits(row.fifth, row.wide);
    for (uint32_t g = 0; g < group_count(dim); g++) {
        scales[g] = scale_index(peaks->group[g], bits);
        o->put(y + g * KV_GROUP, mean + g * KV_GROUP, group_values(dim, g), inverse_of(scales[g]),
               group_codes(row, g));
    }
}

static void row_decode(const struct kv_l2_ops *ops, uint32_t dim, const uint8_t *scales,
                       struct kv_l2_codes row, const float *mean, float *y)
{
    const struct kv_l2_ops *o = row.wide ? &kv_l2_portable : ops;
    for (uint32_t g = 0; g < group_count(dim); g++) {
        struct kv_l2_codes c = group_codes(row, g);
        o->get((struct kv_l2_const_codes){c.low, c.fifth, c.wide}, group_values(dim, g), step_of(scales[g]),
               mean + g * KV_GROUP, y + g * KV_GROUP);
    }
}

static void row_peaks_find(const struct kv_l2_ops *ops, uint32_t dim, const float *y, const float *mean,
                           struct row_peaks *plain, struct row_peaks *rest)
{
    plain->all = rest->all = 0;
    for (uint32_t g = 0; g < group_count(dim); g++) {
        ops->peaks(y + g * KV_GROUP, mean + g * KV_GROUP, group_values(dim, g), &plain->group[g],
                   &rest->group[g]);
        plain->all = TD_MAX(plain->all, plain->group[g]);
        rest->all = TD_MAX(rest->all, rest->group[g]);
    }
}

/* Transform a head's rows into scratch, and leave in `mean` what its row 0 will decode to. */
static bool head_begin(const struct kv_l2_ops *ops, const struct kv_l2_form *f, const uint16_t *src,
                       float *rows, float *mean, uint8_t *scales, struct kv_l2_codes row)
{
    float sum[KV_HEAD_DIM_MAX] = {0};
    for (uint32_t t = 0; t < f->token_count; t++) {
        if (!ops->forward(src + (size_t)t * f->dim, f->dim, rows + (size_t)t * f->dim))
            return false;
        ops->add(sum, rows + (size_t)t * f->dim, f->dim);
    }
    float share = 1.0f / (float)f->token_count;
    for (uint32_t i = 0; i < f->dim; i++)
        sum[i] *= share;
    struct row_peaks plain, rest;
    row_peaks_find(ops, f->dim, sum, ZEROS, &plain, &rest);
    row_encode(ops, f->dim, sum, ZEROS, &plain, scales, row);
    row_decode(ops, f->dim, scales, row, ZEROS, mean);
    return true;
}

static bool head_encode(const struct kv_l2_ops *ops, const struct kv_l2_form *f, const struct parts *p,
                        uint32_t head, const uint16_t *src, float *rows, uint8_t *payload)
{
    float mean[KV_HEAD_DIM_MAX];
    uint8_t *flags = payload + (size_t)head * p->flag_size;
    uint8_t *scales = payload + p->scales + (size_t)head * p->rows * p->groups;
    if (!head_begin(ops, f, src, rows, mean, scales, row_codes(p, payload, head, 0, false)))
        return false;
    memset(flags, 0, p->flag_size);
    for (uint32_t t = 0; t < f->token_count; t++) {
        const float *y = rows + (size_t)t * f->dim;
        struct row_peaks plain, rest;
        row_peaks_find(ops, f->dim, y, mean, &plain, &rest);
        bool residual = rest.all < plain.all;
        flags[t / 8] |= (uint8_t)(residual << t % 8);
        row_encode(ops, f->dim, y, residual ? mean : ZEROS, residual ? &rest : &plain,
                   scales + (size_t)(1 + t) * p->groups,
                   row_codes(p, payload, head, 1 + t, f->wide && t == 0));
    }
    return true;
}

int64_t kv_l2_encode(struct kv_codec_scratch *s, const struct kv_l2_form *f, const uint16_t *src,
                     uint8_t *dst, size_t capacity)
{
    struct parts p = parts_of(f);
    if (capacity < p.size)
        return -TD_ERR_NOSPACE;
    const struct kv_l2_ops *ops = ops_for(f->dim);
    for (uint32_t h = 0; h < f->head_count; h++, src += (size_t)f->token_count * f->dim)
        if (!head_encode(ops, f, &p, h, src, s->rows, dst))
            return -TD_ERR_FORMAT;
    return (int64_t)p.size;
}

/* ---- decode -----------------------------------------------------------------------------------------------
 */

/* Are the bits behind the last value of a row's fields 0? Only a row's last group can have any. */
static bool row_padding_is_zero(uint32_t dim, struct kv_l2_codes row)
{
    uint8_t any = 0;
    if (dim % 2) {
        any |= (uint8_t)(row.low[row_low_size(dim) - 1] & 0xf0);
        any |= (uint8_t)(row.wide ? row.wide[row_low_size(dim) - 1] & 0xf0 : 0);
    }
    if (row.fifth && dim % 8)
        any |= (uint8_t)(row.fifth[row_fifth_size(dim) - 1] >> dim % 8);
    return any == 0;
}

static bool head_decode(const struct kv_l2_ops *ops, const struct kv_l2_form *f, const struct parts *p,
                        uint32_t head, const uint8_t *payload, uint16_t *dst)
{
    float mean[KV_HEAD_DIM_MAX] = {0}, y[KV_HEAD_DIM_MAX];
    const uint8_t *flags = payload + (size_t)head * p->flag_size;
    const uint8_t *scales = payload + p->scales + (size_t)head * p->rows * p->groups;
    bool good = f->token_count % 8 == 0 || flags[p->flag_size - 1] >> f->token_count % 8 == 0;
    for (uint32_t r = 0; r < p->rows && good; r++, scales += p->groups) {
        struct kv_l2_codes row = row_codes(p, (uint8_t *)payload, head, r, f->wide && r == 1);
        bool residual = r > 0 && (flags[(r - 1) / 8] >> (r - 1) % 8 & 1);
        good = row_padding_is_zero(f->dim, row);
        row_decode(ops, f->dim, scales, row, residual ? mean : ZEROS, r == 0 ? mean : y);
        if (r > 0)
            ops->inverse(y, f->dim, dst + (size_t)(r - 1) * f->dim);
    }
    return good;
}

int kv_l2_decode(const struct kv_l2_form *f, struct span payload, uint16_t *dst)
{
    struct parts p = parts_of(f);
    if (payload.size != p.size)
        return -TD_ERR_FORMAT;
    const struct kv_l2_ops *ops = ops_for(f->dim);
    for (uint32_t h = 0; h < f->head_count; h++, dst += (size_t)f->token_count * f->dim)
        if (!head_decode(ops, f, &p, h, payload.data, dst))
            return -TD_ERR_FORMAT;
    return 0;
}
