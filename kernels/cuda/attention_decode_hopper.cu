/* attention_decode_hopper: as attention_decode.cu, for sm_90 and heads of 64 and 128 values: two blocks an SM, whose feeders run through the
 * pages of all their splits without a stop, so that memory never waits for a split's beginning or end. Where blocks have more than two, who is
 * done first takes the next one: some SMs get more of the memory than others.
 *
 * With FRESH it does rope_write's work too, where each sequence has one row: a block turns the query heads of its split, and who has
 * the row's last split also K and V, which go to the page in memory and to the one in shared memory, as that may have been read before.
 * So feeders wait for no kernel, and there is one kernel fewer in a layer. Splits of a row turn the same heads again; that is little.
 *
 * bytes: 4 * head_dim a token, KV head and layer, each once (of the last page to the next 16 tokens), up to 128 KB an SM on their way.
 * Measured on an H200, 32/8 heads of 128, 128 rows at 1K: 4,480 GB/s. */
#include "ring.cuh"
#include "rope.cuh"

#define WARPS   4
#define BLOCKS  2                 /* an SM */
#define THREADS (32 * WARPS + 32) /* the feeder comes last */
#define SLOTS   3
#define AHEAD   2 /* of them on their way: with 3 it is 1 % slower */
#define QUEUE   4
#define NO_ITEM 0xffffffffu

struct item_queue { /* a block's items (split and KV head) in their order, from the feeder to the warps */
    uint64_t full[QUEUE], empty[QUEUE];
    uint32_t items[QUEUE];
};

template <int HD> struct ring_shared {
    uint8_t pages[SLOTS][256 * HD];
    item_queue queue;
    decode_ends<WARPS> ends;
    bells b;
    alignas(16) half fresh[2][HD]; /* the row's own K and V */
    float o[]; /* [warps][group][HD]; before, a head of each warp and the query heads (turned_heads) */
};

template <int HD> __device__ __forceinline__ half *turned_heads(ring_shared<HD> &sh)
{
    return (half *)(sh.o + WARPS * HD);
}

/* Query heads of the group to shared memory; with `writes` also K and V of the row, to shared memory and to its page. */
template <int HD, bool BF16>
__device__ __forceinline__ void turn_heads(ring_shared<HD> &sh, const cuda_rope &a, const cuda_split &s,
                                           uint32_t kv_head, uint32_t position, bool writes)
{
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = a.head_count / a.kv_head_count,
             all = a.head_count + 2 * a.kv_head_count;
    float *x = sh.o + warp * HD;
    for (uint32_t job = warp; job < group + (writes ? 2 : 0); job += WARPS) {
        bool is_q = job < group, is_v = job == group + 1;
        uint32_t own = is_q ? kv_head * group + job : kv_head,
                 head = own + (is_q   ? 0
                               : is_v ? a.head_count + a.kv_head_count
                                      : a.head_count);
        const float *bias = is_q   ? a.q_bias
                            : is_v ? a.v_bias
                                   : a.k_bias,
                    *norm = is_q   ? a.q_norm
                            : is_v ? nullptr
                                   : a.k_norm;
        rope_head<BF16>(x, (const uint16_t *)a.wide + ((uint64_t)s.row * all + head) * HD,
                        bias ? bias + own * HD : nullptr, norm, !is_v,
                        a.cos_sin + (uint64_t)s.row * a.rope_dim, a, lane);
        half *to = is_q ? turned_heads<HD>(sh) + job * HD : sh.fresh[is_v],
             *page = (half *)a.kv + a.tables[s.table + position / 64] * a.page_values +
                     (((is_v ? a.kv_head_count : 0) + kv_head) * 64 + position % 64) * (uint64_t)HD;
        for (uint32_t i = lane; i < HD; i += 32) {
            half y = __ushort_as_half(to_bits<false>(is_q ? x[i] * a.q_scale : x[i]));
            to[i] = y;
            if (!is_q)
                page[i] = y;
        }
        __syncwarp();
    }
}

template <int HD>
__device__ __forceinline__ void load_item(uint32_t q[HD / 16][2], const decode_args &d, const cuda_split &s,
                                          uint32_t kv_head, uint32_t group)
{
    load_heads<HD>(q, (const half *)d.a.q + ((uint64_t)s.row * d.a.head_count + kv_head * group) * HD, group);
}

/* --- which items ------------------------------------------------------------------------------ */

/* One lane of a warp each; at: how many before. */
__device__ __forceinline__ void put_item(item_queue &q, uint32_t at, uint32_t item)
{
    bell_wait(&q.empty[at % QUEUE], at / QUEUE % 2 ^ 1);
    q.items[at % QUEUE] = item;
    bell_arrive(&q.full[at % QUEUE]);
}
__device__ __forceinline__ uint32_t take_item(item_queue &q, uint32_t at)
{
    uint32_t item = 0;
    if (threadIdx.x % 32 == 0) {
        bell_wait(&q.full[at % QUEUE], at / QUEUE % 2);
        item = q.items[at % QUEUE];
        bell_arrive(&q.empty[at % QUEUE]);
    }
    return __shfl_sync(0xffffffffu, item, 0);
}

/* The split of an item, which becomes NO_ITEM behind the last one. */
__device__ __forceinline__ cuda_split split_of(const decode_args &d, uint32_t items, uint32_t &item)
{
    cuda_split s = {};
    if (item < items)
        s = d.splits[item / d.a.kv_head_count];
    if (s.page_count == 0)
        item = NO_ITEM;
    return s;
}

/* The feeder. A block's first two items are its own; the next ones, if `shared`, whose is first done with those before. What comes next is asked for
 * with an item's first page, and said before its second, as the warps wait for it. */
template <int HD>
__device__ __forceinline__ void feed_items(item_queue &q, ring r, const decode_args &d, uint32_t items,
                                           bool shared, const page_maps &maps, bool early)
{
    uint32_t kv_heads = d.a.kv_head_count, lane = threadIdx.x % 32, item = blockIdx.x, put = 0,
             *turns = d.counters - DECODE_TURNS; /* items taken, and blocks that are done */
    cuda_split s = split_of(d, items, item);
    if (lane == 0)
        put_item(q, put, item);
    while (item != NO_ITEM) {
        uint32_t row = item % kv_heads * 64, next = item + gridDim.x;
        cuda_split first = s;
        if (shared && put == 1)
            early_wait(); /* whoever counted before is done */
        if (shared && put > 0 && lane == 0)
            next = 2 * gridDim.x + atomicAdd(&turns[0], 1);
        first.page_count = 1;
        feed_split<HD, true>(r, first, d.a, maps, row, early);
        next = __shfl_sync(0xffffffffu, next, 0);
        cuda_split after = split_of(d, items, next);
        if (lane == 0)
            put_item(q, put + 1, next);
        __syncwarp();
        s.page_begin++, s.page_count--, s.token_count -= 64;
        feed_split<HD, true>(r, s, d.a, maps, row, early);
        item = next, s = after, put++;
    }
    if (!shared)
        return;
    early_wait();
    if (lane == 0 && atomicAdd(&turns[1], 1) == gridDim.x - 1)
        turns[0] = turns[1] = 0;
}

template <int HD, bool FRESH, bool BF16>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    ring_kernel(const __grid_constant__ decode_args d, uint32_t items, bool shared,
                const __grid_constant__ cuda_rope rope, const __grid_constant__ CUtensorMap map,
                const __grid_constant__ CUtensorMap part)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    ring_shared<HD> &sh = *reinterpret_cast<ring_shared<HD> *>(memory);
    uint32_t kv_heads = d.a.kv_head_count, group = d.a.head_count / kv_heads;
    if (threadIdx.x == 0) {
        for (int i = 0; i < QUEUE; i++)
            bell_init(&sh.queue.full[i], 1), bell_init(&sh.queue.empty[i], WARPS);
        bells_init(sh.b, SLOTS, WARPS);
        sh.ends.o = sh.o;
    }
    __syncthreads();
    early_start();
    ring r = {memory, &sh.b, 256 * HD, SLOTS, 0, 0, AHEAD, 0};
    if (threadIdx.x >= 32 * WARPS) {
        bool early = d.a.old_pages && !FRESH;
        fetch_map(&map), fetch_map(&part);
        if (!early && !FRESH)
            early_wait();
        feed_items<HD>(sh.queue, r, d, items, shared, {&map, &part}, early);
        return;
    }
    uint32_t q[HD / 16][2], taken = 0, item = take_item(sh.queue, taken++), next;
    cuda_split s = split_of(d, items, item), after; /* of lists that no kernel writes */
    early_wait();
    if (!FRESH && item != NO_ITEM)
        load_item<HD>(q, d, s, item % kv_heads, group);
    for (; item != NO_ITEM; item = next, s = after) {
        uint32_t kv_head = item % kv_heads, split = item / kv_heads;
        next = take_item(sh.queue, taken++);
        after = split_of(d, items, next);
        bool writes = FRESH && split + 1 == s.first_split + s.split_count;
        if (FRESH) {
            turn_heads<HD, BF16>(sh, rope, s, kv_head, rope.positions[s.row], writes);
            meet_warps<32 * WARPS>(1);
            load_heads<HD>(q, turned_heads<HD>(sh), group);
            meet_warps<32 * WARPS>(1); /* what they lie in is used again */
        }
        decode_state<HD> st = {};
        st.max[0] = st.max[1] = -1e30f;
        use_split<HD, WARPS>(st, r, s, writes ? sh.fresh[0] : nullptr, q);
        if (!FRESH && next != NO_ITEM) /* on their way while this split is finished */
            load_item<HD>(q, d, after, next % kv_heads, group);
        finish_split<HD, WARPS>(sh.ends, st, d, s, split, kv_head, kv_head * group, group);
    }
}

/* --- launching -------------------------------------------------------------------------------- */

template <int HD> static size_t shared_size(uint32_t group)
{
    static_assert(
        BLOCKS * (sizeof(ring_shared<HD>) + sizeof(float) * WARPS * HEADS * HD + 1024) <= 228 * 1024,
        "what an SM of sm_90 has, with 1 KB of the system's a block; of 128 values 64 bytes are left");
    uint32_t o = WARPS * group * HD, heads = WARPS * HD + group * HD / 2; /* which lie there before */
    return sizeof(ring_shared<HD>) + sizeof(float) * (o > heads ? o : heads);
}

template <int HD> static uint32_t blocks_of() /* 0: not on this device */
{
    static known_devices known;
    bool fits = known_of_device(known, [] {
        return has_hopper_code(ring_kernel<HD, false, false>, shared_size<HD>(HEADS)) &&
               has_hopper_code(ring_kernel<HD, true, false>, shared_size<HD>(HEADS)) &&
               has_hopper_code(ring_kernel<HD, true, true>, shared_size<HD>(HEADS));
    });
    return fits ? BLOCKS * device_sm_count() : 0;
}

uint32_t cuda_attention_ring_blocks(uint32_t head_dim, uint32_t heads_per_kv_head)
{
    return heads_per_kv_head > HEADS ? 0
           : head_dim == 128         ? blocks_of<128>()
           : head_dim == 64          ? blocks_of<64>()
                                     : 0;
}

/* rope: NULL, or what is done with each row first. */
template <int HD>
static bool launch_ring(cudaStream_t s, const decode_args &d, uint32_t items, uint32_t blocks,
                        const cuda_rope *rope)
{
    CUtensorMap map, part;
    void (*kernel)(decode_args, uint32_t, bool, cuda_rope, CUtensorMap, CUtensorMap) =
        rope == nullptr ? ring_kernel<HD, false, false>
        : rope->bf16    ? ring_kernel<HD, true, true>
                        : ring_kernel<HD, true, false>;
    if (!cuda_page_map(&map, d.a.kv, HD, 64, true) || !cuda_page_map(&part, d.a.kv, HD, PART, true))
        return false;
    launch_early(kernel, dim3(items < blocks ? items : blocks), dim3(THREADS),
                 shared_size<HD>(d.a.head_count / d.a.kv_head_count), s, 1, d, items, items > 2 * blocks,
                 rope ? *rope : cuda_rope{}, map, part);
    return true;
}

static bool run_ring(cudaStream_t s, const struct cuda_rope *rope, const struct cuda_attention *a,
                     const struct cuda_split *splits, uint32_t grid_splits, void *partial, uint32_t *counters)
{
    uint32_t blocks = cuda_attention_ring_blocks(a->head_dim, a->head_count / a->kv_head_count),
             items = grid_splits * a->kv_head_count;
    decode_args d = {*a, splits, (float *)partial, counters + DECODE_TURNS, a->kv_head_count};
    if (blocks == 0)
        return false;
    return a->head_dim == 128 ? launch_ring<128>(s, d, items, blocks, rope)
                              : launch_ring<64>(s, d, items, blocks, rope);
}

bool cuda_attention_ring(cudaStream_t s, const struct cuda_attention *a, const struct cuda_split *splits,
                         uint32_t grid_splits, void *partial, uint32_t *counters)
{
    return run_ring(s, nullptr, a, splits, grid_splits, partial, counters);
}

bool cuda_attention_fresh(cudaStream_t s, const struct cuda_rope *rope, const struct cuda_attention *a,
                          const struct cuda_split *splits, uint32_t grid_splits, void *partial,
                          uint32_t *counters)
{
    return run_ring(s, rope, a, splits, grid_splits, partial, counters);
}
