/* forget: a heap that keeps nothing of what was freed. Prompts pass through many hands (HTTP, JSON, protobuf, TLS), so wiping each
 * buffer by hand would miss some: instead, free and realloc of the whole process overwrite memory before they give it back.
 * Linked only into programs that name td_forget; costs one memset of what is freed. Memory that goes back to the system (large
 * blocks) is not written: the system wipes it. Without glibc, and under sanitizers (which own the heap), it does nothing. */
#ifndef TANDEM_SHARED_FORGET_H
#define TANDEM_SHARED_FORGET_H

/* First thing in main. */
void forget_enable(void);

#endif
