#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <string_view>

namespace jaxmagi {

// Raises std::runtime_error with the name of the CUDA error unless it is cudaSuccess.
inline void check_cuda(cudaError_t error, std::string_view what) {
    if (error != cudaSuccess)
        throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" +
                                 cudaGetErrorString(error) + ")");
}

// Returns the device that is current for this thread.
inline int current_ordinal() {
    int ordinal;
    check_cuda(cudaGetDevice(&ordinal), "the current device");
    return ordinal;
}

}  // namespace jaxmagi
