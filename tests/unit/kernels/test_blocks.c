/* blocks: every quantised type opens to the values that an independent reader finds in the same bytes. */
#include "kernels/cpu/blocks.h"
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>
#include "dequantised.h"

#define BLOCK_VALUES 256

static void every_type_gives_the_reference_values(void **state)
{
    (void)state;
    for (size_t n = 0; n < TD_COUNT(dequantised); n++) {
        float values[BLOCK_VALUES];
        weight_row_to_f32(dequantised[n].type, dequantised[n].bytes, 0, BLOCK_VALUES, values);
        for (unsigned i = 0; i < BLOCK_VALUES; i++) {
            /* the package multiplies in another order for some types: a unit in the last place of the largest term */
            float bound = 1e-6f * (fabsf(dequantised[n].values[i]) + 128.0f);
            if (!(fabsf(values[i] - dequantised[n].values[i]) <= bound))
                fail_msg("type %u value %u: %g, reference %g", dequantised[n].type, i, (double)values[i],
                         (double)dequantised[n].values[i]);
        }
    }
}

static void part_of_a_row_equals_the_row(void **state)
{
    (void)state;
    for (size_t n = 0; n < TD_COUNT(dequantised); n++) {
        float all[BLOCK_VALUES], part[64];
        weight_row_to_f32(dequantised[n].type, dequantised[n].bytes, 0, BLOCK_VALUES, all);
        weight_row_to_f32(dequantised[n].type, dequantised[n].bytes, 96, 64, part);
        assert_memory_equal(part, all + 96, sizeof part);
    }
}

/* dw * (code - offset) + mw, the terms that products are made of, is the same value again. */
static void terms_of_a_block_make_up_its_values(void **state)
{
    (void)state;
    for (size_t n = 0; n < TD_COUNT(dequantised); n++) {
        uint32_t type = dequantised[n].type;
        for (unsigned i = 0; i < BLOCK_VALUES; i++) {
            struct weight_block b;
            weight_block_read(type, dequantised[n].bytes, i / 32, &b);
            double scale = type == GGUF_Q6_K ? b.scale[i % 32 / 16] : 1;
            double value =
                (double)weight_block_d(type, &b) * scale * (b.code[i % 32] - weight_code_offset(type));
            value += weight_has_minimum(type) ? (double)weight_block_m(type, &b) : 0.0;
            assert_true(fabs(value - (double)dequantised[n].values[i]) <= 1e-6 * (fabs(value) + 128));
        }
    }
}

static void float_types(void **state)
{
    (void)state;
    float out[2];
    uint8_t bytes[9] = {0};
    memcpy(bytes + 1, (const float[]){1.5f, -2.0f}, 8); /* unaligned on purpose */
    weight_row_to_f32(GGUF_F32, bytes + 1, 0, 2, out);
    assert_true(out[0] == 1.5f && out[1] == -2.0f);
    weight_row_to_f32(GGUF_F16, (const uint8_t[]){0x00, 0x3e, 0x00, 0xc0}, 0, 2, out);
    assert_true(out[0] == 1.5f && out[1] == -2.0f);
    weight_row_to_f32(GGUF_BF16, (const uint8_t[]){0xc0, 0x3f, 0x00, 0xc0}, 0, 2, out);
    assert_true(out[0] == 1.5f && out[1] == -2.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_gives_the_reference_values),
        cmocka_unit_test(part_of_a_row_equals_the_row),
        cmocka_unit_test(terms_of_a_block_make_up_its_values),
        cmocka_unit_test(float_types),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
