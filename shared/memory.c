/* memory: see memory.h. */
#include "shared/memory.h"
#include <inttypes.h>
#include <stdio.h>

uint64_t memory_available(void)
{
    char line[128];
    uint64_t kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kib) == 1)
            break;
    if (f)
        fclose(f);
    return kib << 10;
}
