#pragma once

#include "csrc/common/sm90/tma.cuh"

// Clusters: CTAs that run at one time on multiprocessors next to each other, and reach each other's shared memory.

namespace jaxmagi::sm90 {

// Returns the place of this CTA in its cluster.
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the barrier in the same place of a CTA of the cluster. It publishes no stores: with .release.cluster the
// arrival would wait for a fence of the whole device, 700 clocks each time.
__device__ __forceinline__ void arrive_at(Mbarrier barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier.address),
        "r"(rank)
        : "memory");
}

// Stores a word in the same place of a CTA of the cluster, and arrives at a barrier there, whose waits with
// `wait_in_cluster` see it.
__device__ __forceinline__ void store_and_arrive_at(SharedAddress to, uint32_t word, Mbarrier barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 word, remote;\n"
        "mapa.shared::cluster.u32 word, %0, %3;\n"
        "mapa.shared::cluster.u32 remote, %2, %3;\n"
        "st.shared::cluster.u32 [word], %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(to),
        "r"(word), "r"(barrier.address), "r"(rank)
        : "memory");
}

// Waits as Mbarrier::wait, and sees what threads of other CTAs stored before they arrived.
__device__ __forceinline__ void wait_in_cluster(Mbarrier barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier.address),
        "r"(parity)
        : "memory");
}

// Copies a box to the same place of all CTAs in the mask, whose barriers in the same place count the bytes.
__device__ __forceinline__ void tma_multicast(SharedAddress to, const CUtensorMap& map, Coordinates at,
                                              Mbarrier arrived, uint16_t ctas) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(arrived.address), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "h"(ctas)
        : "memory");
}

}  // namespace jaxmagi::sm90
