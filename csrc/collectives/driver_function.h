#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "csrc/common/check_cuda.h"

namespace jaxmagi::collectives {

// A function of CUDA's driver, from the runtime, so that the module needs no link to the driver's library. Throws
// std::runtime_error where the driver has none of this name.
template <typename Function> Function* driver_function(const char* name) {
    constexpr unsigned kFirstVersion = 12000;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check_cuda(cudaGetDriverEntryPointByVersion(name, &found, kFirstVersion, cudaEnableDefault, &status),
               std::string("finding ") + name);
    if (status != cudaDriverEntryPointSuccess)
        throw std::runtime_error(std::string("the driver has no ") + name);
    return reinterpret_cast<Function*>(found);
}

}  // namespace jaxmagi::collectives
