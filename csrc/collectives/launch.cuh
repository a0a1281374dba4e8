#pragma once

#include <cuda_runtime.h>

namespace jaxmagi::collectives {

struct LaunchOptions {
    // Starts when the kernel before lets it, not when that is complete: programmatic dependent launch
    // (dependent_launch.cuh).
    bool overlaps = false;
};

// Launches a kernel of `ctas` CTAs. How many SMs a transfer uses is decided by `num_ctas` in group_cast.cu, and for a
// reduction in chunks.cuh.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int ctas, int threads, size_t shared_bytes, cudaStream_t stream,
                   LaunchOptions options, const Arguments&... arguments) {
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = options.overlaps;
    attribute = {.id = cudaLaunchAttributeProgrammaticStreamSerialization,
                 .val = {.programmaticStreamSerializationAllowed = 1}};
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace jaxmagi::collectives
