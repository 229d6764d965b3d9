/* page_pool: which KV pages are free, and who holds the others. Bookkeeping only: the bytes of a page lie in the backend
 * (host or device). A page holds one block: KV_BLOCK_TOKENS positions of the layers that this side keeps.
 *   layout of a page's bytes: [layer][K|V][kv_head][token][head_dim] f16, K after RoPE; one layer is contiguous.
 * References: alloc gives one; share adds one; release drops one; a page at zero is free again. A page with more than
 * one reference is read-only; who wants to write takes a page of its own. One thread owns a pool. */
#ifndef TANDEM_KERNELS_PAGE_POOL_H
#define TANDEM_KERNELS_PAGE_POOL_H
#include "shared/base.h"
#include "shared/status.h"

#define PAGE_NONE UINT32_MAX

struct page_pool;
struct page_pool *page_pool_create(uint32_t page_count); /* NULL without memory */
void page_pool_destroy(struct page_pool *p);
uint32_t page_pool_alloc(struct page_pool *p); /* PAGE_NONE when full */
void page_pool_share(struct page_pool *p, uint32_t page);
void page_pool_release(struct page_pool *p, uint32_t page);
uint32_t page_pool_references(const struct page_pool *p, uint32_t page);
uint32_t page_pool_free_count(const struct page_pool *p);
/* Pages from here on have never been taken. */
uint32_t page_pool_used_until(const struct page_pool *p);
uint32_t page_pool_count(const struct page_pool *p);

#endif
