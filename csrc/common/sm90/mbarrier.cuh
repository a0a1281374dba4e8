#pragma once

#include "csrc/common/sm90/shared.cuh"

// Barriers in shared memory. A phase completes when `count` arrivals and all announced bytes are in; waiting goes by
// the parity of the phase, so that a fresh barrier lets wait(1) pass and blocks wait(0).

namespace jaxmagi::sm90 {

struct Mbarrier {
    SharedAddress address;

    __device__ __forceinline__ void init(int count) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(count) : "memory");
    }
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
    }
    __device__ __forceinline__ void arrive_and_expect(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    }
    // Each try may sleep for a while, instead of the short time that is the default: polling takes issue slots.
    __device__ __forceinline__ void wait(int parity) const {
        constexpr uint32_t kNanoseconds = 10'000'000;
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
            "@!done bra again;\n"
            "}\n" ::"r"(address),
            "r"(parity), "r"(kNanoseconds)
            : "memory");
    }
};

// After the inits, before the __syncthreads() that shows them to the other threads.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace jaxmagi::sm90
