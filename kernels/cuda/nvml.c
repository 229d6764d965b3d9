/* nvml: what the driver's management library says of a GPU. It is opened when it is first asked: no program needs it to start, and
 * without it there is simply nothing to say. */
#include "kernels/cuda/cuda.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>

/* NVML's own types and numbers, as its interface fixes them. */
typedef struct nvmlDevice_st *nvml_device;
struct nvml_utilization {
    unsigned int gpu, memory; /* percent */
};
struct nvml_memory {
    unsigned long long total, free, used;
};
enum { NVML_CLOCK_SM = 1, NVML_CLOCK_MEM = 2 };

static struct {
    pthread_once_t once;
    bool works;
    int (*by_bus)(const char *bus, nvml_device *out);
    int (*utilization)(nvml_device d, struct nvml_utilization *out);
    int (*memory)(nvml_device d, struct nvml_memory *out);
    int (*power)(nvml_device d, unsigned int *milliwatts);
    int (*clock)(nvml_device d, unsigned int type, unsigned int *mhz);
    int (*temperature)(nvml_device d, unsigned int sensor, unsigned int *celsius);
} nvml = {.once = PTHREAD_ONCE_INIT};

static bool find(void *library, const char *name, void *to)
{
    void *symbol = dlsym(library, name);
    memcpy(to, &symbol, sizeof symbol);
    return symbol != NULL;
}

static void open_library(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(void);
    nvml.works = library && find(library, "nvmlInit_v2", &init) &&
                 find(library, "nvmlDeviceGetHandleByPciBusId_v2", &nvml.by_bus) &&
                 find(library, "nvmlDeviceGetUtilizationRates", &nvml.utilization) &&
                 find(library, "nvmlDeviceGetMemoryInfo", &nvml.memory) &&
                 find(library, "nvmlDeviceGetPowerUsage", &nvml.power) &&
                 find(library, "nvmlDeviceGetClockInfo", &nvml.clock) &&
                 find(library, "nvmlDeviceGetTemperature", &nvml.temperature) && init() == 0;
}

bool cuda_gpu_read(int device, struct cuda_gpu *out)
{
    char bus[32];
    nvml_device d;
    struct nvml_utilization utilization = {0};
    struct nvml_memory memory = {0};
    unsigned int power = 0, sm = 0, mem = 0, celsius = 0;
    *out = (struct cuda_gpu){0};
    pthread_once(&nvml.once, open_library);
    if (!nvml.works || cudaDeviceGetPCIBusId(bus, sizeof bus, device) || nvml.by_bus(bus, &d) != 0)
        return false;
    bool all = nvml.utilization(d, &utilization) == 0 && nvml.memory(d, &memory) == 0 &&
               nvml.power(d, &power) == 0 && nvml.clock(d, NVML_CLOCK_SM, &sm) == 0 &&
               nvml.clock(d, NVML_CLOCK_MEM, &mem) == 0 && nvml.temperature(d, 0, &celsius) == 0;
    *out = (struct cuda_gpu){.busy = utilization.gpu * 0.01,
                             .memory_busy = utilization.memory * 0.01,
                             .memory_used = memory.used,
                             .memory_total = memory.total,
                             .power_watts = power * 1e-3,
                             .sm_mhz = sm,
                             .memory_mhz = mem,
                             .celsius = celsius};
    return all;
}
