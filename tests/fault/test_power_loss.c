/* Power loss at any operation: random work, demotion included, on a store over a simulated disk (sim_io.h), the power taken away at a random
 * changing operation, restart, and everything compared with the model (model.h). The SQLite index is a real file; at each
 * restart it is as it was, or gone, or an old copy.
 *
 * The second half turns the checker on itself: with each kind of sync left out, it must find a loss.
 * TANDEM_FAULT_RUNS sets the number of seeds; the seed of a failure is printed and TANDEM_FAULT_SEED starts there. */
#include "model.h"
#include "shared/log.h"

enum { RUNS = 100, CYCLES = 6, STEPS_MAX = 60, OPERATIONS_MAX = 150, SKIP_SEEDS = 2000 };

struct scenario {
    uint64_t seed;
    uint64_t limit_size;     /* small: eviction */
    enum sim_kind skip;      /* a sync to leave out; SIM_KINDS: none */
    bool skip_in_eviction;   /* only what belongs to dropping segments */
    bool skip_while_opening; /* else while running */
    uint64_t acknowledged;   /* out: how much there was to lose */
};

static uint64_t number_from_environment(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : fallback;
}

static void set_skip(struct sim *sim, const struct scenario *c, bool opening)
{
    pthread_mutex_lock(&sim->lock);
    if (c->skip < SIM_KINDS)
        sim->skip_sync[c->skip] = opening == c->skip_while_opening;
    pthread_mutex_unlock(&sim->lock);
}

/* What a restart finds of the index: the last state, none, or one from an earlier life. */
static void shuffle_index(struct sim *sim, const char *dir, const char *backup, bool clean)
{
    char from[512], to[512], command[1100];
    uint32_t lot = sim_random(sim, 8);
    snprintf(from, sizeof from, "%s/" INDEX_FILE, dir);
    snprintf(to, sizeof to, "%s/" INDEX_FILE, backup);
    if (clean && lot < 4) { /* after a clean close the file is whole: keep a copy for later */
        snprintf(command, sizeof command, "cp %s %s", from, to);
        if (system(command) != 0)
            fail();
    } else if (lot == 6) {
        index_set_aside(dir, false);
    } else if (lot == 7 && access(to, R_OK) == 0) {
        index_set_aside(dir, false);
        snprintf(command, sizeof command, "cp %s %s", to, from);
        if (system(command) != 0)
            fail();
    }
}

static bool making_room(void *store)
{
    return ((const struct store *)store)->making_room; /* asked on the writer's thread, whose field it is */
}

static struct store *open_store(struct model *m, struct sim *sim, const struct scenario *c,
                                const char *index_directory)
{
    struct store_config config = fixture_config("/disk/store");
    /* Threads make a seed say less of what happens, so only some have them. */
    struct store_env env = {.io = &sim->io,
                            .index_directory = index_directory,
                            .write_threads = c->seed % 4 == 0 ? 3 : 1,
                            .direct_size = c->seed % 2 ? 1 : UINT64_MAX};
    struct store *s = NULL;
    struct td_error err = {0};
    config.demotion = m->demotes ? fixture_demotion("acme") : NULL;
    config.segment_size = 256 << 10;
    config.limit_size = c->limit_size ? c->limit_size : 1 << 30;
    config.commit_interval_ms =
        1000000; /* commits happen at flushes alone, so that a seed says what happens */
    set_skip(sim, c, true);
    sim->skip_when = NULL;
    int rc = store_open_with(&config, &env, &s, &err);
    pthread_mutex_lock(&sim->lock);
    if (rc == 0 && c->skip_in_eviction) {
        sim->skip_ctx = s;
        sim->skip_when = making_room;
    }
    pthread_mutex_unlock(&sim->lock);
    set_skip(sim, c, false);
    if (rc < 0 && !sim->off)
        model_violate(m, err.text);
    return rc < 0 ? NULL : s;
}

static void run_cycle(struct model *m, struct sim *sim, struct scenario *c, const char *index_directory,
                      const char *backup)
{
    bool crash = sim_random(sim, 5) != 0;
    sim->operations = 0;
    sim->power_off_at = crash ? 1 + sim_random(sim, OPERATIONS_MAX) : 0;
    struct store *s = open_store(m, sim, c, index_directory);
    model_index_is_true(index_directory); /* an old copy may have been set aside */
    if (s && model_check(m, s, sim)) {
        uint32_t steps = sim_random(sim, STEPS_MAX);
        for (uint32_t i = 0; i < steps && !sim->off; i++)
            model_step(m, s, sim);
    }
    store_close(s);
    if (!model_index_is_true(index_directory) && c->skip == SIM_KINDS)
        model_violate(m, "a true index was taken for a false one");
    c->acknowledged += m->acknowledged;
    shuffle_index(sim, index_directory, backup, s && !sim->off);
    if (sim_random(sim, 4) == 0)
        sim_process_death(sim);
    else
        sim_power_loss(sim);
}

/* Play a scenario; true when the checker found something wrong, with the reason in `why`. */
static bool play(struct scenario *c, char why[160])
{
    struct sim *sim = malloc(sizeof *sim);
    struct model *m = malloc(sizeof *m);
    char *index_directory = fixture_directory(), *backup = fixture_directory();
    uint64_t freed;
    sim_init(sim, "/disk/store", c->seed);
    model_init(m);
    m->blocks_may_go = c->limit_size != 0;
    m->demotes = c->skip == SIM_KINDS;
    for (int cycle = 0; cycle < CYCLES && !m->violation[0]; cycle++)
        run_cycle(m, sim, c, index_directory, backup);
    struct store *s = open_store(m, sim, c, index_directory);
    model_index_is_true(index_directory);
    if (s)
        model_check(m, s, NULL);
    if (s && store_compact(s, 0, NULL, NULL, &freed, NULL) == 0) /* each segment is held against the index */
        model_check(m, s, NULL);
    store_close(s);
    if (!model_index_is_true(index_directory) && c->skip == SIM_KINDS)
        model_violate(m, "a true index was taken for a false one");
    if (sim->violation)
        model_violate(m, sim->violation);
    snprintf(why, 160, "%s", m->violation);
    bool found = m->violation[0] != '\0';
    sim_deinit(sim);
    free(sim);
    free(m);
    fixture_remove(index_directory);
    fixture_remove(backup);
    return found;
}

static void play_many(uint64_t limit_size)
{
    uint64_t runs = number_from_environment("TANDEM_FAULT_RUNS", RUNS),
             first = number_from_environment("TANDEM_FAULT_SEED", 1);
    uint64_t acknowledged = 0;
    for (uint64_t seed = first; seed < first + runs; seed++) {
        struct scenario c = {.seed = seed, .limit_size = limit_size, .skip = SIM_KINDS};
        char why[160];
        if (play(&c, why))
            fail_msg("seed %llu: %s", (unsigned long long)seed, why);
        acknowledged += c.acknowledged;
    }
    assert_true(acknowledged > runs); /* there was something to lose */
}

static void test_nothing_acknowledged_is_lost(void **state)
{
    (void)state;
    play_many(0);
}

static void test_nothing_deleted_comes_back_through_eviction(void **state)
{
    (void)state;
    play_many(600 << 10); /* some twenty blocks, in segments of 75 KiB */
}

static void expect_found(struct scenario c)
{
    char why[160];
    for (c.seed = 1; c.seed <= SKIP_SEEDS; c.seed++) {
        if (play(&c, why)) {
            print_message("[          ] found with seed %llu: %s\n", (unsigned long long)c.seed, why);
            return;
        }
    }
    fail_msg("no loss found with sync %d left out", (int)c.skip);
}

static void test_checker_sees_a_missing_segment_sync(void **state)
{
    (void)state;
    expect_found((struct scenario){.skip = SIM_SYNC_SEGMENT});
}
static void test_checker_sees_a_missing_directory_sync(void **state)
{
    (void)state;
    expect_found((struct scenario){.skip = SIM_SYNC_DIRECTORY});
}
static void test_checker_sees_a_missing_key_file_sync(void **state)
{
    (void)state;
    expect_found((struct scenario){.skip = SIM_SYNC_OTHER});
}
static void test_checker_sees_a_missing_parent_sync(void **state)
{
    (void)state;
    expect_found((struct scenario){.skip = SIM_SYNC_PARENT, .skip_while_opening = true});
}
static void test_checker_sees_a_missing_sync_after_recovery(void **state)
{
    (void)state;
    expect_found((struct scenario){.skip = SIM_SYNC_SEGMENT, .skip_while_opening = true});
}
static void test_checker_sees_a_missing_directory_sync_after_recovery(void **state)
{
    (void)state;
    expect_found((struct scenario){.skip = SIM_SYNC_DIRECTORY, .skip_while_opening = true});
}
static void test_checker_sees_a_missing_sync_in_eviction(void **state)
{
    (void)state;
    expect_found(
        (struct scenario){.skip = SIM_SYNC_SEGMENT, .skip_in_eviction = true, .limit_size = 600 << 10});
}
static void test_checker_sees_a_missing_directory_sync_in_eviction(void **state)
{
    (void)state;
    expect_found(
        (struct scenario){.skip = SIM_SYNC_DIRECTORY, .skip_in_eviction = true, .limit_size = 600 << 10});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_acknowledged_is_lost),
        cmocka_unit_test(test_nothing_deleted_comes_back_through_eviction),
        cmocka_unit_test(test_checker_sees_a_missing_segment_sync),
        cmocka_unit_test(test_checker_sees_a_missing_directory_sync),
        cmocka_unit_test(test_checker_sees_a_missing_key_file_sync),
        cmocka_unit_test(test_checker_sees_a_missing_parent_sync),
        cmocka_unit_test(test_checker_sees_a_missing_sync_after_recovery),
        cmocka_unit_test(test_checker_sees_a_missing_directory_sync_after_recovery),
        cmocka_unit_test(test_checker_sees_a_missing_sync_in_eviction),
        cmocka_unit_test(test_checker_sees_a_missing_directory_sync_in_eviction),
    };
    log_set_level(getenv("TANDEM_FAULT_LOG")
                      ? LOG_INFO
                      : (enum log_level)(LOG_ERROR + 1)); /* failing disks are the point here */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
