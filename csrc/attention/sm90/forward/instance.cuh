#pragma once

#include "csrc/attention/sm90/forward/kernels.h"
#include "csrc/attention/sm90/forward/launch.cuh"

namespace jaxmagi::sm90 {

// kKeys, kCappedKeys: keys of a block without and with soft cap, which takes registers.
template <int kDim, int kVDim, int kConsumers, int kKeys, int kCappedKeys> struct ForwardInstance {
    template <typename Element, bool kSoftCap>
    using Config = ForwardConfig<Element, kDim, kVDim, kConsumers, kSoftCap ? kCappedKeys : kKeys, kSoftCap>;

    static cudaError_t load(DType dtype, bool soft_cap) {
        return with_config<Config>(dtype, soft_cap, [](auto config) { return load_forward<decltype(config)>(); });
    }
    static cudaError_t launch(const ForwardParams& params, cudaStream_t stream) {
        return with_config<Config>(params.dtype, params.soft_cap > 0, [&](auto config) {
            return launch_forward<decltype(config)>(params, stream);
        });
    }
    static constexpr ForwardKernel kKernel{kDim, kVDim, {64 * kConsumers, kKeys}, load, launch};
};

}  // namespace jaxmagi::sm90
