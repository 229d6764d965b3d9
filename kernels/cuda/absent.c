/* absent: what a build without CUDA has in the engine's place. */
#include "kernels/cuda/cuda.h"
#include <stdio.h>

#define ABSENT "this program was built without CUDA"

bool cuda_available(char *why, size_t size)
{
    snprintf(why, size, ABSENT);
    return false;
}

int cuda_backend_create(const struct model *m, const struct backend_config *config, const char *device,
                        struct backend **out, struct td_error *err)
{
    (void)m, (void)config;
    *out = NULL;
    return td_fail(err, -TD_ERR_UNSUPPORTED,
                   "cannot start the engine on %s: " ABSENT "; use the CPU (--device cpu)", device);
}

bool cuda_gpu_read(int device, struct cuda_gpu *out)
{
    (void)device;
    *out = (struct cuda_gpu){0};
    return false;
}

void cuda_profile_read(const struct backend *backend, struct cuda_profile *out)
{
    (void)backend;
    *out = (struct cuda_profile){0};
}

void cuda_profile_every(struct backend *backend, bool every)
{
    (void)backend, (void)every;
}

double cuda_replay_ms(struct backend *backend, uint32_t count)
{
    (void)backend, (void)count;
    return 0;
}

int cuda_device_number(const char *name)
{
    (void)name;
    return -1;
}

int cuda_measure_ceilings(const char *device, struct cuda_ceilings *out, struct td_error *err)
{
    *out = (struct cuda_ceilings){0};
    return td_fail(err, -TD_ERR_UNSUPPORTED, "cannot measure %s: " ABSENT, device);
}
