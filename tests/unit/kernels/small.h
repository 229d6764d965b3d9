/* small: with TANDEM_TEST_SMALL in the environment the CUDA tests take few cases of each kind, small ones: under compute-sanitizer a kernel takes a
 * thousand times as long. */
#ifndef TANDEM_TESTS_KERNELS_SMALL_H
#define TANDEM_TESTS_KERNELS_SMALL_H
#include <stddef.h>
#include <stdlib.h>

/* How many of a list are taken: the first `few`, or all. */
static inline size_t small_or(size_t few, size_t all)
{
    return getenv("TANDEM_TEST_SMALL") ? few : all;
}

#endif
