/* workers: the process's compute pool. workers_run splits one job into tasks and returns when all are done; the
 * calling thread works too. Tasks must not depend on which worker runs them: results are the same for any count. Each worker
 * begins with its share, the i-th of equal runs of consecutive tasks, and then helps the others with theirs. */
#ifndef TANDEM_SHARED_WORKERS_H
#define TANDEM_SHARED_WORKERS_H
#include <stddef.h>

#define WORKERS_MAX 64

struct workers;
typedef void (*workers_task)(void *ctx, size_t task_index, unsigned worker_index);

/* thread_count includes the caller; 1 means no thread is started. NULL when threads cannot be made. */
struct workers *workers_create(unsigned thread_count);
void workers_destroy(struct workers *w);
unsigned workers_count(const struct workers *w);
/* One job at a time per pool. worker_index < workers_count. Waits spin briefly, then sleep. */
void workers_run(struct workers *w, size_t task_count, workers_task task, void *ctx);

#endif
