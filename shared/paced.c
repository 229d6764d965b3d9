/* paced: see paced.h. */
#include "shared/paced.h"
#include "shared/base.h"
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

static double layer_us;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void read_environment(void)
{
    const char *text = getenv("TANDEM_PACED_LAYER_US");
    layer_us = text ? strtod(text, NULL) : 0;
}

bool paced_is_on(void)
{
    pthread_once(&once, read_environment);
    return layer_us > 0;
}

void paced_wait(uint64_t start_us, double work)
{
    if (!paced_is_on() || !(layer_us * work < 1e9))
        return;
    uint64_t until_us = start_us + (uint64_t)(layer_us * work), now_us;
    while ((now_us = clock_mono_us()) < until_us) {
        uint64_t us = until_us - now_us;
        nanosleep(
            &(struct timespec){.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000},
            NULL);
    }
}
