/* heap: how the C library's allocator is set in programs that run for months. By itself glibc makes an arena for nearly every thread and keeps ever larger
 * blocks in them once one was freed (a threshold that grows), and what is freed between two that live stays: a node under mixed load grew by 8 MiB a
 * minute without holding a byte more. With few arenas, large blocks that go back to the system when they are freed, and what is free in between given
 * back now and then, it is flat (tests/bench/RESULTS.md). Elsewhere both do nothing. */
#ifndef TANDEM_SHARED_HEAP_H
#define TANDEM_SHARED_HEAP_H

#define HEAP_ARENAS_MAX 2
#define HEAP_LARGE_SIZE (1 << 20) /* bytes from which on a block is a mapping of its own */
#define HEAP_TRIM_S     60        /* programs call heap_trim so often */

void heap_settle(void); /* first thing in main */
void heap_trim(void);   /* any thread; takes milliseconds */

#endif
