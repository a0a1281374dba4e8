#pragma once

#include "csrc/common/sm90/shared.cuh"

// Barriers in shared memory. A phase completes after `count` arrivals and all announced bytes. wait(parity) returns
// once the phase of that parity is complete: on a new barrier wait(1) returns at once and wait(0) blocks.

namespace jaxmagi::sm90 {

struct Mbarrier {
    SharedAddress address;

    __device__ __forceinline__ void init(int count) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(count) : "memory");
    }
    __device__ __forceinline__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
    }
    // Arrives and announces bytes that TMA or bulk loads will bring in this phase.
    __device__ __forceinline__ void arrive_and_expect(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    }
    // Waits with tries that may sleep longer than the default, since polling takes issue slots.
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

// Makes inits visible to TMA. Called after them and before the __syncthreads() that publishes them to other threads.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace jaxmagi::sm90
