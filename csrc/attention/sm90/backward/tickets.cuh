#pragma once

#include "csrc/attention/sm90/backward/arguments.cuh"
#include "csrc/attention/sm90/backward/config.cuh"

// Where the order of sums is fixed, the ticket of a step says where its addition to dQ stands in the order.
//
// Each block of queries has a counter of the additions that are done, and an addition waits until the counter has
// reached its ticket. Tiles of keys come from the first to the last, the bands and blocks of a tile from the last to
// the first; or, in a mirrored tile, all in the opposite order. All tiles of a section go the same way, so that those
// that add to a head do. CTAs claim tiles in that order too, so that an addition only waits for tiles of running CTAs,
// and the first tile that is not done waits for nothing. Neighbouring tiles share the bands at their common edge: a
// tile begins with the bands that it shares with the next one to come, and that one ends with them.
//
// Under a causal mask mirrored tiles begin at the diagonal, the shortest ones first, and each one comes to the blocks
// of the tiles before when these are done with them. The others, the longest ones first, all begin with the last block
// and wait for each other, but leave a balanced end (make_schedule).

namespace jaxmagi::sm90 {

// Returns the number of additions to the block that come before this one. Called by a warp, ahead of the
// addition, since its loads take as long.
template <typename Config>
__device__ __forceinline__ int ticket_of(const BackwardArguments& args, const StepDescriptor& descriptor) {
    const int blocks_per_head = args.workspace.rows_per_head / Config::kRows;
    const int block = descriptor.mask * blocks_per_head + descriptor.block;  // 2^31 of them would take 16 GiB
    const Range touching = args.workspace.band_ranges[block];
    const ScheduledBand* bands = args.bands + int64_t{descriptor.mask} * args.capacity;
    const int first = descriptor.block * Config::kRows;
    const Range queries{first, first + Config::kRows};
    int before = 0;
#pragma unroll 1
    for (int i = touching.begin + lane_index(); i < touching.end; i += 32) {
        const ScheduledBand band = bands[i];
        const Range keys = rows_of_keys({band.q0, band.q1, band.k0, band.k1, band.lo, band.hi}, queries);
        if (is_empty(keys))
            continue;
        const Range tiles{keys.begin / Config::kKeys, ceil_div(keys.end, Config::kKeys)};
        if (descriptor.mirrored)
            before += max(0, tiles.end - max(tiles.begin, descriptor.tile + 1));
        else
            before += max(0, min(tiles.end, descriptor.tile) - tiles.begin);
        const bool earlier_band = descriptor.mirrored ? i < descriptor.band : i > descriptor.band;
        before += earlier_band and tiles.begin <= descriptor.tile and descriptor.tile < tiles.end;
    }
    return __reduce_add_sync(~0u, before);
}

}  // namespace jaxmagi::sm90
