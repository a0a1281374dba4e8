#include "csrc/planning/units.h"

#include <algorithm>

#include "csrc/common/math.h"
#include "csrc/mask/area.h"
#include "csrc/mask/tile_index.h"
#include "csrc/planning/pieces.h"

namespace jaxmagi::planning {

namespace {

void check_units(const std::vector<Band>& bands, int size, int count) {
    int64_t pieces = 0;
    for (const Band& band : bands)
        pieces += ceil_div(band.q1, size) - band.q0 / size;
    check_pieces(pieces, static_cast<int64_t>(bands.size()), count);
}

}  // namespace

Units::Units(std::span<const WeightedMask> masks, int length, int size, int count)
    : rows_(count), area_(count), before_(count), behind_(count) {
    std::vector<TileIndex> indices;
    for (const WeightedMask& mask : masks) {
        check_units(mask.bands, size, count);
        indices.emplace_back(mask.bands, Axis::kQuery, length, size);
    }
    std::vector<Range> seen;
    offsets_.push_back(0);
    for (int unit = 0; unit < count; ++unit) {
        rows_[unit] = int64_t{unit} * size < length ? tile_range(unit, size, length) : Range{length, length};
        seen.clear();
        for (size_t i = 0; i < masks.size(); ++i)
            if (unit < indices[i].num_tiles())
                for (const int id : indices[i].bands_of(unit)) {
                    const Band piece = tighten(crop(masks[i].bands[id], rows_[unit], {0, length}), length, length);
                    area_[unit] += masks[i].weight * jaxmagi::area(piece);
                    seen.push_back({piece.k0, piece.k1});
                }
        total_area_ += area_[unit];
        add_foreign(seen, rows_[unit]);
        for (const Range& keys : foreign(unit))
            (keys.begin < rows_[unit].begin ? before_ : behind_)[unit] += length_of(keys);
    }
}

// Appends the union of `seen` without `own` as the next unit's.
void Units::add_foreign(std::vector<Range>& seen, Range own) {
    std::ranges::sort(seen, {}, &Range::begin);
    int reach = 0;
    const auto add = [&](Range range) {
        if (is_empty(range))
            return;
        if (static_cast<int>(foreign_.size()) > offsets_.back() and foreign_.back().end == range.begin)
            foreign_.back().end = range.end;
        else
            foreign_.push_back(range);
    };
    for (const Range& range : seen) {
        const Range fresh{std::max(range.begin, reach), range.end};
        reach = std::max(reach, range.end);
        add(intersect(fresh, {0, own.begin}));
        add(intersect(fresh, {own.end, kUnbounded}));
    }
    offsets_.push_back(static_cast<int>(foreign_.size()));
}

}  // namespace jaxmagi::planning
