/* paced: computing that takes a fixed time for each token and layer, for measurements that noise must not reach. With TANDEM_PACED_LAYER_US=X (a number,
 * fractions too) in the environment, edge and cloud wait behind each forward pass until X microseconds a token and layer have gone since its start; a pass
 * that takes longer is not made shorter. Not for use: it only makes things slower. */
#ifndef TANDEM_SHARED_PACED_H
#define TANDEM_SHARED_PACED_H
#include <stdbool.h>
#include <stdint.h>

bool paced_is_on(void); /* then positions cost alike */

/* work: tokens x layers of the pass that began at start_us (clock_mono_us). Returns at once without the variable. */
void paced_wait(uint64_t start_us, double work);

#endif
