/* memory: how much memory there is to be taken, by the machine and by the limits of the control groups that the process is in. */
#ifndef TANDEM_SHARED_MEMORY_H
#define TANDEM_SHARED_MEMORY_H
#include <stdint.h>

/* Bytes that this process may still take without pushing others out, at least 1; 0: cannot tell. */
uint64_t memory_available(void);
/* The same of the files under `root`, for tests. */
uint64_t memory_available_under(const char *root);

#endif
