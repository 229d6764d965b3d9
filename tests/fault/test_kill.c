/* kill -9 at random moments: a child works on a store, the parent kills it, opens the store and compares it with the model
 * (model.h), which lies in memory that both share, so what was acknowledged is known up to the last instant.
 * TANDEM_KILLS sets the number of kills. */
#include "model.h"
#include "shared/log.h"
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

enum { KILLS = 25, DELAY_MAX_US = 60000 };
enum { OPENING, OPENED, AT_WORK, WHEN_COUNT }; /* a life ends up to the delay after that has begun */

struct shared {
    struct model model;
    struct sim dice; /* only its random numbers are used */
    atomic_ulong steps;
    atomic_bool opened;
};

static struct store_config config_for(const char *directory, bool evict)
{
    struct store_config c = fixture_config(directory);
    c.segment_size = 256 << 10;
    c.limit_size = evict ? 600 << 10 : 1 << 30;
    c.commit_interval_ms = 1;
    return c;
}

static void child(struct shared *sh, const char *directory, bool evict)
{
    struct store_config c = config_for(directory, evict);
    struct store *s;
    c.demotion = fixture_demotion("acme");
    if (store_open(&c, &s, NULL) < 0)
        _exit(1);
    atomic_store(&sh->opened, true);
    for (;;) {
        model_step(&sh->model, s, &sh->dice);
        atomic_fetch_add(&sh->steps, 1);
    }
}

static void kill_once(struct shared *sh, const char *directory, bool evict)
{
    unsigned long when = sim_random(&sh->dice, WHEN_COUNT);
    unsigned long steps = atomic_load(&sh->steps);
    atomic_store(&sh->opened, false);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        child(sh, directory, evict);
    while ((when >= OPENED &&
            !atomic_load(&sh->opened)) || /* on a busy machine both take longer than the delay */
           (when == AT_WORK && atomic_load(&sh->steps) == steps))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    struct timespec delay = {0, 1000L * (long)sim_random(&sh->dice, DELAY_MAX_US)};
    nanosleep(&delay, NULL);
    assert_int_equal(kill(pid, SIGKILL), 0);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status)); /* the child itself found nothing wrong */

    struct store_config c = config_for(directory, evict);
    struct store *s = fixture_open(&c); /* no waiting for the dead one's lock */
    model_check(&sh->model, s, NULL);
    store_close(s);
    if (sh->model.violation[0])
        fail_msg("%s", sh->model.violation);
}

static void kill_many(bool evict)
{
    const char *runs = getenv("TANDEM_KILLS");
    unsigned long kills = runs && *runs ? strtoul(runs, NULL, 10) : KILLS;
    struct shared *sh = mmap(NULL, sizeof *sh, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(sh != MAP_FAILED);
    char *directory = strdup("/tmp/tandem-kill-XXXXXX");
    assert_non_null(mkdtemp(directory));
    model_init(&sh->model);
    sh->model.demotes = true;
    sh->model.blocks_may_go = evict;
    sh->dice.rng = 12345;
    for (unsigned long i = 0; i < kills; i++)
        kill_once(sh, directory, evict);
    assert_true(sh->steps > kills / WHEN_COUNT / 2); /* it did work in between */
    fixture_remove(directory);
    munmap(sh, sizeof *sh);
}

static void test_killed_anywhere(void **state)
{
    (void)state;
    kill_many(false);
}
static void test_killed_anywhere_while_evicting(void **state)
{
    (void)state;
    kill_many(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_anywhere),
        cmocka_unit_test(test_killed_anywhere_while_evicting),
    };
    log_set_level(LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
