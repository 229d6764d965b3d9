/* pages: KV pages in and out of the device: rows of a layer through pinned memory, pieces decoded on the device, and whole pages
 * swapped on a stream of their own.
 *
 * Writes go through a ring of pinned slots and are not waited for: the stream keeps them in front of the steps that read them. Pieces
 * are laid side by side in one pinned buffer and cross the bus in one copy, still encoded; what only the host can do (the frames of
 * L0's planes) is done on the way in. Swaps are one batch of copies by the copy engines, which take no multiprocessor.
 *
 * What comes in as f16 and goes out as f16 passes, with pages of 8 bits, through buffers on the device: closed into pages, or opened from them. */
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/kv_8bit.h"
#include "shared/kv_codec.h"
#include "shared/memory.h"
#include <stdlib.h>
#include <sys/mman.h>

#define SLOTS       8
#define PIECES_MAX  1024               /* of one launch */
#define PIECES_SIZE ((size_t)16 << 20) /* their bytes */
#define TICKETS     16                 /* swaps on their way */
#define L1_ORIGIN   183                /* scale index of 1.0 */
#define L2_ORIGIN   120                /* step index of 1.0 */

struct cuda_paging {
    uint8_t *ring; /* pinned [SLOTS][slot_size], K and V of a layer of a page each */
    size_t slot_size;
    cudaEvent_t slot_free[SLOTS];
    uint32_t next_slot;
    uint8_t *pieces, *pieces_device;  /* [PIECES_MAX] flags, [PIECES_MAX] struct cuda_piece, bytes */
    struct cuda_piece_tables *tables; /* on the device */
    struct kv_codec_scratch *scratch;
    uint8_t *opened,
        *swap_opened; /* of 8-bit pages, on the device, f16: pieces or a layer; a page being swapped */
    cudaStream_t swap_stream;
    cudaEvent_t steps_done, ticket[TICKETS];
    int64_t tickets_given, tickets_done;
    void **device_at, **host_at; /* [page_count], of one batch of copies */
    size_t *sizes;
};

static uint64_t layer_values(const struct cuda_backend *b)
{
    return (uint64_t)2 * cuda_kv_size(&b->base.model->params) * KV_BLOCK_TOKENS;
}

static uint8_t *layer_at(const struct cuda_backend *b, uint32_t page, uint32_t layer)
{
    return b->pages + ((uint64_t)page * b->base.layers_paged + layer) * cuda_layer_size(b);
}

static struct cuda_kept kept_at(const struct cuda_backend *b,
                                uint8_t *at) /* layers of a page, one after the other */
{
    const struct model_params *m = &b->base.model->params;
    return (struct cuda_kept){b->base.kv_dtype, m->kv_head_count, m->head_dim, at, cuda_layer_size(b), NULL};
}

/* --- life ------------------------------------------------------------------------------------- */

static cudaError_t take_streams(struct cuda_paging *p)
{
    cudaError_t rc = cudaStreamCreateWithFlags(&p->swap_stream, cudaStreamNonBlocking);
    if (!rc)
        rc = cudaEventCreateWithFlags(&p->steps_done, cudaEventDisableTiming);
    for (uint32_t i = 0; i < SLOTS && !rc; i++)
        rc = cudaEventCreateWithFlags(&p->slot_free[i], cudaEventDisableTiming);
    for (uint32_t i = 0; i < TICKETS && !rc; i++)
        rc = cudaEventCreateWithFlags(&p->ticket[i], cudaEventDisableTiming);
    return rc;
}

static size_t pieces_head_size(void)
{
    return PIECES_MAX + PIECES_MAX * sizeof(struct cuda_piece);
}

static cudaError_t take_opened(const struct cuda_backend *b, struct cuda_paging *p)
{
    if (!cuda_is_8bit(b))
        return cudaSuccess;
    cudaError_t rc = cudaMalloc((void **)&p->opened, TD_MAX(PIECES_SIZE, (size_t)2 * layer_values(b)));
    return rc ? rc : cudaMalloc((void **)&p->swap_opened, (size_t)2 * layer_values(b) * b->base.layers_paged);
}

static cudaError_t take_buffers(struct cuda_paging *p)
{
    struct cuda_piece_tables tables = {0};
    for (int i = 1; i < 256; i++) {
        tables.l1_scale[i] = kv_power(i - L1_ORIGIN);
        tables.l2_step[i] = kv_power(i - L2_ORIGIN);
    }
    memcpy(tables.l2_sign, KV_L2_SIGNS, sizeof tables.l2_sign);
    cudaError_t rc = cudaMallocHost((void **)&p->ring, SLOTS * p->slot_size);
    if (!rc)
        rc = cudaMallocHost((void **)&p->pieces, pieces_head_size() + PIECES_SIZE);
    if (!rc)
        rc = cudaMalloc((void **)&p->pieces_device, pieces_head_size() + PIECES_SIZE);
    if (!rc)
        rc = cudaMalloc((void **)&p->tables, sizeof tables);
    return rc ? rc : cudaMemcpy(p->tables, &tables, sizeof tables, cudaMemcpyHostToDevice);
}

int cuda_paging_create(struct cuda_backend *b, struct td_error *err)
{
    const struct model_params *m = &b->base.model->params;
    struct kv_shape shape = {b->base.layers_paged, m->kv_head_count, m->head_dim};
    struct cuda_paging *p = b->paging = calloc(1, sizeof *p);
    if (!p)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the engine on cuda:%d: out of memory", b->device);
    p->slot_size = 2 * layer_values(b);
    p->scratch = kv_codec_scratch_create(&shape);
    p->device_at = calloc(b->base.page_count, sizeof *p->device_at);
    p->host_at = calloc(b->base.page_count, sizeof *p->host_at);
    p->sizes = calloc(b->base.page_count, sizeof *p->sizes);
    if (!p->scratch || !p->device_at || !p->host_at || !p->sizes)
        return td_fail(err, -TD_ERR_NOMEM, "cannot start the engine on cuda:%d: out of memory", b->device);
    cudaError_t rc = take_streams(p);
    if (!rc)
        rc = take_buffers(p);
    if (!rc)
        rc = take_opened(b, p);
    return rc ? td_fail(err, cuda_note(b, rc, "taking buffers for KV pages"),
                        "cannot start the engine on cuda:%d: buffers for KV pages: %s", b->device,
                        cudaGetErrorString(rc))
              : 0;
}

void cuda_paging_destroy(struct cuda_backend *b)
{
    struct cuda_paging *p = b->paging;
    if (!p)
        return;
    if (p->swap_stream) {
        cudaStreamSynchronize(p->swap_stream);
        cudaStreamDestroy(p->swap_stream);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        if (p->slot_free[i])
            cudaEventDestroy(p->slot_free[i]);
    for (uint32_t i = 0; i < TICKETS; i++)
        if (p->ticket[i])
            cudaEventDestroy(p->ticket[i]);
    if (p->steps_done)
        cudaEventDestroy(p->steps_done);
    cudaFreeHost(p->ring);
    cudaFreeHost(p->pieces);
    cudaFree(p->pieces_device);
    cudaFree(p->tables);
    cudaFree(p->opened);
    cudaFree(p->swap_opened);
    kv_codec_scratch_destroy(p->scratch);
    free(p->device_at), free(p->host_at), free(p->sizes);
    free(p);
    b->paging = NULL;
}

/* --- rows of a layer -------------------------------------------------------------------------- */

static bool page_call_ok(const struct backend *base, uint32_t page, uint32_t layer, uint32_t token_count)
{
    return page < base->page_count && layer < base->layers_paged && token_count >= 1 &&
           token_count <= KV_BLOCK_TOKENS;
}

static int ready(struct cuda_backend *b)
{
    return cuda_code(b) ? cuda_code(b) : cuda_note(b, cudaSetDevice(b->device), "choosing the device");
}

/* K and V of `token_count` tokens between a slot ([K|V][kv_head][token_count][head_dim]) and a layer of a page in f16: heads of both lie evenly
 * apart. */
static cudaError_t copy_rows(struct cuda_backend *b, uint8_t *at, uint32_t token_count, uint8_t *slot,
                             bool to_host)
{
    const struct model_params *m = &b->base.model->params;
    size_t row = (size_t)2 * token_count * m->head_dim, page_row = (size_t)2 * KV_BLOCK_TOKENS * m->head_dim,
           heads = 2 * (size_t)m->kv_head_count;
    return to_host
               ? cudaMemcpy2DAsync(slot, row, at, page_row, row, heads, cudaMemcpyDeviceToHost, b->stream)
               : cudaMemcpy2DAsync(at, page_row, slot, row, row, heads, cudaMemcpyHostToDevice, b->stream);
}

/* The next slot, once the copy that used it is over. NULL: the device has failed. */
static uint8_t *take_slot(struct cuda_backend *b)
{
    struct cuda_paging *p = b->paging;
    uint32_t slot = p->next_slot;
    p->next_slot = (slot + 1) % SLOTS;
    if (cuda_note(b, cudaEventSynchronize(p->slot_free[slot]), "copying a KV page"))
        return NULL;
    return p->ring + slot * p->slot_size;
}

static int slot_used(struct cuda_backend *b, const uint8_t *slot)
{
    struct cuda_paging *p = b->paging;
    size_t index = (size_t)(slot - p->ring) / p->slot_size;
    return cuda_note(b, cudaEventRecord(p->slot_free[index], b->stream), "copying a KV page");
}

int cuda_page_read(struct backend *base, uint32_t page, uint32_t layer, uint32_t token_count, uint16_t *k,
                   uint16_t *v)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    if (!page_call_ok(base, page, layer, token_count))
        return -TD_ERR_ARG;
    int rc = ready(b);
    uint8_t *slot = rc ? NULL : take_slot(b);
    if (!slot)
        return cuda_code(b);
    size_t half = (size_t)2 * token_count * cuda_kv_size(&base->model->params);
    uint8_t *at = layer_at(b, page, layer);
    if (cuda_is_8bit(b)) {
        struct cuda_kept kept = kept_at(b, at);
        cuda_open_pages(b->stream, &kept, 1, at = b->paging->opened);
        if ((rc = cuda_note(b, cuda_launch_error(), "opening a KV page")))
            return rc;
    }
    if ((rc = cuda_note(b, copy_rows(b, at, token_count, slot, true), "copying a KV page")) ||
        (rc = cuda_note(b, cudaStreamSynchronize(b->stream), "copying a KV page")))
        return rc;
    memcpy(k, slot, half);
    memcpy(v, slot + half, half);
    return 0;
}

static int write_pieces(struct backend *base, uint32_t page, uint32_t layer, uint32_t token_count,
                        const uint16_t *k, const uint16_t *v)
{
    const struct model_params *m = &base->model->params;
    struct page_piece pieces[2];
    for (uint32_t i = 0; i < 2; i++)
        pieces[i] = (struct page_piece){
            .page = page,
            .head = {.codec = KV_RAW,
                     .is_value = (uint8_t)i,
                     .token_count = (uint16_t)token_count,
                     .layer = (uint16_t)layer,
                     .kv_head_count = (uint16_t)m->kv_head_count,
                     .head_dim = (uint16_t)m->head_dim},
            .payload = {(const uint8_t *)(i ? v : k), (size_t)2 * token_count * cuda_kv_size(m)}};
    int rc = cuda_pieces_write(base, pieces, 2);
    return rc ? rc : pieces[0].status ? pieces[0].status : pieces[1].status;
}

int cuda_page_write(struct backend *base, uint32_t page, uint32_t layer, uint32_t token_count,
                    const uint16_t *k, const uint16_t *v)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    if (!page_call_ok(base, page, layer, token_count))
        return -TD_ERR_ARG;
    if (cuda_is_8bit(b))
        return write_pieces(base, page, layer, token_count, k, v);
    int rc = ready(b);
    uint8_t *slot = rc ? NULL : take_slot(b);
    if (!slot)
        return cuda_code(b);
    size_t half = (size_t)2 * token_count * cuda_kv_size(&base->model->params);
    memcpy(slot, k, half);
    memcpy(slot + half, v, half);
    rc = cuda_note(b, copy_rows(b, layer_at(b, page, layer), token_count, slot, false), "copying a KV page");
    return rc ? rc : slot_used(b, slot);
}

int cuda_page_copy(struct backend *base, uint32_t from, uint32_t to)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    if (from >= base->page_count || to >= base->page_count)
        return -TD_ERR_ARG;
    if (cuda_code(b) || from == to)
        return cuda_code(b);
    int rc = ready(b);
    return rc ? rc
              : cuda_note(b,
                          cudaMemcpyAsync(layer_at(b, to, 0), layer_at(b, from, 0),
                                          base->layers_paged * cuda_layer_size(b), cudaMemcpyDeviceToDevice,
                                          b->stream),
                          "copying a KV page"); /* the stream keeps it in front of what comes next */
}

/* --- pieces ----------------------------------------------------------------------------------- */

struct packing { /* pieces of one launch: [first, first + count), those with status 0 at places in the list */
    struct cuda_piece *list;
    uint8_t *flags, *bytes;
    size_t used, opened; /* opened: values, of 8-bit pages */
    uint32_t count, values_max, rows_max, heads_rows_max;
    struct page_piece *owner[PIECES_MAX];
};

static void packing_begin(struct packing *k, const struct cuda_paging *p)
{
    k->flags = p->pieces;
    k->list = (struct cuda_piece *)(p->pieces + PIECES_MAX);
    k->bytes = p->pieces + pieces_head_size();
    k->used = k->opened = 0;
    k->count = k->values_max = k->rows_max = k->heads_rows_max = 0;
    memset(k->flags, 0, PIECES_MAX);
}

static size_t rounded(size_t size)
{
    return (size + 15) / 16 * 16;
}

static int check_piece(const struct cuda_backend *b, const struct page_piece *piece)
{
    const struct model_params *m = &b->base.model->params;
    const struct kv_piece_head *h = &piece->head;
    if (piece->page >= b->base.page_count || h->layer >= b->base.layers_paged)
        return -TD_ERR_ARG;
    if (h->kv_head_count != m->kv_head_count || h->head_dim != m->head_dim || h->token_count < 1 ||
        h->first_token + h->token_count > KV_BLOCK_TOKENS)
        return -TD_ERR_SHAPE;
    return 0;
}

/* Rare pieces have bits that must be 0: the host looks at those, and decodes them while it is there. */
static int pack_l2(struct cuda_backend *b, struct packing *k, const struct page_piece *piece,
                   struct cuda_piece *out)
{
    const struct kv_piece_head *h = &piece->head;
    struct kv_l2_form form = kv_l2_form_of(h);
    uint8_t *body = k->bytes + k->used;
    if (h->table > 1 || piece->payload.size != kv_l2_size(&form))
        return -TD_ERR_FORMAT;
    if (h->token_count % 8 || h->head_dim % 8) {
        out->form = CUDA_PIECE_RAW;
        out->side = k->used + rounded(2 * (size_t)out->value_count);
        return kv_piece_decode(b->paging->scratch, h, piece->payload, (uint16_t *)(void *)body,
                               out->value_count);
    }
    out->form = CUDA_PIECE_L2;
    out->tokens = h->token_count, out->heads = h->kv_head_count, out->head_dim = h->head_dim;
    out->bits = form.bits, out->wide = form.wide;
    out->side = k->used + rounded(piece->payload.size);
    k->rows_max = TD_MAX(k->rows_max, out->tokens * out->heads);
    memcpy(body, piece->payload.data, piece->payload.size);
    return 0;
}

/* The payload into staging, in the form that the kernel reads. Sizes were promised by nobody: they are checked here. */
static int pack_payload(struct cuda_backend *b, struct packing *k, const struct page_piece *piece,
                        struct cuda_piece *out)
{
    size_t n = out->value_count, groups = kv_l1_group_count(n, piece->head.table);
    uint8_t *body = k->bytes + k->used;
    out->body = k->used;
    out->side = k->used + rounded(piece->head.codec == KV_RAW ? 2 * n : n);
    uint8_t *side = k->bytes + out->side;
    switch (piece->head.codec) {
    case KV_RAW:
        if (piece->payload.size != 2 * n)
            return -TD_ERR_FORMAT;
        out->form = CUDA_PIECE_RAW;
        memcpy(body, piece->payload.data, 2 * n);
        return 0;
    case KV_L0:
        out->form = CUDA_PIECE_PLANES;
        return kv_l0_planes(b->paging->scratch, piece->payload, n, side, body);
    case KV_L1:
        if (piece->head.table > 1 || piece->payload.size != kv_l1_size(n, piece->head.table))
            return -TD_ERR_FORMAT;
        out->form = CUDA_PIECE_L1, out->group = (uint32_t)kv_l1_group(piece->head.table);
        memcpy(side, piece->payload.data, groups);
        memcpy(body, piece->payload.data + groups, n);
        return 0;
    case KV_L2:
        return pack_l2(b, k, piece, out);
    default:
        return -TD_ERR_UNSUPPORTED;
    }
}

static void pack(struct cuda_backend *b, struct packing *k, struct page_piece *piece)
{
    const struct kv_piece_head *h = &piece->head;
    struct cuda_piece *out = &k->list[k->count];
    uint64_t at = (uint64_t)(layer_at(b, piece->page, h->layer) - b->pages);
    *out = (struct cuda_piece){.out = cuda_is_8bit(b) ? k->opened
                                                      : at / 2 + (h->is_value ? layer_values(b) / 2 : 0) +
                                                            (uint64_t)h->first_token * h->head_dim,
                               .kept_at = at,
                               .first_token = h->first_token,
                               .is_value = h->is_value,
                               .value_count = (uint32_t)h->kv_head_count * h->token_count * h->head_dim,
                               .row_values = (uint32_t)h->token_count * h->head_dim};
    piece->status = pack_payload(b, k, piece, out);
    if (piece->status < 0)
        return;
    k->used = out->side + rounded(out->value_count);
    k->opened += out->value_count;
    k->values_max = TD_MAX(k->values_max, out->value_count);
    k->heads_rows_max = TD_MAX(k->heads_rows_max, out->value_count / h->head_dim);
    k->owner[k->count++] = piece;
}

static int packing_run(struct cuda_backend *b, struct packing *k)
{
    struct cuda_paging *p = b->paging;
    if (k->count == 0)
        return 0;
    size_t head = pieces_head_size();
    cudaError_t rc =
        cudaMemcpyAsync(p->pieces_device, p->pieces, head + k->used, cudaMemcpyHostToDevice, b->stream);
    if (!rc) {
        const struct cuda_piece *list = (const struct cuda_piece *)(p->pieces_device + PIECES_MAX);
        struct cuda_kept kept = kept_at(b, b->pages);
        bool opened = cuda_is_8bit(b);
        cuda_pieces_decode(b->stream, p->pieces_device + head, list, k->count, k->values_max, k->rows_max,
                           p->tables, opened ? 0 : KV_BLOCK_TOKENS * b->base.model->params.head_dim,
                           (uint16_t *)(opened ? p->opened : b->pages), p->pieces_device);
        if (opened)
            cuda_close_pieces(b->stream, &kept, list, k->count, k->heads_rows_max, p->opened);
        rc = cuda_launch_error();
    }
    if (!rc)
        rc = cudaMemcpyAsync(k->flags, p->pieces_device, k->count, cudaMemcpyDeviceToHost, b->stream);
    if (!rc)
        rc = cudaStreamSynchronize(b->stream);
    for (uint32_t i = 0; i < k->count && !rc; i++)
        if (k->flags[i])
            k->owner[i]->status = -TD_ERR_FORMAT;
    return cuda_note(b, rc, "decoding KV pieces");
}

int cuda_pieces_write(struct backend *base, struct page_piece *pieces, uint32_t count)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    struct packing k;
    int rc = ready(b);
    packing_begin(&k, b->paging);
    for (uint32_t i = 0; i < count && !rc; i++) {
        pieces[i].status = check_piece(b, &pieces[i]);
        if (pieces[i].status < 0)
            continue;
        size_t most = 2 * rounded(layer_values(b));
        if (k.count == PIECES_MAX || k.used + most > PIECES_SIZE || 2 * k.opened + most > PIECES_SIZE) {
            rc = packing_run(b, &k);
            packing_begin(&k, b->paging);
        }
        if (!rc)
            pack(b, &k, &pieces[i]);
    }
    return rc ? rc : packing_run(b, &k);
}

/* --- swap ------------------------------------------------------------------------------------- */

/* One launch, a copy a page: its layers lie one after the other on both sides. Measured on an H200, 16 GiB back into scattered pages: 312 ms by this as
 * a batch a layer, 335 ms by a kernel that reads the host's memory itself. */
static cudaError_t swap_pages(struct cuda_backend *b, const struct page_swap *w)
{
    struct cuda_paging *p = b->paging;
    for (uint32_t i = 0; i < w->count; i++) {
        p->device_at[i] = layer_at(b, w->pages[i], w->layer_begin);
        p->host_at[i] = w->hosts[i];
        p->sizes[i] = cuda_layer_size(b) * (w->layer_end - w->layer_begin);
    }
    void **to = w->to_host ? p->host_at : p->device_at, **from = w->to_host ? p->device_at : p->host_at;
#if CUDART_VERSION >= 13000
    struct cudaMemcpyAttributes how = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream};
    size_t first = 0;
    return cudaMemcpyBatchAsync(to, (const void *const *)from, p->sizes, w->count, &how, &first, 1,
                                p->swap_stream);
#else
    cudaError_t rc = cudaSuccess;
    for (uint32_t i = 0; i < w->count && !rc; i++)
        rc = cudaMemcpyAsync(to[i], from[i], p->sizes[i], cudaMemcpyDefault, p->swap_stream);
    return rc;
#endif
}

/* The same as f16, of 8-bit pages: one after the other, through one buffer. */
static cudaError_t swap_values(struct cuda_backend *b, const struct page_swap *w)
{
    struct cuda_paging *p = b->paging;
    uint32_t layers = w->layer_end - w->layer_begin;
    size_t size = (size_t)2 * layer_values(b) * layers;
    cudaError_t rc = cudaSuccess;
    for (uint32_t i = 0; i < w->count && !rc; i++) {
        struct cuda_kept k = kept_at(b, layer_at(b, w->pages[i], w->layer_begin));
        if (w->to_host) {
            cuda_open_pages(p->swap_stream, &k, layers, p->swap_opened);
            rc = cudaMemcpyAsync(w->hosts[i], p->swap_opened, size, cudaMemcpyDeviceToHost, p->swap_stream);
        } else {
            rc = cudaMemcpyAsync(p->swap_opened, w->hosts[i], size, cudaMemcpyHostToDevice, p->swap_stream);
            cuda_close_pages(p->swap_stream, &k, layers, p->swap_opened);
        }
        cudaError_t launch = cuda_launch_error();
        rc = rc ? rc : launch;
    }
    return rc;
}

static bool swap_ok(const struct backend *base, const struct page_swap *w)
{
    bool ok = w->count >= 1 && w->count <= base->page_count && w->layer_begin < w->layer_end &&
              w->layer_end <= base->layers_paged && w->hosts;
    for (uint32_t i = 0; i < w->count && ok; i++)
        ok = w->pages[i] < base->page_count && w->hosts[i];
    return ok;
}

int64_t cuda_swap_start(struct backend *base, const struct page_swap *w)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    struct cuda_paging *p = b->paging;
    if (!swap_ok(base, w))
        return -TD_ERR_ARG;
    int rc = ready(b);
    cudaEvent_t ticket =
        p->ticket[p->tickets_given % TICKETS]; /* the oldest's, if so many are on their way */
    if (!rc && p->tickets_given - p->tickets_done >= TICKETS)
        rc = cuda_swap_done(base, p->tickets_given - TICKETS + 1, true);
    /* behind the steps that were begun: they wrote, or still read, these pages */
    if (rc >= 0)
        rc = cuda_note(b, cudaEventRecord(p->steps_done, b->stream), "swapping KV pages");
    if (!rc)
        rc = cuda_note(b, cudaStreamWaitEvent(p->swap_stream, p->steps_done, 0), "swapping KV pages");
    if (!rc)
        rc = cuda_note(b, cuda_is_8bit(b) && !w->as_kept ? swap_values(b, w) : swap_pages(b, w),
                       "swapping KV pages");
    if (!rc)
        rc = cuda_note(b, cudaEventRecord(ticket, p->swap_stream), "swapping KV pages");
    return rc ? rc : ++p->tickets_given;
}

int cuda_swap_done(struct backend *base, int64_t ticket, bool wait)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    struct cuda_paging *p = b->paging;
    if (ticket < 1 || ticket > p->tickets_given)
        return -TD_ERR_ARG;
    if (cuda_code(b) || ticket <= p->tickets_done)
        return cuda_code(b) ? cuda_code(b) : 1;
    cudaEvent_t event = p->ticket[(ticket - 1) % TICKETS];
    cudaError_t rc = wait ? cudaEventSynchronize(event) : cudaEventQuery(event);
    if (rc == cudaErrorNotReady)
        return 0;
    if (rc)
        return cuda_note(b, rc, "swapping KV pages");
    p->tickets_done = ticket;
    return 1;
}

cudaError_t cuda_swaps_query(const struct cuda_backend *b)
{
    return cudaStreamQuery(b->paging->swap_stream);
}

/* --- pinned memory ---------------------------------------------------------------------------- */

/* The memory is the process's own, in huge pages, and made first and pinned then: only while it is pinned does the driver keep others waiting.
 * Measured on an H200, 128 MiB beside small copies of another thread: 56 and 7 ms, and a copy waits for 9 ms at most; cudaMallocHost 110 ms,
 * and the other thread gets through once in three parts, after 0.8 s. */
#define HUGE_PAGE ((size_t)2 << 20)
#define HEAD_SIZE ((size_t)4096)

struct host_head { /* a page in front of the memory */
    void *base;
    size_t size;
};

static struct host_head *head_of(void *memory)
{
    return (struct host_head *)(void *)((uint8_t *)memory - HEAD_SIZE);
}

/* As much as is taken must stay for others. */
static uint8_t *make_memory(size_t size)
{
    uint64_t available = memory_available();
    size_t all = size + HEAD_SIZE + HUGE_PAGE;
    if (available > 0 && all > available / 2)
        return NULL;
    uint8_t *base = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
    size_t at = ((uintptr_t)base + HEAD_SIZE + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE - (uintptr_t)base;
    madvise(base + at, size, MADV_HUGEPAGE); /* refused where there are none */
    for (size_t i = 0; i < size; i += HEAD_SIZE)
        base[at + i] = 0;
    *head_of(base + at) = (struct host_head){base, all};
    return base + at;
}

void *cuda_host_take(struct backend *base, size_t size)
{
    struct cuda_backend *b = (struct cuda_backend *)base;
    uint8_t *memory = ready(b) ? NULL : make_memory(size);
    if (memory && cudaHostRegister(memory, size,
                                   cudaHostRegisterDefault)) { /* of this call alone: the device is well */
        munmap(head_of(memory)->base, head_of(memory)->size);
        return NULL;
    }
    return memory;
}

void cuda_host_give(struct backend *base, void *memory)
{
    (void)base;
    cudaHostUnregister(memory);
    munmap(head_of(memory)->base, head_of(memory)->size);
}
