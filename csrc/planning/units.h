#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/mask/band.h"

namespace jaxmagi::planning {

struct WeightedMask {
    std::vector<Band> bands;  // tight
    int64_t weight;           // number of layers with this mask
};

// Lists of ranges, stored one after the other. Each is filled in ascending order; ranges that touch become one.
class RangeLists {
public:
    void add(Range range);  // adds to the last list
    void close_list() { offsets_.push_back(static_cast<int>(ranges_.size())); }

    std::span<const Range> operator[](int list) const {
        return {ranges_.data() + offsets_[list], static_cast<size_t>(offsets_[list + 1] - offsets_[list])};
    }

private:
    std::vector<int> offsets_{0};
    std::vector<Range> ranges_;
};

// The part of a band in a unit's rows.
struct UnitPiece {
    Band band;  // tight
    int id;     // index of the band in its mask
};

// The units that are assigned to ranks: consecutive rows of the sequence, of one size, with the weighted sum of their
// visible cells and the keys that they see in any of the masks.
class Units {
public:
    // `count` units of `size` rows cover [0, length); the last ones may be shorter, or empty.
    Units(std::span<const WeightedMask> masks, int length, int size, int count);

    int count() const { return static_cast<int>(rows_.size()); }
    Range rows(int unit) const { return rows_[unit]; }
    int64_t area(int unit) const { return area_[unit]; }
    int64_t total_area() const { return total_area_; }

    // Returns the unit's pieces of one of the masks, in the order of its bands.
    std::span<const UnitPiece> pieces(int unit, int mask) const {
        const size_t list = static_cast<size_t>(unit) * num_masks_ + mask;
        return {pieces_.data() + first_pieces_[list], first_pieces_[list + 1] - first_pieces_[list]};
    }

    // Returns the keys that the unit sees outside of its own rows: sorted, disjoint.
    std::span<const Range> remote(int unit) const { return remote_[unit]; }

    // Return how many of them lie before and after its rows.
    int remote_before(int unit) const { return before_[unit]; }
    int remote_after(int unit) const { return after_[unit]; }

    // Returns its own rows and the remote keys: sorted, disjoint, and fewer ranges where these touch.
    std::span<const Range> held(int unit) const { return held_[unit]; }

private:
    void add_keys(std::vector<Range>& seen, Range own);

    std::vector<Range> rows_;
    std::vector<int64_t> area_;
    size_t num_masks_;
    std::vector<UnitPiece> pieces_;
    std::vector<size_t> first_pieces_{0};  // index of the first piece of each unit and mask
    RangeLists remote_, held_;
    std::vector<int> before_, after_;
    int64_t total_area_ = 0;
};

constexpr int length_of(Range range) {
    return is_empty(range) ? 0 : range.end - range.begin;
}

}  // namespace jaxmagi::planning
