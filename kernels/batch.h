/* batch: is a batch well formed? One answer for every engine. A bad batch is refused whole, before a page is touched: what a peer or a
 * scheduler got wrong is a code, never a crash. */
#ifndef TANDEM_KERNELS_BATCH_H
#define TANDEM_KERNELS_BATCH_H
#include "kernels/backend.h"

/* rows_max: of one forward; has_head: output norm and head are held, so logits can be asked for. Returns 0, or -TD_ERR_ARG, -TD_ERR_LIMIT (rows,
 * sequences), -TD_ERR_UNSUPPORTED (layers or head not held), -TD_ERR_CONTEXT (beyond context_max), -TD_ERR_FORMAT (hidden_in is not finite). */
int batch_check(const struct backend *b, uint32_t rows_max, bool has_head, const struct batch *batch);

#endif
