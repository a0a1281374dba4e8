#pragma once

#include "csrc/attention/sm90/forward/launch.cuh"
#include "csrc/attention/sm90/forward/kernels.h"

namespace jaxmagi::sm90 {

// Calls function(config) with the configuration of a kernel for this type, with or without soft cap.
template <int kDim, int kVDim, int kConsumers, int kKeys, int kCappedKeys, typename Function>
cudaError_t with_config(DType dtype, bool soft_cap, const Function& function) {
    const auto with_element = [&](auto element) {
        using Element = decltype(element);
        return soft_cap ? function(ForwardConfig<Element, kDim, kVDim, kConsumers, kCappedKeys, true>{})
                        : function(ForwardConfig<Element, kDim, kVDim, kConsumers, kKeys, false>{});
    };
    return dtype == DType::kBF16 ? with_element(BFloat16{}) : with_element(Float16{});
}

// kKeys, kCappedKeys: of a block, without and with soft cap, which takes registers.
template <int kDim, int kVDim, int kConsumers, int kKeys, int kCappedKeys> struct ForwardInstance {
    static cudaError_t load(DType dtype, bool soft_cap) {
        return with_config<kDim, kVDim, kConsumers, kKeys, kCappedKeys>(
            dtype, soft_cap, [](auto config) { return load_forward<decltype(config)>(); });
    }
    static cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
        return with_config<kDim, kVDim, kConsumers, kKeys, kCappedKeys>(
            params.dtype, params.soft_cap > 0,
            [&](auto config) { return launch_forward<decltype(config)>(params, stream); });
    }
    static constexpr ForwardKernel kKernel{kDim, kVDim, {64 * kConsumers, kKeys}, load, launch};
};

}  // namespace jaxmagi::sm90
