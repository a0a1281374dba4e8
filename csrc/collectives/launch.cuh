#pragma once

#include <cuda_runtime.h>

namespace jaxmagi::collectives {

// Launches a kernel, which records the event `begun`, unless that is null, when all of its CTAs have begun.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int ctas, int threads, size_t shared_bytes, cudaStream_t stream,
                   cudaEvent_t begun, const Arguments&... arguments) {
    cudaLaunchAttribute attribute{.id = cudaLaunchAttributeLaunchCompletionEvent};
    attribute.val.launchCompletionEvent.event = begun;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = begun == nullptr ? 0 : 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace jaxmagi::collectives
