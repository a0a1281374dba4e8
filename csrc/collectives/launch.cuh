#pragma once

#include <cuda_runtime.h>

namespace jaxmagi::collectives {

// How a kernel begins.
struct Beginning {
    cudaEvent_t event = nullptr;  // unless it is null, recorded when all CTAs have begun
    bool overlaps = false;        // when the kernel before lets it, not when that is complete (dependent_launch.cuh)
};

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int ctas, int threads, size_t shared_bytes, cudaStream_t stream,
                   Beginning beginning, const Arguments&... arguments) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (beginning.event != nullptr) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++] = {};
        attribute.id = cudaLaunchAttributeLaunchCompletionEvent;
        attribute.val.launchCompletionEvent.event = beginning.event;
    }
    if (beginning.overlaps) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++] = {};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace jaxmagi::collectives
