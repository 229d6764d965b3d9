/* memory: the smaller of what the machine has and what control groups of either version leave, cached files counted as room. */
#include "shared/memory.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <cmocka.h>

#define MIB ((uint64_t)1 << 20)

static char root[] = "/tmp/tandem-memory-XXXXXX";

static void put(const char *name, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s%s", root, name);
    for (char *p = path + strlen(root) + 1; (p = strchr(p, '/')) != NULL; *p++ = '/') {
        *p = 0;
        mkdir(path, 0700);
    }
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static int setup(void **state)
{
    (void)state;
    strcpy(root + strlen(root) - 6, "XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

static void the_machine_alone(void **state)
{
    (void)state;
    assert_int_equal(memory_available_under(root), 0);
    put("/proc/meminfo", "MemTotal:  4194304 kB\nMemAvailable:    2097152 kB\n");
    assert_int_equal(memory_available_under(root), 2048 * MIB);
    put("/proc/self/cgroup", "0::/user/tandem\n");
    assert_int_equal(memory_available_under(root), 2048 * MIB);
    put("/sys/fs/cgroup/user/tandem/memory.max", "max\n");
    put("/sys/fs/cgroup/user/tandem/memory.current", "1048576\n");
    assert_int_equal(memory_available_under(root), 2048 * MIB);
}

static void a_group_and_those_above(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemAvailable:    2097152 kB\n");
    put("/proc/self/cgroup", "1:cpu:/elsewhere\n0::/user/tandem\n");
    put("/sys/fs/cgroup/user/tandem/memory.max", "1073741824\n");
    put("/sys/fs/cgroup/user/tandem/memory.current", "805306368\n");
    assert_int_equal(memory_available_under(root), 256 * MIB);
    put("/sys/fs/cgroup/user/tandem/memory.stat", "anon 1\ninactive_file 134217728\nactive_file 67108864\n");
    assert_int_equal(memory_available_under(root), 448 * MIB);
    put("/sys/fs/cgroup/user/memory.max", "1073741824\n");
    put("/sys/fs/cgroup/user/memory.current", "1006632960\n");
    assert_int_equal(memory_available_under(root), 64 * MIB);
    put("/sys/fs/cgroup/user/memory.current", "1073741824\n");
    assert_int_equal(memory_available_under(root), 1); /* none, which is known */
}

/* A container's own group is its root, under whatever name it has outside. */
static void a_containers_root(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemAvailable:    2097152 kB\n");
    put("/proc/self/cgroup", "0::/\n");
    put("/sys/fs/cgroup/memory.max", "536870912\n");
    put("/sys/fs/cgroup/memory.current", "268435456\n");
    assert_int_equal(memory_available_under(root), 256 * MIB);
    put("/proc/self/cgroup", "0::/../outside\n");
    assert_int_equal(memory_available_under(root), 256 * MIB);
}

static void the_first_version(void **state)
{
    (void)state;
    put("/proc/meminfo", "MemAvailable:    2097152 kB\n");
    put("/proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a\n0::/b\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "4194304\n");
    put("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1073741824\n");
    put("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1073741824\n");
    put("/sys/fs/cgroup/memory/a/memory.stat",
        "inactive_file 1\ntotal_inactive_file 33554432\ntotal_active_file 33554432\n");
    assert_int_equal(memory_available_under(root), 64 * MIB);
}

static void swap_as_far_as_no_group_is_limited(void **state)
{
    (void)state;
    assert_int_equal(memory_swap_under(root), 0);
    put("/proc/meminfo", "MemAvailable:    2097152 kB\n");
    assert_int_equal(memory_swap_under(root), 0);
    put("/proc/meminfo", "MemAvailable:    2097152 kB\nSwapTotal: 9 kB\nSwapFree:    1048576 kB\n");
    assert_int_equal(memory_swap_under(root), 1024 * MIB);
    put("/proc/self/cgroup", "0::/a\n");
    put("/sys/fs/cgroup/a/memory.max", "max\n");
    assert_int_equal(memory_swap_under(root), 1024 * MIB);
    put("/sys/fs/cgroup/a/memory.max", "1073741824\n");
    put("/sys/fs/cgroup/a/memory.current", "1048576\n");
    assert_int_equal(memory_swap_under(root), 0);
}

static void this_machine(void **state)
{
    (void)state;
    assert_true(memory_available() > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_machine_alone, setup, teardown),
        cmocka_unit_test_setup_teardown(a_group_and_those_above, setup, teardown),
        cmocka_unit_test_setup_teardown(a_containers_root, setup, teardown),
        cmocka_unit_test_setup_teardown(the_first_version, setup, teardown),
        cmocka_unit_test_setup_teardown(swap_as_far_as_no_group_is_limited, setup, teardown),
        cmocka_unit_test(this_machine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
