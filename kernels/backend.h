/* backend: the interface between the schedulers (edge prefill, cloud decode) and an engine that computes.
 *
 * forward() runs a ragged batch: for each sequence some rows (consecutive positions), each sequence with its own layer
 * range, its page table, its input (token ids at layer 0, or hidden states of layer_begin) and its outputs (hidden
 * states after layer_end - 1, and/or logits of some rows when layer_end == layer_count). Prefill chunks and decode rows mix freely.
 *
 * Invariance (numerics cpu-v1): the bits of a row's outputs depend only on the token ids (or hidden rows) of its sequence up
 * to it and on the K/V of earlier positions as stored in the pages: not on chunking, batch, threads or instruction set.
 *
 * Ownership: a backend belongs to one thread at a time. Pages are indices below page_count; bookkeeping is page_pool's. */
#ifndef TANDEM_KERNELS_BACKEND_H
#define TANDEM_KERNELS_BACKEND_H
#include "kernels/kv_dtype.h"
#include "kernels/model.h"
#include "kernels/sample.h"
#include "shared/kv_block.h"
#include "shared/workers.h"

#define BATCH_ROWS_MAX 4096 /* rows of one forward() */
#define BATCH_SEQS_MAX 512

struct batch_seq {
    /* [begin, end): begin < end; begin == end only with begin == layer_count (logits only) */
    uint32_t layer_begin, layer_end;
    uint32_t position;      /* of the first row */
    uint32_t row_count;     /* >= 1 */
    const int32_t *ids;     /* [row_count] when layer_begin == 0; else NULL */
    const float *hidden_in; /* [row_count][embd_size] when layer_begin > 0 */
    /* [row_count][embd_size] residual stream after layer_end - 1 (before output norm); or NULL */
    float *hidden_out;
    /* [logit_count][vocab_count] of the last logit_count rows; needs layer_end == layer_count; or NULL */
    float *logits;
    uint32_t logit_count;
    /* instead of logits, with logit_count 1: the token behind the last row, where ops->samples; or NULL */
    struct sample_request *sample;
    /* pages[p / KV_BLOCK_TOKENS] for every position p < position + row_count; those that rows are written to are the sequence's own */
    const uint32_t *pages;
};

struct batch {
    const struct batch_seq *seqs;
    uint32_t count;
};

struct page_piece { /* of KV as received, on its way into a page; parsed and its CRC checked */
    uint32_t page;
    struct kv_piece_head head;
    struct span payload; /* borrowed */
    int status;          /* out: 0, or the piece's fault */
};
struct page_swap {         /* whole pages to or from memory of host_take */
    const uint32_t *pages; /* [count]; both lists are copied */
    void *const
        *hosts; /* [count], each [layer_end - layer_begin][K|V][kv_head][KV_BLOCK_TOKENS][head_dim] f16 */
    uint32_t count, layer_begin, layer_end;
    bool to_host;
    bool as_kept; /* instead of f16 the bytes as they lie in the page, kv_dtype_layer_size a layer */
};

struct backend;
struct backend_ops {
    const char *name; /* "cpu" */
    enum kv_numerics numerics;
    bool samples; /* batch_seq.sample is answered */
    int (*forward)(struct backend *b, const struct batch *batch);
    /* KV of one layer of one page to or from host memory, f16 [K|V][kv_head][token][head_dim] of the first token_count tokens:
     * host side rows are dense ([kv_head][token_count][head_dim]); token_count <= KV_BLOCK_TOKENS. page_write without pieces_write: k or v may
     * be NULL, what is there stays then. */
    int (*page_read)(struct backend *b, uint32_t page, uint32_t layer, uint32_t token_count, uint16_t *k,
                     uint16_t *v);
    int (*page_write)(struct backend *b, uint32_t page, uint32_t layer, uint32_t token_count,
                      const uint16_t *k, const uint16_t *v);
    int (*page_copy)(struct backend *b, uint32_t from, uint32_t to); /* all layers */
    /* While nothing else is to be done: takes from the system a little of the memory that pages from `used` on, which were never used, will
     * need. False: there is enough. NULL: all memory of pages is there. */
    bool (*pages_ahead)(struct backend *b, uint32_t used);
    /* The next are NULL where pages are host memory and page_read and page_write cost one copy.
     * pieces_write: decodes on the device, straight into the pages; 0 when every piece has its status. */
    int (*pieces_write)(struct backend *b, struct page_piece *pieces, uint32_t count);
    /* Begins to move pages beside the steps and returns a ticket > 0, or a code. Until the ticket is done nothing but other swaps may use
     * the pages or the memory: swap_done is 1, 0 (not yet; with `wait` never) or a code. Swaps happen in the order in which they were begun. */
    int64_t (*swap_start)(struct backend *b, const struct page_swap *swap);
    int (*swap_done)(struct backend *b, int64_t ticket, bool wait);
    /* 0, or the code with which the device failed: nothing works on it any more. Any thread. NULL: cannot fail so. */
    int (*state)(const struct backend *b);
    void *(*host_take)(struct backend *b,
                       size_t size); /* memory that swaps at the bus's speed; NULL: none left. Any thread */
    void (*host_give)(struct backend *b, void *memory);
    void (*destroy)(struct backend *b);
};

struct backend {
    const struct backend_ops *ops;
    const struct model *model; /* borrowed */
    uint32_t page_count;
    uint32_t layers_paged; /* pages hold layers [0, layers_paged) */
    enum kv_dtype kv_dtype;
};

struct backend_config {
    uint32_t page_count;
    uint32_t layers_paged; /* layers of KV kept here: k on an edge, all in the cloud */
    unsigned threads;      /* compute threads, caller included; 0: all cores */
    uint32_t rows_max;     /* largest batch, <= BATCH_ROWS_MAX: working memory is taken once for it */
    const char *isa;       /* NULL: best; "portable", "avx2", ...: forced (tests) */
    /* of a GPU */
    /* of its memory that is in use in the end, by whomsoever; 0: 0.9. page_count 0: what fits */
    double memory_share;
    void (*progress)(void *ctx, uint64_t done, uint64_t total); /* bytes of weights; or NULL */
    void *progress_ctx;
    bool deterministic;     /* numerics cuda-det instead of cuda-fast: a row's bits as with cpu-v1, slower */
    enum kv_dtype kv_dtype; /* of pages; the CPU's are f16 */
    /* steps of all kinds are run at once, so that nothing is loaded later; they write pages */
    bool warm;
};

/* cpu_backend_create: all working memory is allocated here; forward allocates nothing. */
int cpu_backend_create(const struct model *m, const struct backend_config *config, struct backend **out,
                       struct td_error *err);
/* Bytes that it takes for weights in its own order, besides the mapped file. */
uint64_t cpu_backend_weights_size(const struct model *m);
/* "avx512", "avx2", ...: what a CPU backend made with isa = NULL uses here. */
const char *cpu_backend_isa(void);

#endif
