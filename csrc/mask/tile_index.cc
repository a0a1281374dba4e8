#include "csrc/mask/tile_index.h"

#include "csrc/common/math.h"

namespace jaxmagi {

std::vector<Band> tighten_bands(const int32_t* rows, int64_t num_bands, int q_len, int kv_len) {
    std::vector<Band> bands;
    for (int64_t i = 0; i < num_bands; ++i) {
        const int32_t* row = rows + 6 * i;
        const Band band = tighten({row[0], row[1], row[2], row[3], row[4], row[5]}, q_len, kv_len);
        if (band.q0 < band.q1)
            bands.push_back(band);
    }
    return bands;
}

TileIndex::TileIndex(const std::vector<Band>& bands, Axis axis, int length, int tile) {
    const int num_tiles = ceil_div(length, tile);
    const auto tiles_of = [&](const Band& band) {
        const Range range = axis == Axis::kQuery ? Range{band.q0, band.q1} : Range{band.k0, band.k1};
        return Range{range.begin / tile, ceil_div(range.end, tile)};
    };
    offsets_.assign(num_tiles + 1, 0);
    for (const Band& band : bands)
        for (int i = tiles_of(band).begin; i < tiles_of(band).end; ++i)
            ++offsets_[i + 1];
    for (int i = 0; i < num_tiles; ++i)
        offsets_[i + 1] += offsets_[i];
    band_ids_.resize(offsets_[num_tiles]);
    std::vector<int64_t> next(offsets_.begin(), offsets_.end() - 1);
    for (size_t id = 0; id < bands.size(); ++id)
        for (int i = tiles_of(bands[id]).begin; i < tiles_of(bands[id]).end; ++i)
            band_ids_[next[i]++] = static_cast<int>(id);
}

}  // namespace jaxmagi
