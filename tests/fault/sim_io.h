/* sim_io: a disk in memory behind store/io.h that can lose power and fail.
 *
 * Strict model: what was written is only sure to survive once the file was synced, a name only once its directory was. At a power
 * loss each write since the last sync survives or not on its own, torn into 512-byte sectors; each change of the directory, too. A failed sync
 * loses the writes that it covered for good while reading still shows them, and the next sync succeeds: what Linux does.
 * One flat directory; its own creation counts as a name in its parent. Thread-safe. */
#ifndef TANDEM_TESTS_SIM_IO_H
#define TANDEM_TESTS_SIM_IO_H
#include "store/io.h"
#include <pthread.h>

enum sim_kind { /* of operation, for faults and for leaving out syncs */
                SIM_OPEN,
                SIM_READ,
                SIM_WRITE,
                SIM_SYNC_SEGMENT,
                SIM_SYNC_OTHER, /* of a file that is no segment: keys.td.tmp */
                SIM_SYNC_DIRECTORY,
                SIM_SYNC_PARENT,
                SIM_RENAME,
                SIM_UNLINK,
                SIM_TRUNCATE, /* also of reserving space */
                SIM_KINDS,
};

/* Which unsynced changes survive a power loss: by lot, none, all, each by its own lot, or each sector by its own. */
enum sim_survival { SURVIVE_BY_LOT, SURVIVE_NONE, SURVIVE_ALL, SURVIVE_SOME, SURVIVE_SECTORS };

struct sim_file;
struct sim_name;
struct sim_change;

struct sim {
    struct io io; /* first: the functions cast back */
    pthread_mutex_t lock;
    const char *directory;
    struct sim_name *names, *durable_names;
    struct sim_change *changes; /* of names, since the directory was synced; oldest first */
    struct sim_file *files;     /* all that exist, named or open */
    bool directory_made, directory_durable;
    struct sim_handle {
        struct sim_file *file; /* NULL: free */
    } handles[512];
    uint64_t rng, disk_rng; /* the test's random numbers; the disk's own, under the lock */
    uint64_t capacity;      /* bytes; 0: no end */
    bool is_quota;          /* of a user: the file system says that it has room without end */
    /* power */
    enum sim_survival survival;
    uint64_t operations, power_off_at; /* changing operations so far; off when that many are done; 0: never */
    _Atomic bool off;
    /* faults; set them with the lock held while a store is open */
    uint64_t counts[SIM_KINDS], fail_at[SIM_KINDS]; /* 1: the next; 0: none */
    uint64_t fail_for[SIM_KINDS];                   /* how many in a row; 0 = 1 */
    int fail_errno;
    bool skip_sync[SIM_KINDS];    /* pretend that this kind of sync was done … */
    bool (*skip_when)(void *ctx); /* … if this says so; NULL: always */
    void *skip_ctx;
    uint64_t skipped;
    void (*before_unlink)(void *ctx, const char *name); /* on the thread that unlinks */
    void *unlink_ctx;
    const char *violation; /* the first broken rule of ordering that the disk itself has seen */
};

void sim_init(struct sim *s, const char *directory, uint64_t seed);
void sim_deinit(struct sim *s);
/* The machine stops and starts: open files are gone, what was not synced may be. Power is on again afterwards. */
void sim_power_loss(struct sim *s);
/* The process stops, the machine goes on: everything written stays, synced or not. */
void sim_process_death(struct sim *s);
uint32_t sim_random(struct sim *s, uint32_t bound); /* for the test's thread */
const char *sim_violation(struct sim *s);
uint64_t sim_used(struct sim *s);

#endif
