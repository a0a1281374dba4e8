#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"

// The ticket warp computes the tickets of steps where the order of sums is fixed, ahead of the reducer, since the loads
// for a ticket take as long as an addition.
//
// Each block of queries has a counter of the additions that are done, and an addition waits until the counter has
// reached its ticket. Tiles of keys come from the first to the last, the bands of a tile from the last of the mask to
// the first. CTAs claim tiles in that order too, so that an addition only waits for tiles of running CTAs, and the
// first tile that is not done waits for nothing. All CTAs go through blocks and query heads in the same order: under a
// causal mask the first tiles are the longest, and blocks that all tiles have come first, so that a CTA is no more than
// one step behind another. Neighbouring tiles share the bands at their common edge: a tile begins with the bands that
// it shares with the next tile, and the next tile ends with them.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardTickets {
    BackwardMemory<Config> memory;
    const BackwardArguments& args;
    int lane;

    __device__ __forceinline__ void run() const {
#pragma unroll 1
        for (unsigned step = 0;; ++step) {
            memory.described(step).wait(memory.step_parity(step));
            StepDescriptor& descriptor = memory.descriptor(step);
            if (descriptor.head < 0)
                return;
            const int ticket = ticket_of(descriptor);
            if (lane == 0) {
                descriptor.ticket = ticket;
                memory.ticketed(step).arrive();
            }
        }
    }

private:
    // Returns the number of additions to the block that come before this one.
    __device__ __forceinline__ int ticket_of(const StepDescriptor& descriptor) const {
        const int blocks_per_head = args.workspace.rows_per_head / Config::kRows;
        const int block = descriptor.mask * blocks_per_head + descriptor.block;  // 2^31 of them would take 16 GiB
        const Range touching = args.workspace.band_ranges[block];
        const ScheduledBand* bands = args.bands + int64_t{descriptor.mask} * args.capacity;
        const int first = descriptor.block * Config::kRows;
        const Range queries{first, first + Config::kRows};
        int before = 0;
#pragma unroll 1
        for (int i = touching.begin + lane; i < touching.end; i += 32) {
            const ScheduledBand band = bands[i];
            const Range keys = rows_of_keys({band.q0, band.q1, band.k0, band.k1, band.lo, band.hi}, queries);
            if (is_empty(keys))
                continue;
            const Range tiles{keys.begin / Config::kKeys, ceil_div(keys.end, Config::kKeys)};
            before += max(0, min(tiles.end, descriptor.tile) - tiles.begin);
            before += i > descriptor.band and tiles.begin <= descriptor.tile and descriptor.tile < tiles.end;
        }
        return __reduce_add_sync(~0u, before);
    }
};

}  // namespace jaxmagi::sm90
