/* gpu_faults: loaded into a real program with LD_PRELOAD, it breaks the GPU under it. A thread of its own looks at the file named by
 * TANDEM_GPU_FAULTS, does what it says in the program's own context, and empties it:
 *
 *     take    all device memory that is left        give    it back
 *     lose    the device: a kernel writes to an address that is nobody's, and nothing works in the context behind it
 *
 * By the driver's interface alone, opened at run time: the program's own copy of the run-time library cannot be reached. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PIECES_MAX 4096

static const char KERNEL[] = ".version 7.0\n.target sm_80\n.address_size 64\n"
                             ".visible .entry lose()\n{\n.reg .u64 %a;\n.reg .u32 %v;\n"
                             "mov.u64 %a, 64;\nmov.u32 %v, 1;\nst.global.u32 [%a], %v;\nret;\n}\n";

static struct { /* of libcuda.so.1; each answers 0 when all is well */
    int (*init)(unsigned flags);
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
    int (*load)(void **module, const void *image);
    int (*function)(void **f, void *module, const char *name);
    int (*launch)(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                  unsigned shared, void *stream, void **arguments, void **extra);
    int (*synchronize)(void);
    int (*take)(unsigned long long *at, size_t size);
    int (*give)(unsigned long long at);
} cu;

static unsigned long long pieces[PIECES_MAX];
static unsigned piece_count;

static bool open_driver(void)
{
    const struct {
        const char *name;
        void *to;
    } all[] = {{"cuInit", &cu.init},
               {"cuDevicePrimaryCtxRetain", &cu.retain},
               {"cuCtxSetCurrent", &cu.set_current},
               {"cuModuleLoadData", &cu.load},
               {"cuModuleGetFunction", &cu.function},
               {"cuLaunchKernel", &cu.launch},
               {"cuCtxSynchronize", &cu.synchronize},
               {"cuMemAlloc_v2", &cu.take},
               {"cuMemFree_v2", &cu.give}};
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *context, *symbol;
    for (size_t i = 0; i < sizeof all / sizeof *all && library; i++) {
        if (!(symbol = dlsym(library, all[i].name)))
            return false;
        memcpy(all[i].to, &symbol, sizeof symbol);
    }
    return library && cu.init(0) == 0 && cu.retain(&context, 0) == 0 && cu.set_current(context) == 0;
}

static void lose(void)
{
    void *module, *f;
    if (cu.load(&module, KERNEL) == 0 && cu.function(&f, module, "lose") == 0 &&
        cu.launch(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == 0)
        fprintf(stderr, "gpu_faults: lost, %d\n", cu.synchronize());
}

static void take(void)
{
    for (size_t size = (size_t)64 << 30; size >= 4096 && piece_count < PIECES_MAX;)
        if (cu.take(&pieces[piece_count], size) == 0)
            piece_count++;
        else
            size /= 2;
    fprintf(stderr, "gpu_faults: took %u pieces\n", piece_count);
}

static void give(void)
{
    while (piece_count > 0)
        cu.give(pieces[--piece_count]);
}

static void *watch(void *path)
{
    char word[16];
    bool is_open = false;
    for (;; nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL)) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? 0 : read(fd, word, sizeof word - 1);
        if (fd >= 0)
            close(fd);
        if (n <= 0)
            continue;
        word[n] = 0;
        if ((is_open = is_open || open_driver()))
            !strcmp(word, "lose") ? lose() : !strcmp(word, "take") ? take() : give();
        if (truncate(path, 0) != 0)
            return NULL;
    }
}

__attribute__((constructor)) static void begin(void)
{
    pthread_t thread;
    sigset_t all, before;
    char *path = getenv("TANDEM_GPU_FAULTS");
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* signals are for the program's own threads */
    if (path)
        pthread_create(&thread, NULL, watch, path);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}
