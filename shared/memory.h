/* memory: how much of the machine's memory is there to be taken. */
#ifndef TANDEM_SHARED_MEMORY_H
#define TANDEM_SHARED_MEMORY_H
#include <stdint.h>

/* Bytes that programs may still take without pushing others out; 0: cannot tell. */
uint64_t memory_available(void);

#endif
