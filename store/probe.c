/* probe: see probe.h. */
#include "store/probe.h"
#include "store/store_internal.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define PROBE_FILE     "probe.tmp" /* as all temporary files, removed by the next start if need be */
#define SPEED_SIZE_MAX 256u

/* ---- the disk ------------------------------------------------------------------------------------------------- */

static int timed_read(struct io *io, int fd, uint8_t *buffer, size_t size, uint64_t *us)
{
    io->advise(io, fd, 0, size, IO_FORGET);
    uint64_t begun = clock_mono_us();
    int rc = io_read_all(io, fd, buffer, size, 0);
    *us = clock_mono_us() - begun;
    return rc;
}

/* The newest segment with so many bytes, pinned; NULL. */
static struct segment *long_segment(struct store *s, size_t size)
{
    uint64_t id = 0;
    bool found = false;
    pthread_mutex_lock(&s->segments.lock);
    for (size_t i = s->segments.count; i-- > 0 && !found;)
        if (atomic_load(&s->segments.list[i]->end) >= size) {
            id = s->segments.list[i]->id;
            found = true;
        }
    pthread_mutex_unlock(&s->segments.lock);
    return found ? segment_acquire(&s->segments, id, NULL) : NULL;
}

static int read_own_file(struct store *s, uint8_t *buffer, size_t size, uint64_t *us)
{
    char path[IO_PATH_MAX];
    if (s->read_only || !io_path(path, s->directory, PROBE_FILE))
        return -TD_ERR_UNSUPPORTED;
    int fd = s->io->open(s->io, path, O_RDWR | O_CREAT);
    if (fd < 0)
        return io_status(fd);
    int rc = crypto_random(buffer, size); /* a disk that compresses finds nothing to gain */
    rc = rc < 0 ? rc : io_write_all(s->io, fd, buffer, size, 0);
    if (rc == 0 && s->io->fsync(s->io, fd) < 0) /* what is not on the disk stays in memory */
        rc = -TD_ERR_IO;
    rc = rc < 0 ? rc : timed_read(s->io, fd, buffer, size, us);
    s->io->close(s->io, fd);
    s->io->unlink(s->io, path);
    return rc;
}

int store_probe(struct store *s, size_t block_size, uint64_t *us)
{
    size_t size = TD_MIN(block_size, (size_t)PROBE_SIZE);
    uint8_t *buffer = malloc(size + 1);
    if (!buffer)
        return -TD_ERR_NOMEM;
    struct segment *g = long_segment(s, size);
    int rc = g ? timed_read(s->io, g->fd, buffer, size, us) : read_own_file(s, buffer, size, us);
    if (g)
        segment_release(&s->segments, g);
    free(buffer);
    if (rc == 0)
        *us = (uint64_t)((double)*us * (double)block_size / (double)TD_MAX(size, 1u)) + 1;
    return rc;
}

/* ---- what the last process noted ------------------------------------------------------------------------------ */

int store_speed_load(struct store *s, size_t block_size, uint64_t us[TIER_COUNT])
{
    char path[IO_PATH_MAX], text[SPEED_SIZE_MAX + 1];
    uint8_t *data = NULL;
    size_t size = 0, noted = 0;
    memset(us, 0, TIER_COUNT * sizeof *us);
    if (!io_path(path, s->directory, SPEED_FILE) ||
        io_read_file(s->io, path, SPEED_SIZE_MAX, &data, &size) < 0)
        return -TD_ERR_NOTFOUND;
    memcpy(text, data, size);
    text[size] = '\0';
    free(data);
    int got = sscanf(text, "tandem-speed 1 block %zu ram %" SCNu64 " disk %" SCNu64 " remote %" SCNu64,
                     &noted, &us[TIER_RAM], &us[TIER_DISK], &us[TIER_REMOTE]);
    if (got == 1 + TIER_COUNT && noted == block_size)
        return 0;
    memset(us, 0, TIER_COUNT * sizeof *us);
    return -TD_ERR_NOTFOUND;
}

int store_speed_save(struct store *s, size_t block_size, const uint64_t us[TIER_COUNT])
{
    char text[SPEED_SIZE_MAX];
    int size = snprintf(text, sizeof text,
                        "tandem-speed 1 block %zu ram %" PRIu64 " disk %" PRIu64 " remote %" PRIu64 "\n",
                        block_size, us[TIER_RAM], us[TIER_DISK], us[TIER_REMOTE]);
    return s->read_only ? -TD_ERR_UNSUPPORTED
                        : io_replace_file(s->io, s->directory, SPEED_FILE, text, (size_t)size);
}
