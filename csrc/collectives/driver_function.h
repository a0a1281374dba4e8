#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "csrc/common/check_cuda.h"

// A function of the CUDA driver, as in JAXMAGI_DRIVER(cuMemMap)(...).
#define JAXMAGI_DRIVER(name) ::jaxmagi::collectives::driver_function<decltype(name)>(#name)

namespace jaxmagi::collectives {

// Returns a function of the CUDA driver, found by the runtime so that the module does not link libcuda. Throws
// std::runtime_error if the driver has no function of this name.
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
