#pragma once

#include "csrc/overlap/sm90/tiles.cuh"

namespace jaxmagi::overlap {

// Claims tiles for a cluster, some time before they are computed, but not before it has pushed rows: others could have
// computed them by then. One thread of its first CTA does this.
template <typename Config> struct TileScheduler {
    GemmMemory<Config> memory;
    const GemmArguments& arguments;

    __device__ __forceinline__ void run() const {
        const TileOrder<Config::kCollective> order(arguments);
        RingPlace<Config::kClaims> place;
        int position;
        if constexpr (Config::kCollective == Collective::kAllGather)
            memory.pushed().wait(0);
        do {
            memory.read(place.index).wait(place.parity ^ 1);
            position = atomicAdd(&arguments.counts->claimed, 1);
            for (int cta = 0; cta < kClusterCtas; ++cta)
                store_and_arrive_at(memory.claim(place.index), position, memory.claimed(place.index), cta);
            place.next();
        } while (order.has(position));
    }
};

// The tiles of a cluster as a producer, mover or consumer reads them.
template <typename Config> struct ClaimedTiles {
    // How many arrive in a CTA when they have read a claim: the producer, movers, and warps of consumers.
    static constexpr int kReaders = 1 + Config::kConsumers + Config::kConsumers * kWarpgroupThreads / 32;

    const GemmMemory<Config>& memory;
    TileOrder<Config::kCollective> order;
    RingPlace<Config::kClaims> claim;

    __device__ __forceinline__ ClaimedTiles(const GemmMemory<Config>& memory, const GemmArguments& arguments)
        : memory(memory), order(arguments) {}

    // Reads the next tile, for a warp of which one lane arrives when all have read it, or for a single thread. Returns
    // whether there is one.
    template <bool kWarp = true> __device__ __forceinline__ bool next(TilePlace& place, bool arrives) {
        wait_in_cluster(memory.claimed(claim.index), claim.parity);
        int position;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(position) : "r"(memory.claim(claim.index)) : "memory");
        if constexpr (kWarp)
            __syncwarp();
        if (arrives)
            arrive_at(memory.read(claim.index), 0);
        claim.next();
        if (not order.has(position))
            return false;
        place = order.at(position);
        return true;
    }
};

}  // namespace jaxmagi::overlap
