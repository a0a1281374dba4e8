#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/mask/band.h"
#include "csrc/planning/pieces.h"

namespace jaxmagi::planning {

// Consecutive tokens [begin, end) that are consecutive in a buffer too, from index `place` on.
struct Run {
    int begin, end, place;
};

// Disjoint, in ascending order.
using Runs = std::vector<Run>;

// Returns the longest runs in a buffer of tokens (-1 for padding), which holds each token once.
Runs runs_of_tokens(std::span<const int32_t> tokens);

// Returns the union of any ranges as the fewest disjoint ones, in ascending order.
std::vector<Range> union_of(std::vector<Range> ranges);

// Returns sorted, disjoint ranges without the tokens of `runs`, as a buffer filled from index 0.
Runs without(const std::vector<Range>& ranges, const Runs& runs);

int64_t num_rows(const Runs& runs);

// Returns the runs that share a token with the range.
inline std::span<const Run> meeting(const Runs& runs, Range range) {
    if (is_empty(range))
        return {};
    const auto first = std::ranges::upper_bound(runs, range.begin, {}, &Run::end);
    const auto last = std::ranges::lower_bound(first, runs.end(), range.end, {}, &Run::begin);
    return {first, last};
}

// Throws TooManyPieces where ranges and runs share more pieces than a plan can have.
template <typename Ranges> void check_meetings(const Ranges& ranges, const Runs& runs) {
    int64_t pieces = 0;
    for (const Range range : ranges)
        pieces += static_cast<int64_t>(meeting(runs, range).size());
    check_pieces(pieces, static_cast<int64_t>(std::ranges::size(ranges)), static_cast<int64_t>(runs.size()));
}

}  // namespace jaxmagi::planning
