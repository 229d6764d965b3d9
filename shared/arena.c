/* arena: a list of chunks, carved up from the front of the current one.
 *
 * Invariants: chunks before `current` are full for the size that was asked for; chunks after it are empty;
 * every chunk's `used` is a multiple of ARENA_ALIGN. Sizes of new chunks double, so that an arena with a lot
 * in it has few of them, but never pass the limit. */
#include "shared/arena.h"
#include "shared/base.h"
#include <stdlib.h>

#define ARENA_ALIGN          64
#define ARENA_CHUNK_SIZE_MIN 4096
/* doubling stops here; a larger request gets a chunk of its own size */
#define ARENA_CHUNK_SIZE_MAX (1u << 20)

struct arena_chunk {
    struct arena_chunk *next;
    size_t size, used; /* bytes of data */
    _Alignas(ARENA_ALIGN) uint8_t data[];
};

_Static_assert(sizeof(struct arena_chunk) == ARENA_ALIGN, "a chunk's head keeps its data aligned");

void arena_init(struct arena *a, size_t limit_size)
{
    *a = (struct arena){.limit_size = limit_size};
}

void arena_deinit(struct arena *a)
{
    for (struct arena_chunk *chunk = a->first, *next; chunk; chunk = next) {
        next = chunk->next;
        free(chunk);
    }
    *a = (struct arena){.limit_size = a->limit_size};
}

void arena_reset(struct arena *a)
{
    for (struct arena_chunk *chunk = a->first; chunk; chunk = chunk->next)
        chunk->used = 0;
    a->current = a->first;
}

/* Append a chunk with room for at least `size` (aligned) bytes; NULL past the limit or without memory. */
static struct arena_chunk *arena_grow(struct arena *a, size_t size)
{
    size_t room = a->limit_size - a->taken_size;
    if (room < sizeof(struct arena_chunk) || size > room - sizeof(struct arena_chunk))
        return NULL;
    size_t wanted = TD_MAX(a->taken_size, (size_t)ARENA_CHUNK_SIZE_MIN);
    wanted = TD_MIN(wanted, (size_t)ARENA_CHUNK_SIZE_MAX) - sizeof(struct arena_chunk);
    size_t data_size = TD_MAX(size, TD_MIN(wanted, room - sizeof(struct arena_chunk)));
    data_size = data_size / ARENA_ALIGN * ARENA_ALIGN;

    struct arena_chunk *chunk = aligned_alloc(ARENA_ALIGN, sizeof *chunk + data_size);
    if (!chunk)
        return NULL;
    *chunk = (struct arena_chunk){.size = data_size};
    struct arena_chunk **link = &a->first;
    while (*link)
        link = &(*link)->next;
    *link = chunk;
    a->taken_size += sizeof *chunk + data_size;
    return chunk;
}

void *arena_alloc(struct arena *a, size_t size)
{
    if (size > a->limit_size)
        return NULL; /* also keeps the rounding below from overflowing for any sane limit */
    size_t wanted = align_up(TD_MAX(size, (size_t)1), ARENA_ALIGN);
    if (wanted < size)
        return NULL;
    struct arena_chunk *chunk = a->current;
    while (chunk && wanted > chunk->size - chunk->used)
        chunk = chunk->next;
    if (!chunk)
        chunk = arena_grow(a, wanted);
    if (!chunk)
        return NULL;
    a->current = chunk;
    void *p = chunk->data + chunk->used;
    chunk->used += wanted;
    return memset(p, 0, wanted);
}

char *arena_strndup(struct arena *a, const char *text, size_t size)
{
    if (size == SIZE_MAX)
        return NULL;
    char *copy = arena_alloc(a, size + 1);
    if (copy && size > 0)
        memcpy(copy, text, size);
    return copy;
}
