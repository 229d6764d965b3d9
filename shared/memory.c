/* memory: see memory.h. Group limits of both kinds: in the second version the process has one group, in the first one for each
 * controller; a limit holds for the groups below it, so all of them up to the root are asked. In a container the root may be the container's own
 * group, and the path then one that is not there: that is passed over. */
#include "shared/memory.h"
#include "shared/base.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define PATH_SIZE 4096
#define LINE_SIZE 512

/* The number behind `name` in a file of such lines; an empty name: the first number of the file. */
static bool number_in(const char *path, const char *name, uint64_t *out)
{
    char line[LINE_SIZE];
    size_t size = strlen(name);
    bool found = false;
    FILE *f = fopen(path, "re");
    while (f && !found && fgets(line, sizeof line, f))
        found = strncmp(line, name, size) == 0 && sscanf(line + size, "%" SCNu64, out) == 1;
    if (f)
        fclose(f);
    return found;
}

struct version { /* of groups: where they lie, and what their files are called */
    const char *place, *limit, *used, *inactive, *active;
};
static const struct version VERSIONS[] = {
    {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file ", "active_file "},
    {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ",
     "total_active_file "},
};

/* What a group leaves: its limit less what is used, but for cached files, which make room. */
static uint64_t left_in(const struct version *v, const char *directory)
{
    char path[PATH_SIZE];
    uint64_t limit, used, inactive = 0, active = 0;
    snprintf(path, sizeof path, "%s/%s", directory, v->limit);
    if (!number_in(path, "", &limit)) /* none, or "max" */
        return UINT64_MAX;
    snprintf(path, sizeof path, "%s/%s", directory, v->used);
    if (!number_in(path, "", &used))
        return UINT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", directory);
    number_in(path, v->inactive, &inactive);
    number_in(path, v->active, &active);
    used -= TD_MIN(used, inactive + active);
    return limit > used ? limit - used : 0;
}

static uint64_t left_in_all(const struct version *v, const char *root, const char *group)
{
    char path[PATH_SIZE];
    uint64_t left = UINT64_MAX;
    snprintf(path, sizeof path, "%s%s%s", root, v->place, group);
    for (size_t shortest = strlen(root) + strlen(v->place); strlen(path) >= shortest; *strrchr(path, '/') = 0)
        left = TD_MIN(left, left_in(v, path));
    return left;
}

static uint64_t left_in_groups(const char *root)
{
    char path[PATH_SIZE], line[PATH_SIZE];
    uint64_t left = UINT64_MAX;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) { /* number:controllers:group */
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        if (controllers[1] == 0)
            left = TD_MIN(left, left_in_all(&VERSIONS[0], root, group));
        else if (strcmp(controllers, ":memory") == 0)
            left = TD_MIN(left, left_in_all(&VERSIONS[1], root, group));
    }
    if (f)
        fclose(f);
    return left;
}

uint64_t memory_available_under(const char *root)
{
    char path[PATH_SIZE];
    uint64_t kib = 0;
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (!number_in(path, "MemAvailable:", &kib))
        return 0;
    return TD_MAX(TD_MIN(kib << 10, left_in_groups(root)), (uint64_t)1);
}

uint64_t memory_available(void)
{
    return memory_available_under("");
}

uint64_t memory_swap_under(const char *root)
{
    char path[PATH_SIZE];
    uint64_t available = 0, swap = 0, groups = left_in_groups(root);
    snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (!number_in(path, "MemAvailable:", &available) || !number_in(path, "SwapFree:", &swap))
        return 0;
    return TD_MIN(swap << 10, groups - TD_MIN(groups, available << 10));
}

uint64_t memory_swap(void)
{
    return memory_swap_under("");
}
