#pragma once

#include "csrc/common/sm90/mbarrier.cuh"

// Bulk copies of contiguous bytes: addresses and sizes are multiples of 16. One thread issues, and only for it do
// groups count.

namespace jaxmagi::sm90 {

__device__ __forceinline__ void bulk_load(SharedAddress to, const void* from, int bytes, Mbarrier arrived) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(arrived.address)
        : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, SharedAddress from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// to[i] += from[i], each an atomic operation in the L2 cache.
__device__ __forceinline__ void bulk_add(float* to, SharedAddress from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the sources of all but the newest `kPending` groups may be overwritten.
template <int kPending> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until all groups are done, and seen.
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Between ordinary accesses to global memory and those of bulk copies.
__device__ __forceinline__ void fence_global_for_async() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace jaxmagi::sm90
