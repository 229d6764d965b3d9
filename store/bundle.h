/* bundle: a principal's conversations with their KV in one sealed file (portable.h), to take to another node.
 *
 * Names of blocks are keyed: at a node with other keys the same block has another id. So the file carries token ids and pieces, and import gives
 * each block the id that this store's keys make of its tokens; what it holds is then found as if it had been computed here. A bundle goes to the tenant
 * and principal that it came from, never to another.
 *
 * The seal shows that whoever made the file knew the words, and no more: they can write what they like into it. So its blocks become the principal's own,
 * as if a device of theirs had sent them, and false ones spoil nobody else's replies. An operator who knows that the file comes
 * from a store of theirs says so (`trusted`); then each block keeps its namespace (shared, or the principal's own) and its provenance.
 *
 * Frames: the first is JSON: format, version, tenant, principal, fingerprint, layout. Then, for each conversation, "C" and its record's body
 * (conversation.h), and behind it its blocks, each once a file:
 *      0   1  "B"
 *      1   1  namespace: 0 shared, 1 own
 *      2   2  zeros
 *      4   4  index of the block
 *      8   4  quality: fidelity, numerics, provenance, 0
 *     12   2  first layer    14   2  behind the last layer
 *     16      K and V piece of each layer, each behind its size, u32le                                                          */
#ifndef TANDEM_STORE_BUNDLE_H
#define TANDEM_STORE_BUNDLE_H
#include "store/portable.h"
#include "store/store.h"

struct bundle_counts {
    uint64_t conversations, blocks, bytes; /* bytes of pieces */
    uint64_t kept; /* import: conversations of an id that was there already: not touched */
};
/* Export: by blocks looked for; import: by bytes of the file. NULL: nobody watches. */
struct bundle_progress {
    void (*fn)(void *ctx, uint64_t done, uint64_t total);
    void *ctx;
};
/* Of this model only: fingerprint and layout are part of the blocks' names. */
int bundle_export(struct store *s, const char *tenant, const char *principal,
                  const uint8_t fingerprint[TD_HASH_SIZE], const uint8_t layout[TD_HASH_SIZE],
                  struct portable *file, const struct bundle_progress *progress, struct bundle_counts *counts,
                  struct td_error *err);
/* tenant, principal: "" or what the file must say. Durable on return. */
int bundle_import(struct store *s, const char *tenant, const char *principal, bool trusted,
                  struct portable *file, const struct bundle_progress *progress, struct bundle_counts *counts,
                  struct td_error *err);

#endif
