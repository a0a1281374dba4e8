#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/mask/band.h"

namespace jaxmagi::planning {

// A mask that so many layers have. Its bands are tight.
struct WeightedMask {
    std::vector<Band> bands;
    int64_t weight;
};

// Lists of ranges one after the other. Each is filled in ascending order; what touches becomes one range.
class RangeLists {
public:
    void add(Range range);  // to the last list
    void close_list() { offsets_.push_back(static_cast<int>(ranges_.size())); }

    std::span<const Range> operator[](int list) const {
        return {ranges_.data() + offsets_[list], static_cast<size_t>(offsets_[list + 1] - offsets_[list])};
    }

private:
    std::vector<int> offsets_{0};
    std::vector<Range> ranges_;
};

// What a unit sees of a band with this index.
struct UnitPiece {
    Band band;  // tight
    int id;
};

// What is dealt to ranks: consecutive rows of the sequence, all units of one size, with what they see of the masks:
// the weighted sum of their cells, and the keys that any of them shows.
class Units {
public:
    // `count` units of `size` rows cover [0, length); the last ones may be shorter, or empty.
    Units(std::span<const WeightedMask> masks, int length, int size, int count);

    int count() const { return static_cast<int>(rows_.size()); }
    Range rows(int unit) const { return rows_[unit]; }
    int64_t area(int unit) const { return area_[unit]; }
    int64_t total_area() const { return total_area_; }

    // What its rows see of one of the masks, in the order of its bands.
    std::span<const UnitPiece> pieces(int unit, int mask) const {
        const size_t list = static_cast<size_t>(unit) * num_masks_ + mask;
        return {pieces_.data() + first_pieces_[list], first_pieces_[list + 1] - first_pieces_[list]};
    }

    // The keys that the unit sees outside of its own rows: sorted, disjoint.
    std::span<const Range> foreign(int unit) const { return foreign_[unit]; }

    // How many of them lie before its rows, and behind.
    int foreign_before(int unit) const { return before_[unit]; }
    int foreign_behind(int unit) const { return behind_[unit]; }

    // Its own rows and the foreign keys: sorted, disjoint, and fewer ranges where these touch.
    std::span<const Range> held(int unit) const { return held_[unit]; }

private:
    void add_keys(std::vector<Range>& seen, Range own);

    std::vector<Range> rows_;
    std::vector<int64_t> area_;
    size_t num_masks_;
    std::vector<UnitPiece> pieces_;
    std::vector<size_t> first_pieces_{0};  // of each unit and mask
    RangeLists foreign_, held_;
    std::vector<int> before_, behind_;
    int64_t total_area_ = 0;
};

constexpr int length_of(Range range) {
    return is_empty(range) ? 0 : range.end - range.begin;
}

}  // namespace jaxmagi::planning
