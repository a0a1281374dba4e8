#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "csrc/mask/band.h"

namespace jaxmagi::planning {

// Disjoint ranges of rows, added in ascending order; ranges that touch become one. Counts the rows within any other
// range in O(log n).
class CountedRanges {
public:
    CountedRanges() { clear(); }

    void clear() { entries_.assign(1, {.begin = -1, .end = -1, .rows_before = 0}); }

    // Adds a range that is not empty and lies after all others.
    void add(int begin, int end) {
        Entry& last = entries_.back();
        if (last.end == begin)
            last.end = end;
        else
            entries_.push_back({begin, end, rows_up_to(last, last.end)});
    }

    int rows() const { return rows_up_to(entries_.back(), entries_.back().end); }

    int rows_in(Range range) const {
        return is_empty(range) ? 0 : rows_below(range.end) - rows_below(range.begin);
    }

    template <typename Visit> void for_each(Visit visit) const {
        for (size_t i = 1; i < entries_.size(); ++i)
            visit(Range{entries_[i].begin, entries_[i].end});
    }

private:
    struct Entry {
        int begin, end, rows_before;
    };

    static int rows_up_to(const Entry& entry, int key) {
        return entry.rows_before + std::min(key, entry.end) - entry.begin;
    }

    // Searches without branches that depend on the data, which would be mispredicted.
    int rows_below(int key) const {
        const Entry* entry = entries_.data();  // the last one that begins at `key` or before
        for (size_t count = entries_.size(); count > 1;) {
            const size_t half = count / 2;
            entry += entry[half].begin <= key ? half : 0;
            count -= half;
        }
        return rows_up_to(*entry, key);
    }

    std::vector<Entry> entries_;  // the first one is empty, before all rows
};

}  // namespace jaxmagi::planning
