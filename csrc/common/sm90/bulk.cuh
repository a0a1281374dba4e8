#pragma once

#include "csrc/common/sm90/mbarrier.cuh"

// Bulk copies of contiguous bytes. Addresses and sizes are multiples of 16. One thread issues a copy; stores belong to
// groups of that thread.

namespace jaxmagi::sm90 {

// Copies from global to shared memory; `arrived` counts the bytes.
__device__ __forceinline__ void bulk_load(SharedAddress to, const void* from, int bytes, Mbarrier arrived) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "r"(bytes), "r"(arrived.address)
        : "memory");
}

// Copies from shared to global memory.
__device__ __forceinline__ void bulk_store(void* to, SharedAddress from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// Computes to[i] += from[i], each an atomic operation in the L2 cache.
__device__ __forceinline__ void bulk_add(float* to, SharedAddress from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

// Closes a group of the stores issued since the last one.
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until the sources of all but the newest `kPending` groups may be overwritten.
template <int kPending> __device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all but the newest `kPending` groups are complete and their writes are visible to this thread.
template <int kPending = 0> __device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders ordinary accesses to global memory with those of bulk copies.
__device__ __forceinline__ void fence_global_for_async() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace jaxmagi::sm90
