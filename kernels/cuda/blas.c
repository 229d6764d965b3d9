/* blas: see blas.h. Row-major matrices are the library's column-major ones transposed:
 * out^T[N][R] = (w^T)^T[N][K] * act^T[K][R], so w is given as transposed with leading size K. */
#include "kernels/cuda/blas.h"
#include "shared/base.h"
#include "shared/status.h"
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define BLAS_PLANS     128
#define WORKSPACE_SIZE ((size_t)64 << 20)

/* --- the library ------------------------------------------------------------------------------ */

#define FUNCTIONS(X)                                                                                         \
    X(Create)                                                                                                \
    X(Destroy)                                                                                               \
    X(Matmul)                                                                                                \
    X(MatmulDescCreate)                                                                                      \
    X(MatmulDescDestroy)                                                                                     \
    X(MatmulDescSetAttribute)                                                                                \
    X(MatrixLayoutCreate)                                                                                    \
    X(MatrixLayoutDestroy)                                                                                   \
    X(MatmulPreferenceCreate)                                                                                \
    X(MatmulPreferenceDestroy)                                                                               \
    X(MatmulPreferenceSetAttribute)                                                                          \
    X(MatmulAlgoGetHeuristic)                                                                                \
    X(GetStatusString)

struct library {
    void *handle;
#define X(name) __typeof__(&cublasLt##name) name;
    FUNCTIONS(X)
#undef X
};

static int library_open(struct library *l, char *why, size_t size)
{
    static const char *const names[] = {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"};
    for (size_t i = 0; i < TD_COUNT(names) && !l->handle; i++)
        l->handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!l->handle) {
        snprintf(why, size, "%s was not found", names[0]);
        return -TD_ERR_NOTFOUND;
    }
#define X(name)                                                                                              \
    *(void **)&l->name = dlsym(l->handle, "cublasLt" #name);                                                 \
    if (!l->name) {                                                                                          \
        snprintf(why, size, "%s has no cublasLt" #name, names[0]);                                           \
        return -TD_ERR_VERSION;                                                                              \
    }
    FUNCTIONS(X)
#undef X
    return 0;
}

/* --- plans ------------------------------------------------------------------------------------ */

struct plan {
    struct blas_product key; /* without pointers */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t w, act, out;
    cublasLtMatmulAlgo_t algo;
    uint64_t used_at;
};

struct blas {
    struct library lib;
    cublasLtHandle_t handle;
    cudaStream_t stream;
    void *workspace;
    struct plan plans[BLAS_PLANS];
    uint64_t clock;
};

static bool same_shape(const struct blas_product *a, const struct blas_product *b)
{
    return a->rows == b->rows && a->n == b->n && a->k == b->k && a->act_stride == b->act_stride &&
           a->out_stride == b->out_stride && a->bf16 == b->bf16 && a->out_f32 == b->out_f32 &&
           a->add == b->add;
}

static void plan_clear(struct blas *b, struct plan *p)
{
    if (p->out)
        b->lib.MatrixLayoutDestroy(p->out);
    if (p->act)
        b->lib.MatrixLayoutDestroy(p->act);
    if (p->w)
        b->lib.MatrixLayoutDestroy(p->w);
    if (p->desc)
        b->lib.MatmulDescDestroy(p->desc);
    *p = (struct plan){0};
}

static int plan_choose(struct blas *b, struct plan *p)
{
    cublasLtMatmulPreference_t preference;
    size_t workspace = WORKSPACE_SIZE;
    cublasLtMatmulHeuristicResult_t found = {0};
    int count = 0;
    if (b->lib.MatmulPreferenceCreate(&preference))
        return -TD_ERR_INTERNAL;
    bool bad = b->lib.MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                   &workspace, sizeof workspace) ||
               b->lib.MatmulAlgoGetHeuristic(b->handle, p->desc, p->w, p->act, p->out, p->out, preference, 1,
                                             &found, &count) ||
               count < 1;
    b->lib.MatmulPreferenceDestroy(preference);
    p->algo = found.algo;
    return bad ? -TD_ERR_INTERNAL : 0;
}

static int plan_make(struct blas *b, struct plan *p, const struct blas_product *s)
{
    cudaDataType_t in = s->bf16 ? CUDA_R_16BF : CUDA_R_16F, out = s->out_f32 ? CUDA_R_32F : in;
    cublasOperation_t transposed = CUBLAS_OP_T;
    p->key = *s;
    if (b->lib.MatmulDescCreate(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) ||
        b->lib.MatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed) ||
        b->lib.MatrixLayoutCreate(&p->w, in, s->k, s->n, s->k) ||
        b->lib.MatrixLayoutCreate(&p->act, in, s->k, s->rows, s->act_stride) ||
        b->lib.MatrixLayoutCreate(&p->out, out, s->n, s->rows, s->out_stride))
        return -TD_ERR_INTERNAL;
    return plan_choose(b, p);
}

static struct plan *plan_find(struct blas *b, const struct blas_product *s)
{
    struct plan *oldest = &b->plans[0];
    for (struct plan *p = b->plans; p < b->plans + BLAS_PLANS; p++) {
        if (p->desc && same_shape(&p->key, s))
            return p;
        if (p->used_at < oldest->used_at)
            oldest = p;
    }
    plan_clear(b, oldest);
    if (plan_make(b, oldest, s)) {
        plan_clear(b, oldest);
        return NULL;
    }
    return oldest;
}

const char *blas_run(struct blas *b, const struct blas_product *p)
{
    struct plan *plan = plan_find(b, p);
    if (!plan)
        return "it has no way to do it";
    plan->used_at = ++b->clock;
    float one = 1.0f, beta = p->add ? 1.0f : 0.0f;
    cublasStatus_t rc =
        b->lib.Matmul(b->handle, plan->desc, &one, p->w, plan->w, p->act, plan->act, &beta, p->out, plan->out,
                      p->out, plan->out, &plan->algo, b->workspace, WORKSPACE_SIZE, b->stream);
    return rc ? b->lib.GetStatusString(rc) : NULL;
}

/* --- life ------------------------------------------------------------------------------------- */

struct blas *blas_create(cudaStream_t stream, char *why, size_t size)
{
    struct blas *b = calloc(1, sizeof *b);
    snprintf(why, size, "out of memory");
    if (!b)
        return NULL;
    b->stream = stream;
    if (library_open(&b->lib, why, size) == 0) {
        if (cudaMalloc(&b->workspace, WORKSPACE_SIZE) == cudaSuccess && b->lib.Create(&b->handle) == 0)
            return b;
        snprintf(why, size, "cuBLASLt does not start on this device");
    }
    blas_destroy(b);
    return NULL;
}

void blas_destroy(struct blas *b)
{
    if (!b)
        return;
    for (struct plan *p = b->plans; p < b->plans + BLAS_PLANS; p++)
        plan_clear(b, p);
    if (b->handle)
        b->lib.Destroy(b->handle);
    cudaFree(b->workspace);
    if (b->lib.handle)
        dlclose(b->lib.handle);
    free(b);
}
