#pragma once

#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/common/math.h"

// The layout of the fp32 sums of dK and dV, [batch, kv_heads, ...]. It is that of the accumulators, in parts of 64
// times 64 numbers (the last ones of 96 columns have less), in the order in which the warpgroups hand them over. In
// narrow kernels a warpgroup has 64 keys and all columns: [keys / 64, columns, 64]. In wide ones it has all 64 keys of
// the tile and some panels of columns, transposed: [panels, keys, 64].

namespace jaxmagi::sm90 {

template <typename Config, int kColumns> struct KeySums {
    static constexpr int kPart = 64;
    static constexpr bool kTransposed = key_sums_layout(Config::kDim, Config::kKeys).transposed;
    static_assert(kTransposed == Config::kWide);
    static_assert(not kTransposed or (Config::kKeys == kPart and panels(kColumns) % Config::kConsumers == 0));
    static constexpr int kTileColumns = kTransposed ? kPanelColumns : kColumns;  // that lie together with a tile
    // The parts of a warpgroup, as many as it hands over (hand_over_gradient).
    static constexpr int kPasses = panels(kColumns) / (kTransposed ? Config::kConsumers : 1);
    static_assert(kPart * kPanelColumns * static_cast<int>(sizeof(float)) <= Config::kPartBytes);

    // Returns where the part of a warpgroup begins, in floats from the first one of the tile.
    __device__ __forceinline__ static int64_t offset(int pass, int warpgroup, int rows_per_key_head) {
        return kTransposed ? int64_t{rows_per_key_head} * (warpgroup * kPasses + pass) * kPanelColumns
                           : warpgroup * kPart * kColumns + pass * kPart * kPanelColumns;
    }
    __device__ __forceinline__ static int bytes(int pass) {
        const int columns = kTransposed ? kPanelColumns : min(kPanelColumns, kColumns - pass * kPanelColumns);
        return columns * kPart * static_cast<int>(sizeof(float));
    }
};

}  // namespace jaxmagi::sm90
