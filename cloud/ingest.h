/* ingest: KV pieces that edges send, checked and decoded off the engine thread.
 *
 * engine_kv hands the wire bytes in; one thread parses (CRC), compares with the model's shape, decodes to f16 and refuses values that are not
 * finite; the engine takes the result, compares it with the sequence's plan and writes it to a page. Order is kept. Bounded: at most
 * INGEST_PIECES_MAX pieces are between ingest_push and ingest_pop.
 *
 * For a device that decodes, pieces stay as they came, and it finds what is not finite. L0 is decoded here all the same: its planes are zstd
 * frames, which only a CPU opens.
 *
 * A sealed piece is opened first: then it is the one in it, and has the name that it was sealed with. One that this node did not seal, or that was
 * altered, counts as damaged.
 *
 * A piece that does not parse was damaged on its way: it is a miss. One that parses but cannot be right is the peer's fault. */
#ifndef TANDEM_CLOUD_INGEST_H
#define TANDEM_CLOUD_INGEST_H
#include "shared/kv_seal.h"

#define INGEST_PIECES_MAX 2048

struct ingest_piece {
    struct ingest_piece *next; /* the holder's list */
    uint64_t sequence;
    uint32_t epoch, block_index; /* as the frame said; block_index has to equal head.block_index */
    uint32_t wire_size;
    uint8_t *wire; /* malloc'ed; NULL once decoded here */
    bool sealed;   /* it was, by this node, with this name */
    struct kv_block_id name;
    int status; /* 0; -TD_ERR_CHECKSUM: damaged; else the peer's fault */
    struct kv_piece_head head;
    uint16_t *values;    /* malloc'ed [kv_head][token][head_dim] when status is 0; NULL: still encoded */
    size_t values_size;  /* bytes of it */
    struct span payload; /* then: in wire */
};
/* Takes wire over (freed on failure too); NULL without memory. */
struct ingest_piece *ingest_piece_create(uint64_t sequence, uint32_t epoch, uint32_t block_index,
                                         uint8_t *wire, size_t size);
void ingest_piece_free(struct ingest_piece *piece);
/* What the thread does with each piece: fills status, head and values, or payload. for_device: see above. */
void ingest_decode(struct ingest_piece *piece, const struct kv_shape *shape, bool for_device,
                   const struct kv_seal *seal, struct kv_codec_scratch *scratch);

struct ingest;
/* seal: copied; NULL: this node seals nothing. wake(ctx): called on the thread after each result. NULL without memory or threads. */
struct ingest *ingest_create(const struct kv_shape *shape, bool for_device, const struct kv_seal *seal,
                             void (*wake)(void *ctx), void *ctx);
void ingest_destroy(struct ingest *g); /* frees what is inside */
/* Any thread. Takes the piece on 0; else -TD_ERR_FULL or -TD_ERR_CLOSED and it is still the caller's. */
int ingest_push(struct ingest *g, struct ingest_piece *piece);
/* The pops that follow give what is decoded by now and nothing later. The engine gathers before it reads its commands: so when it takes a piece, it has
 * run every command that was given before that piece, its plan among them. */
void ingest_gather(struct ingest *g);
struct ingest_piece *ingest_pop(struct ingest *g); /* a gathered piece, the caller's; NULL: no more */
bool ingest_is_busy(struct ingest *g);             /* pieces are still being decoded (tests) */
/* Results came since: gather again before sleeping, their wake may be spent. */
bool ingest_has_more(struct ingest *g);

#endif
