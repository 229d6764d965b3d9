/* sim_text: what the toy model says and what the toy layers compute, as functions of names alone. The id after a sequence depends on the seed
 * and on every id before it, and not on which of them were prompt and which were reply: so a reply that is continued from
 * adopted tokens is the same as one never interrupted, and any lost, doubled or swapped token changes all that follow. */
#include "sim.h"

uint64_t text_mix(uint64_t a, uint64_t b)
{
    struct rng r = {a * UINT64_C(0x2545f4914f6cdd1d) ^ b};
    return rng_next(&r);
}

uint64_t text_fold(uint64_t state, int32_t id)
{
    return text_mix(state, (uint64_t)(uint32_t)id);
}

uint64_t text_begin(uint64_t seed, const int32_t *prompt, uint32_t count)
{
    uint64_t state = text_mix(seed, 1);
    for (uint32_t i = 0; i < count; i++)
        state = text_fold(state, prompt[i]);
    return state;
}

int32_t text_next(uint64_t state)
{
    return (int32_t)(text_mix(state, 2) % 50000);
}

int32_t text_other(int32_t next)
{
    return (next + 1) % 50000;
}

bool text_ends(int32_t id)
{
    return id % 151 == 0;
}

void content_fill(uint8_t *bytes, size_t size, uint64_t name)
{
    struct rng r = {name};
    for (size_t i = 0; i < size; i += 8) {
        uint64_t value = rng_next(&r);
        memcpy(bytes + i, &value, TD_MIN(size - i, sizeof value));
    }
}

bool content_is(const uint8_t *bytes, size_t size, uint64_t name)
{
    struct rng r = {name};
    for (size_t i = 0; i < size; i += 8) {
        uint64_t value = rng_next(&r);
        if (memcmp(bytes + i, &value, TD_MIN(size - i, sizeof value)) != 0)
            return false;
    }
    return true;
}

uint64_t content_hidden(const int32_t *prompt, uint32_t first_token)
{
    return text_mix(text_begin(0, prompt, 4), 1000000 + first_token);
}

uint64_t content_piece(const int32_t *prompt, uint32_t block, uint32_t layer, bool is_value)
{
    return text_mix(text_begin(0, prompt, 4), 2000000 + (uint64_t)block * 1000 + layer * 2 + is_value);
}
