/* ceilings: the rates that kernels are judged by, on the device at hand. */
#include "kernels/cuda/cuda_backend.h"
#include <stdlib.h>

#define RUNS       7
#define LARGE_SIZE ((size_t)8 << 30)
#define SIDE       8192u
#define HOST_SIZE  ((size_t)256 << 20)

struct bench { /* of one device */
    cudaStream_t stream;
    cudaEvent_t begin, end;
    uint8_t *large, *copy, *host;
    uint32_t sm_count;
    struct blas *blas;
};

static int by_size(const void *x, const void *y)
{
    float a = *(const float *)x, b = *(const float *)y;
    return (a > b) - (a < b);
}

/* The median seconds of a run; 0 when it fails. */
static double seconds_of(struct bench *b, int (*work)(struct bench *b))
{
    float ms[RUNS];
    for (int i = -1; i < RUNS; i++) { /* once to warm up */
        cudaEventRecord(b->begin, b->stream);
        int rc = work(b);
        cudaEventRecord(b->end, b->stream);
        if (rc || cudaEventSynchronize(b->end) || cudaEventElapsedTime(&ms[TD_MAX(i, 0)], b->begin, b->end))
            return 0;
    }
    qsort(ms, RUNS, sizeof *ms, by_size);
    return (double)ms[RUNS / 2] * 1e-3;
}

static int read_large(struct bench *b)
{
    cuda_read_all(b->stream, b->large, LARGE_SIZE, 4 * b->sm_count, (uint32_t *)b->copy);
    return (int)cuda_launch_error();
}

static int copy_large(struct bench *b)
{
    return (int)cudaMemcpyAsync(b->copy, b->large, LARGE_SIZE, cudaMemcpyDeviceToDevice, b->stream);
}

static int copy_from_host(struct bench *b)
{
    return (int)cudaMemcpyAsync(b->large, b->host, HOST_SIZE, cudaMemcpyHostToDevice, b->stream);
}

static int multiply(struct bench *b)
{
    size_t size = (size_t)2 * SIDE * SIDE;
    struct blas_product p = {.w = b->large,
                             .act = b->large + size,
                             .out = b->copy,
                             .rows = SIDE,
                             .n = SIDE,
                             .k = SIDE,
                             .act_stride = SIDE,
                             .out_stride = SIDE,
                             .bf16 = true};
    return blas_run(b->blas, &p) ? -TD_ERR_INTERNAL : 0;
}

/* bf16 values between 2^-6 and 2^-5 of random sign and mantissa into host memory, and over both operands of the product. */
static int fill_random(struct bench *b)
{
    uint32_t random = 1;
    for (size_t i = 0; i < HOST_SIZE; i += 2) {
        random = random * 1664525u + 1013904223u;
        store_le16(b->host + i, (uint16_t)((random >> 16 & 0x807fu) | 0x3c80u));
    }
    for (size_t at = 0; at < LARGE_SIZE; at += HOST_SIZE)
        if (cudaMemcpyAsync(b->large + at, b->host, HOST_SIZE, cudaMemcpyHostToDevice, b->stream))
            return -TD_ERR_INTERNAL;
    return cudaStreamSynchronize(b->stream) ? -TD_ERR_INTERNAL : 0;
}

static int bench_open(struct bench *b, int device)
{
    char why[160];
    int sm_count = 0;
    if (cudaSetDevice(device) || cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device) ||
        cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking) || cudaEventCreate(&b->begin) ||
        cudaEventCreate(&b->end) || cudaMalloc((void **)&b->large, LARGE_SIZE) ||
        cudaMalloc((void **)&b->copy, LARGE_SIZE) || cudaMallocHost((void **)&b->host, HOST_SIZE))
        return -TD_ERR_INTERNAL;
    b->sm_count = (uint32_t)sm_count;
    b->blas = blas_create(b->stream, why, sizeof why); /* NULL: no rate of products */
    return fill_random(b);
}

static void bench_close(struct bench *b)
{
    blas_destroy(b->blas);
    if (b->host)
        cudaFreeHost(b->host);
    if (b->copy)
        cudaFree(b->copy);
    if (b->large)
        cudaFree(b->large);
    if (b->end)
        cudaEventDestroy(b->end);
    if (b->begin)
        cudaEventDestroy(b->begin);
    if (b->stream)
        cudaStreamDestroy(b->stream);
}

static double rate(double work, double seconds)
{
    return seconds > 0 ? work / seconds : 0;
}

int cuda_measure_ceilings(const char *device, struct cuda_ceilings *out, struct td_error *err)
{
    struct bench b = {0};
    char why[160];
    *out = (struct cuda_ceilings){0};
    int number = cuda_device_number(device), rc = -TD_ERR_UNSUPPORTED;
    if (number < 0)
        return td_fail(err, -TD_ERR_ARG, "cannot measure '%s': write cuda or cuda:N", device);
    if (!cuda_available(why, sizeof why))
        return td_fail(err, rc, "cannot measure %s: %s", device, why);
    rc = bench_open(&b, number);
    if (!rc) {
        out->read_gb_s = rate((double)LARGE_SIZE * 1e-9, seconds_of(&b, read_large));
        out->to_device_gb_s = rate((double)HOST_SIZE * 1e-9, seconds_of(&b, copy_from_host));
        out->matmul_tflop_s = b.blas ? rate(2.0 * SIDE * SIDE * SIDE * 1e-12, seconds_of(&b, multiply)) : 0;
        out->copy_gb_s = rate(2 * (double)LARGE_SIZE * 1e-9, seconds_of(&b, copy_large));
    }
    cudaError_t last = cudaGetLastError();
    bench_close(&b);
    return rc ? td_fail(err, rc, "cannot measure %s: %s", device, cudaGetErrorString(last)) : 0;
}
