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

void RangeLists::add(Range range) {
    if (is_empty(range))
        return;
    if (static_cast<int>(ranges_.size()) > offsets_.back() and ranges_.back().end == range.begin)
        ranges_.back().end = range.end;
    else
        ranges_.push_back(range);
}

Units::Units(std::span<const WeightedMask> masks, int length, int size, int count)
    : rows_(count), area_(count), num_masks_(masks.size()), before_(count), after_(count) {
    std::vector<TileIndex> indices;
    for (const WeightedMask& mask : masks) {
        check_units(mask.bands, size, count);
        indices.emplace_back(mask.bands, Axis::kQuery, length, size);
    }
    std::vector<Range> seen;
    for (int unit = 0; unit < count; ++unit) {
        rows_[unit] = int64_t{unit} * size < length ? tile_range(unit, size, length) : Range{length, length};
        seen.clear();
        for (size_t i = 0; i < masks.size(); ++i) {
            if (unit < indices[i].num_tiles())
                for (const int id : indices[i].bands_of(unit)) {
                    const Band piece = tighten(crop(masks[i].bands[id], rows_[unit], {0, length}), length, length);
                    area_[unit] += masks[i].weight * jaxmagi::area(piece);
                    seen.push_back({piece.k0, piece.k1});
                    pieces_.push_back({.band = piece, .id = id});
                }
            first_pieces_.push_back(pieces_.size());
        }
        total_area_ += area_[unit];
        add_keys(seen, rows_[unit]);
        for (const Range& keys : remote(unit))
            (keys.begin < rows_[unit].begin ? before_ : after_)[unit] += length_of(keys);
    }
}

// Adds the key lists of the next unit.
void Units::add_keys(std::vector<Range>& seen, Range own) {
    seen.push_back(own);
    std::ranges::sort(seen, {}, &Range::begin);
    int reach = 0;
    for (const Range& range : seen) {
        const Range fresh{std::max(range.begin, reach), range.end};
        reach = std::max(reach, range.end);
        held_.add(fresh);
        remote_.add(intersect(fresh, {0, own.begin}));
        remote_.add(intersect(fresh, {own.end, kUnbounded}));
    }
    held_.close_list();
    remote_.close_list();
}

}  // namespace jaxmagi::planning
