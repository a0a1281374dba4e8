#pragma once

#include <cstdint>

namespace jaxmagi::sm90 {

// An address in the shared state space, as PTX instructions take it.
using SharedAddress = uint32_t;

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
    return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// Makes ordinary writes to shared memory visible to TMA and wgmma: those of this thread, if a barrier follows, and
// those of other threads that a barrier before it has made visible to this one.
__device__ __forceinline__ void fence_shared_for_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace jaxmagi::sm90
