// Compiles and links only if the CUDA installation has all that the CUDA module needs, in matching versions.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

__global__ void twice(__nv_bfloat16* x) {
    x[threadIdx.x] = __hadd(x[threadIdx.x], x[threadIdx.x]);
}

int main() {
    twice<<<1, 32>>>(nullptr);
    return cudaGetLastError();
}
