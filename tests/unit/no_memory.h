/* no_memory: a thread whose n-th allocation from now on fails. For programs that are linked with --wrap=malloc,--wrap=calloc,--wrap=realloc,
 * --wrap=aligned_alloc,--wrap=strdup: so it works under sanitizers, which then see what is not given back; shared libraries go on as ever. */
#ifndef TANDEM_TESTS_NO_MEMORY_H
#define TANDEM_TESTS_NO_MEMORY_H
#include <stdbool.h>
#include <stddef.h>

static _Thread_local struct {
    int left;    /* the n-th fails; 0: none */
    bool failed; /* it came to that */
} no_memory;

static inline void no_memory_at(int n)
{
    no_memory.left = n;
    no_memory.failed = false;
}

/* Ends it. Was there an n-th? */
static inline bool no_memory_came(void)
{
    no_memory.left = 0;
    return no_memory.failed;
}

static inline bool no_memory_now(void)
{
    if (no_memory.left == 0 || --no_memory.left > 0)
        return false;
    no_memory.failed = true;
    return true;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *p, size_t size);
void *__real_aligned_alloc(size_t alignment, size_t size);
char *__real_strdup(const char *text);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *p, size_t size);
void *__wrap_aligned_alloc(size_t alignment, size_t size);
char *__wrap_strdup(const char *text);

void *__wrap_malloc(size_t size)
{
    return no_memory_now() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return no_memory_now() ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *p, size_t size)
{
    return no_memory_now() ? NULL : __real_realloc(p, size);
}

void *__wrap_aligned_alloc(size_t alignment, size_t size)
{
    return no_memory_now() ? NULL : __real_aligned_alloc(alignment, size);
}

char *__wrap_strdup(const char *text)
{
    return no_memory_now() ? NULL : __real_strdup(text);
}

#endif
