#pragma once

#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/attention/sm90/backward/consumer_thread.cuh"
#include "csrc/attention/sm90/logits.cuh"
#include "csrc/common/sm90/stmatrix.cuh"

// Stores 16-bit P or dS as queries by keys in shared memory, with the swizzle of wgmma operands.

namespace jaxmagi::sm90 {

// Stores transposed dS, with a panel for the 64 keys of each warpgroup.
template <typename Config>
__device__ __forceinline__ void store_transposed_ds(SharedAddress to, ConsumerThread thread,
                                                    const typename Config::RoundedLogits& ds) {
    const unsigned index = thread.index(), lane = index % 32, column = index / 32 * 32 + lane / 8 % 2 * 16;  // in bytes
    const SharedAddress panel = to + thread.warpgroup * Config::kRows * kPanelRowBytes;
    const unsigned first = lane / 16 * 8 + lane % 8;
    const SharedAddress row = panel + first * kPanelRowBytes + (column ^ first % 8 * 16);
#pragma unroll
    for (int i = 0; i < Config::kRows / 16; ++i)
        store_transposed(row + i * 16 * kPanelRowBytes, ds[i]);
}

// Rounds and stores P or dS of 64 queries by the 32 keys of a warpgroup of a wide kernel. A panel holds those of two
// warpgroups.
template <typename Config>
__device__ __forceinline__ void store_wide_logits(SharedAddress to, ConsumerThread thread, const float (&logits)[16]) {
    uint32_t words[2][4];
    round_to_operand<typename Config::Element>(logits, words);
    const unsigned index = thread.index(), lane = index % 32, row = index / 32 * 16 + lane % 16;
    const unsigned column = thread.warpgroup % 2 * 64 + lane / 16 * 16;  // in bytes
    to += (thread.warpgroup / 2 * Config::kRows + row) * kPanelRowBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        store_matrices(to + ((column + 32 * i) ^ row % 8 * 16), words[i]);
}

}  // namespace jaxmagi::sm90
