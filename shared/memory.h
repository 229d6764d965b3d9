/* memory: how much memory there is to be taken, by the machine and by the limits of the control groups that the process is in. */
#ifndef TANDEM_SHARED_MEMORY_H
#define TANDEM_SHARED_MEMORY_H
#include <stdint.h>

/* Bytes that this process may still take without pushing others out, at least 1; 0: cannot tell. */
uint64_t memory_available(void);
/* Bytes of swap that are free besides, as far as no group's limit comes first; what a group may swap is not asked. */
uint64_t memory_swap(void);
/* Both of the files under `root` (tests). */
uint64_t memory_available_under(const char *root);
uint64_t memory_swap_under(const char *root);

#endif
