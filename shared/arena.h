/* arena: bump allocation with one lifetime and a hard limit. Not thread-safe; one owner.
 * Chunks are kept over arena_reset, so a step arena allocates nothing once warm. */
#ifndef TANDEM_SHARED_ARENA_H
#define TANDEM_SHARED_ARENA_H
#include <stddef.h>

struct arena_chunk;
struct arena {
    struct arena_chunk *first, *current;
    size_t limit_size; /* bytes that all chunks together may take */
    size_t taken_size; /* bytes that chunks take now */
};

void arena_init(struct arena *a, size_t limit_size);
void arena_deinit(struct arena *a);
void arena_reset(struct arena *a); /* every pointer handed out before is dead */
/* arena_alloc: zeroed, 64-byte aligned, NULL when the limit or memory is reached. */
void *arena_alloc(struct arena *a, size_t size);
char *arena_strndup(struct arena *a, const char *text, size_t size);

#endif
