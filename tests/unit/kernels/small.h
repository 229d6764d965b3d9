/* small: with TANDEM_TEST_SMALL in the environment the CUDA tests take few cases of each kind, small ones: under compute-sanitizer a kernel takes a
 * thousand times as long. "races" leaves out, besides, what racecheck does not understand. */
#ifndef TANDEM_TESTS_KERNELS_SMALL_H
#define TANDEM_TESTS_KERNELS_SMALL_H
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* How many of a list are taken: the first `few`, or all. */
static inline size_t small_or(size_t few, size_t all)
{
    return getenv("TANDEM_TEST_SMALL") ? few : all;
}

static inline bool small_for_races(void)
{
    const char *small = getenv("TANDEM_TEST_SMALL");
    return small && strcmp(small, "races") == 0;
}

#endif
