#pragma once

#include "csrc/collectives/chunks.cuh"

// The shared memory of the kernels of group casts and group reduces. Each warp has a ring of kStages buffers, which
// bulk loads fill. Loads complete on an mbarrier per stage, and are counted: load n uses stage n % kStages.

namespace jaxmagi::collectives {

template <int kStages, int kPieceBytes> struct WarpStorage {
    alignas(128) char stages[kStages][kPieceBytes];
    Segment segments[kMaxSegments];
    alignas(8) uint64_t barriers[kStages];

    __device__ sm90::Mbarrier barrier(unsigned stage) const { return {sm90::shared_address(&barriers[stage])}; }

    // For a whole warp, before its first load.
    __device__ void init_barriers() {
        if (threadIdx.x % kWarp == 0)
            for (int i = 0; i < kStages; ++i)
                barrier(i).init(1);
        sm90::fence_mbarrier_init();
        __syncwarp();
    }

    // For one lane, when all lanes have read the stage: starts load n, of `bytes` at `offset` in its stage.
    __device__ void load(unsigned n, int offset, const char* from, int bytes) {
        expect(n, bytes);
        load_piece(n, offset, from, bytes);
    }

    // These two are load() in steps: one lane says how many bytes load n has, and then lanes load pieces of it.
    __device__ void expect(unsigned n, int bytes) { barrier(n % kStages).arrive_and_expect(bytes); }
    __device__ void load_piece(unsigned n, int offset, const char* from, int bytes) {
        sm90::bulk_load(sm90::shared_address(stages[n % kStages]) + offset, from, bytes, barrier(n % kStages));
    }

    __device__ void wait(unsigned n) const { barrier(n % kStages).wait(n / kStages & 1); }
};

template <int kWarps, int kStages, int kPieceBytes> struct SharedStorage {
    WarpStorage<kStages, kPieceBytes> warps[kWarps];
    CallState call;

    static constexpr int kMaxBytes = 227 * 1024;  // of a CTA
};

}  // namespace jaxmagi::collectives
