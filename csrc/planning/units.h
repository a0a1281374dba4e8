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

    // The keys that the unit sees outside of its own rows: sorted, disjoint.
    std::span<const Range> foreign(int unit) const {
        return {foreign_.data() + offsets_[unit], static_cast<size_t>(offsets_[unit + 1] - offsets_[unit])};
    }

    // How many of them lie before its rows, and behind.
    int foreign_before(int unit) const { return before_[unit]; }
    int foreign_behind(int unit) const { return behind_[unit]; }

private:
    void add_foreign(std::vector<Range>& seen, Range own);

    std::vector<Range> rows_;
    std::vector<int64_t> area_;
    std::vector<int> offsets_;
    std::vector<Range> foreign_;
    std::vector<int> before_, behind_;
    int64_t total_area_ = 0;
};

constexpr int length_of(Range range) {
    return is_empty(range) ? 0 : range.end - range.begin;
}

}  // namespace jaxmagi::planning
