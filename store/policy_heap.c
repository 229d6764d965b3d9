/* policy_heap: pairing heaps over a policy's entries (Fredman et al., 1986). Any entry can be taken out, not only the root. */
#include "store/policy_internal.h"

static struct policy_links *links(const struct policy *p, enum policy_order order, uint32_t index)
{
    return &entry_at(p, index)->links[order];
}

/* Join two heaps without siblings; either may be 0. */
static uint32_t join(const struct policy *p, enum policy_order order, uint32_t a, uint32_t b)
{
    if (!a || !b)
        return a ? a : b;
    if (entry_at(p, b)->sequence < entry_at(p, a)->sequence) {
        uint32_t swap = a;
        a = b;
        b = swap;
    }
    struct policy_links *above = links(p, order, a), *below = links(p, order, b);
    below->next = above->child;
    below->previous = a;
    if (above->child)
        links(p, order, above->child)->previous = b;
    above->child = b;
    return a;
}

/* Join the siblings from `first` on: in pairs from left to right, then the pairs from right to left. */
static uint32_t join_siblings(const struct policy *p, enum policy_order order, uint32_t first)
{
    uint32_t pairs = 0, heap = 0; /* pairs: a stack, through `next` */
    while (first) {
        uint32_t second = links(p, order, first)->next, rest = second ? links(p, order, second)->next : 0;
        links(p, order, first)->next = 0;
        if (second)
            links(p, order, second)->next = 0;
        uint32_t pair = join(p, order, first, second);
        links(p, order, pair)->next = pairs;
        pairs = pair;
        first = rest;
    }
    while (pairs) {
        uint32_t pair = pairs;
        pairs = links(p, order, pair)->next;
        links(p, order, pair)->next = 0;
        heap = join(p, order, heap, pair);
    }
    if (heap)
        links(p, order, heap)->previous = 0;
    return heap;
}

void policy_heap_add(const struct policy *p, enum policy_order order, uint32_t *root, uint32_t index)
{
    *links(p, order, index) = (struct policy_links){0};
    *root = join(p, order, *root, index);
}

void policy_heap_remove(const struct policy *p, enum policy_order order, uint32_t *root, uint32_t index)
{
    struct policy_links *l = links(p, order, index);
    uint32_t below = join_siblings(p, order, l->child);
    if (*root == index) {
        *root = below;
        return;
    }
    struct policy_links *before = links(p, order, l->previous);
    if (before->child == index)
        before->child = l->next;
    else
        before->next = l->next;
    if (l->next)
        links(p, order, l->next)->previous = l->previous;
    *root = join(p, order, *root, below);
}
