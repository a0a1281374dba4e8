#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <initializer_list>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/common/sm90/element.cuh"

// How a call of either pass finds its kernel, and loads it.

namespace jaxmagi::sm90 {

// Returns the first kernel that holds both head dimensions, or nullptr. `kernels` begins with the smallest ones.
template <typename Kernel>
const Kernel* smallest_kernel(std::initializer_list<const Kernel*> kernels, int dim, int v_dim) {
    if (dim < 8 or v_dim < 8 or dim % 8 != 0 or v_dim % 8 != 0)
        return nullptr;
    for (const Kernel* kernel : kernels)
        if (dim <= kernel->dim and v_dim <= kernel->v_dim)
            return kernel;
    return nullptr;
}

// Calls function(Config<Element, kSoftCap>{}) for an element type and a choice that are known at run time.
template <template <typename, bool> typename Config, typename Function>
cudaError_t with_config(DType dtype, bool soft_cap, const Function& function) {
    if (dtype == DType::kBF16)
        return soft_cap ? function(Config<BFloat16, true>{}) : function(Config<BFloat16, false>{});
    return soft_cap ? function(Config<Float16, true>{}) : function(Config<Float16, false>{});
}

// Loads a kernel with `bytes` of dynamic shared memory. Fails if it does not begin at `base`: behind static one, of
// which there is none, and what the system reserves.
template <typename Kernel> cudaError_t load_kernel(Kernel* kernel, int base, int bytes) {
    cudaFuncAttributes attributes;
    if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess)
        return error;
    int device, reserved;
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess)
        return error;
    if (const cudaError_t error = cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device);
        error != cudaSuccess)
        return error;
    if (reserved + static_cast<int>(attributes.sharedSizeBytes) != base)
        return cudaErrorMisalignedAddress;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

inline CUtensorMapDataType tensor_map_type(DType dtype) {
    return dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

}  // namespace jaxmagi::sm90
