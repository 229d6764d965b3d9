/* launches: what the launchers could not start, kept for the step that asks at its end (kernels.h). The run-time library keeps such an error too,
 * but one for all of its calls, which questions about the device leave and take as well: no step asks for it. */
#include "kernels/cuda/kernels.h"

static _Thread_local cudaError_t first;

void cuda_launched(cudaError_t rc)
{
    if (first == cudaSuccess)
        first = rc;
}

cudaError_t cuda_launch_error(void)
{
    cudaError_t rc = first;
    first = cudaSuccess;
    return rc;
}
