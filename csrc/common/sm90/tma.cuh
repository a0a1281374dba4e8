#pragma once

#include <cuda.h>

#include "csrc/common/sm90/mbarrier.cuh"

// Bulk copies of boxes of a 4-d tensor to and from shared memory, with coordinates innermost first. Loads fill what
// lies outside the tensor, also at negative coordinates, with zeros, which count as bytes; stores leave it out. One
// thread issues a copy.

namespace jaxmagi::sm90 {

struct Coordinates {
    int x, y, z, w;
};

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box to shared memory; `arrived` counts the bytes.
__device__ __forceinline__ void tma_load(SharedAddress to, const CUtensorMap& map, Coordinates at, Mbarrier arrived) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(&map), "r"(arrived.address), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w)
        : "memory");
}

// Waits until the copies issued before have read their operands, which are in registers of the warp. ptxas has to see
// to that before the thread may sleep, as it does in a wait for an mbarrier, but where the code branches in between it
// does not (13.0): then a copy that has to queue fails as an illegal instruction. At a barrier of threads, here of
// those that run anyway, ptxas always waits. .ci/check_machine_code finds such places.
__device__ __forceinline__ void wait_until_issued() {
    asm volatile("{.reg .b32 mask; activemask.b32 mask; bar.warp.sync mask;}" ::: "memory");
}

// Copies a box to global memory, in the groups of bulk.cuh.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, Coordinates at, SharedAddress from) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w)
                 : "memory");
}

}  // namespace jaxmagi::sm90
