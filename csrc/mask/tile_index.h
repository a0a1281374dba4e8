#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/mask/band.h"

namespace jaxmagi {

enum class Axis { kQuery, kKey };

// Returns the non-empty bands of a mask [num_bands, 6], in order, each tightened as in `tighten`.
std::vector<Band> tighten_bands(const int32_t* rows, int64_t num_bands, int q_len, int kv_len);

// Finds the bands that have a visible cell in a tile of an axis, in ascending order. It is built in
// O(bands + tiles + entries); every entry stands for visible cells, because the bands are tight.
class TileIndex {
public:
    TileIndex(const std::vector<Band>& bands, Axis axis, int length, int tile);

    int num_tiles() const { return static_cast<int>(offsets_.size()) - 1; }
    std::span<const int> bands_of(int tile) const {
        return {band_ids_.data() + offsets_[tile], static_cast<size_t>(offsets_[tile + 1] - offsets_[tile])};
    }

private:
    std::vector<int64_t> offsets_;
    std::vector<int> band_ids_;
};

}  // namespace jaxmagi
