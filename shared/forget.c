/* forget: see forget.h. The C library's own free is reached through its exported twin; realloc must not move a block by itself, or
 * the old place would keep the content. */
#include "shared/forget.h"
#include <malloc.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FORGET_HEAP 0
#elif defined(__has_feature)
#define FORGET_HEAP 0 /* clang: only fuzzers and sanitizers are built with it */
#elif defined(__GLIBC__)
#define FORGET_HEAP 1
#else
#define FORGET_HEAP 0
#endif

#if FORGET_HEAP
/* flag in the size word in front of a block: it goes back to the system as a whole */
#define MMAPPED_CHUNK 2u

void __libc_free(void *block);
void *__libc_malloc(size_t size);
void *__libc_realloc(void *block, size_t size);

static bool enabled;

static bool is_mapped(const void *block)
{
    return (((const size_t *)block)[-1] & MMAPPED_CHUNK) != 0;
}

void free(void *block)
{
    if (block && enabled && !is_mapped(block)) {
        memset(block, 0, malloc_usable_size(block));
        __asm__ volatile("" : : "r"(block) : "memory");
    }
    __libc_free(block);
}

void *realloc(void *block, size_t size)
{
    if (!block || !enabled || size == 0 || is_mapped(block))
        return __libc_realloc(block, size);
    size_t old_size = malloc_usable_size(block);
    if (size <= old_size && size >= old_size / 2)
        return block;
    void *moved = __libc_malloc(size);
    if (!moved)
        return NULL;
    memcpy(moved, block, size < old_size ? size : old_size);
    free(block);
    return moved;
}

void forget_enable(void)
{
    enabled = true;
}
#else
void forget_enable(void)
{
}
#endif
