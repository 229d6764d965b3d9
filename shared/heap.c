/* heap: see heap.h. */
#include "shared/heap.h"

#include <stdlib.h> /* says whether this is glibc */

#ifdef __GLIBC__
#include <malloc.h>
#endif

void heap_settle(void)
{
#ifdef __GLIBC__
    mallopt(M_ARENA_MAX, HEAP_ARENAS_MAX);
    mallopt(M_MMAP_THRESHOLD, HEAP_LARGE_SIZE); /* which also ends its growing */
#endif
}

void heap_trim(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}
