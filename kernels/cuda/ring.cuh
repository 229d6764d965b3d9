/* ring: slots in shared memory that one warp keeps full through the copy engine while others work on what has come; and pages of KV
 * in it. The feeder runs ahead of the workers, but has at most `ahead` slots on their way: that is enough to keep memory busy, and
 * more would only make everything else that the SM asks for wait behind it. */
#pragma once
#include "attention_decode.cuh"
#include "early.cuh"

#define SLOTS_MAX 8

struct bells {
    uint64_t full[SLOTS_MAX], empty[SLOTS_MAX];
};

struct ring { /* one side's view */
    uint8_t *slots;
    bells *b;
    uint32_t slot_size, count, at, parity, ahead, fed;
    __device__ __forceinline__ uint8_t *slot() const
    {
        return slots + at * slot_size;
    }
    __device__ __forceinline__ uint8_t *page() const /* in the slot, where a page begins */
    {
        return slots + (at * slot_size + 1023) / 1024 * 1024;
    }
    __device__ __forceinline__ void step()
    {
        if (++at == count)
            at = 0, parity ^= 1;
    }
    /* The feeder's: the slot is free, and no more than ahead - 1 are on their way. */
    __device__ __forceinline__ void make_room()
    {
        bell_wait(&b->empty[at], parity ^ 1);
        if (fed >= ahead)
            bell_wait(at >= ahead ? &b->full[at - ahead] : &b->full[at + count - ahead],
                      at >= ahead ? parity : parity ^ 1);
        fed++;
    }
    /* A worker's: the slot is full; and it is done with it. */
    __device__ __forceinline__ void await() const
    {
        bell_wait(&b->full[at], parity);
    }
    __device__ __forceinline__ void let_go()
    {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            bell_arrive(&b->empty[at]);
        step();
    }
};

__device__ __forceinline__ void bells_init(bells &b, uint32_t slots, uint32_t workers)
{
    for (uint32_t i = 0; i < slots; i++)
        bell_init(&b.full[i], 1), bell_init(&b.empty[i], workers);
    bells_made();
}

/* --- pages in the ring ------------------------------------------------------------------------ */

struct swizzled {
    static __device__ __forceinline__ uint32_t at(uint32_t token, uint32_t piece)
    {
        return page_at(token, piece);
    }
};

#define PART 16 /* tokens of a box of page_maps.part: a warp's */

struct page_maps {
    const CUtensorMap *page,
        *part; /* part: for pages of which the row sees less; or NULL: pages come whole */
};

/* K and V of one page and head: `tokens` of them, boxes of `box` rows. at: the row of the map where K begins, v: where V does. */
template <int HD, bool ONCE>
__device__ __forceinline__ void copy_page_boxes(const ring &r, const CUtensorMap *map, int32_t at, int32_t v,
                                                uint32_t tokens, uint32_t box, uint64_t once)
{
    uint64_t *bell = &r.b->full[r.at];
    bell_expect(bell, 2 * tokens * HD * 2);
    for (uint32_t t = 0; t < tokens; t += box)
#pragma unroll
        for (int p = 0; p < 2 * HD / 64; p++) {
            int32_t x = 64 * (p % (HD / 64)), y = (p < HD / 64 ? at : v) + (int32_t)t;
            uint8_t *to = r.page() + p * PLANE_SIZE + t * 128;
            if (ONCE)
                copy_box_once(to, map, x, y, bell, once);
            else
                copy_box(to, map, x, y, bell);
        }
}

/* The pages of a split for one KV head; row: of the map, where the head's K begins in page 0. early: the row's last page is being
 * written by kernels before this one, which are not waited for yet; false from then on. ONCE: hardly another split reads these pages. */
template <int HD, bool ONCE = false>
__device__ __forceinline__ void feed_split(ring &r, const cuda_split &s, const cuda_attention &a,
                                           const page_maps &maps, uint32_t row, bool &early)
{
    uint32_t page_rows = (uint32_t)(a.page_values / HD);
    uint64_t once = ONCE ? read_once() : 0;
#pragma unroll 1
    for (uint32_t i = 0; i < s.page_count; i++) {
        if (early && (i + 1) * 64 >= s.token_count) {
            early_wait();
            early = false;
        }
        r.make_room();
        if (threadIdx.x % 32 == 0) {
            int32_t at = (int32_t)(a.tables[s.table + s.page_begin + i] * page_rows + row),
                    v = at + (int32_t)a.kv_head_count * 64;
            uint32_t left = (s.token_count - i * 64 + PART - 1) / PART * PART;
            if (maps.part && left < 64)
                copy_page_boxes<HD, ONCE>(r, maps.part, at, v, left, PART, once);
            else
                copy_page_boxes<HD, ONCE>(r, maps.page, at, v, 64, 64, once);
        }
        __syncwarp();
        r.step();
    }
}

/* The row's own K and V, which a page in the ring may lack: [K, V][HD]; by the warp that is going to read it. */
template <int HD> __device__ __forceinline__ void patch_page(uint8_t *page, const half *fresh, uint32_t token)
{
    for (uint32_t i = threadIdx.x % 32; i < 2 * HD / 8; i += 32) {
        uint32_t is_v = i / (HD / 8), piece = i % (HD / 8);
        *(uint4 *)(page + is_v * 128 * HD + page_at(token, piece)) = *(const uint4 *)&fresh[8 * i];
    }
    fence_async(); /* before the copy engine writes here again */
    __syncwarp();
}

/* A page at a time for each four of the warps. fresh: NULL, or K and V of the last token that the row sees. */
template <int HD, int WARPS>
__device__ __forceinline__ void use_split(decode_state<HD> &st, ring &r, const cuda_split &s,
                                          const half *fresh, const uint32_t q[HD / 16][2])
{
    uint32_t warp = threadIdx.x / 32, first = warp % 4 * 16;
#pragma unroll 1
    for (uint32_t i = 0; i < s.page_count; i++) {
        int32_t left = (int32_t)s.token_count - (int32_t)i * 64; /* tokens that the row sees */
        r.await();
        if (warp / 4 == i % (WARPS / 4) && (int32_t)first < left) {
            uint8_t *page = r.page();
            if (fresh && i + 1 == s.page_count && (uint32_t)(left - 1) / 16 == warp % 4)
                patch_page<HD>(page, fresh, (uint32_t)left - 1);
            use_page<HD, swizzled>(st, page, page + 128 * HD, q, first, left);
        }
        r.let_go();
    }
}

/* B registers of the query heads, from rows of HD values. */
template <int HD>
__device__ __forceinline__ void load_heads(uint32_t q[HD / 16][2], const half *heads, uint32_t count)
{
    uint32_t g = threadIdx.x % 32 / 4, at = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < HD / 16; i++) {
        const uint32_t *head = (const uint32_t *)(heads + g * HD) + 8 * i + at;
        q[i][0] = g < count ? head[0] : 0, q[i][1] = g < count ? head[4] : 0;
    }
}
