/* page_pool: a stack of free pages and a reference count for each page. A page is on the stack exactly when
 * its count is zero; both arrays are taken once. Wrong use (releasing a free page) is the caller's mistake
 * and asserts. */
#include "kernels/page_pool.h"
#include <assert.h>
#include <stdlib.h>

struct page_pool {
    uint32_t page_count, free_count;
    uint32_t unused_count; /* never taken: the last ones, at the bottom of the stack */
    uint32_t *references;  /* [page_count] */
    uint32_t *free;        /* [page_count]; the last of free_count is taken next */
};

struct page_pool *page_pool_create(uint32_t page_count)
{
    struct page_pool *p = calloc(1, sizeof *p);
    if (!p || page_count == PAGE_NONE)
        goto fail;
    p->page_count = p->free_count = p->unused_count = page_count;
    p->references = calloc((size_t)page_count + 1, sizeof *p->references);
    p->free = calloc((size_t)page_count + 1, sizeof *p->free);
    if (!p->references || !p->free)
        goto fail;
    for (uint32_t i = 0; i < page_count; i++)
        p->free[i] = page_count - 1 - i; /* low pages first: they stay warm in the caches */
    return p;
fail:
    page_pool_destroy(p);
    return NULL;
}

void page_pool_destroy(struct page_pool *p)
{
    if (!p)
        return;
    free(p->references);
    free(p->free);
    free(p);
}

uint32_t page_pool_alloc(struct page_pool *p)
{
    if (p->free_count == 0)
        return PAGE_NONE;
    uint32_t page = p->free[--p->free_count];
    assert(p->references[page] == 0);
    p->references[page] = 1;
    p->unused_count = TD_MIN(p->unused_count, p->free_count);
    return page;
}

void page_pool_share(struct page_pool *p, uint32_t page)
{
    assert(page < p->page_count && p->references[page] > 0 && p->references[page] < UINT32_MAX);
    p->references[page]++;
}

void page_pool_release(struct page_pool *p, uint32_t page)
{
    assert(page < p->page_count && p->references[page] > 0);
    if (--p->references[page] == 0)
        p->free[p->free_count++] = page;
}

uint32_t page_pool_references(const struct page_pool *p, uint32_t page)
{
    assert(page < p->page_count);
    return p->references[page];
}

uint32_t page_pool_free_count(const struct page_pool *p)
{
    return p->free_count;
}

uint32_t page_pool_used_until(const struct page_pool *p)
{
    return p->page_count - p->unused_count;
}

uint32_t page_pool_count(const struct page_pool *p)
{
    return p->page_count;
}
