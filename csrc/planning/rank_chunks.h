#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/planning/counted_ranges.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// The units (groups, chunks or halves of chunks) of one rank, and the keys that it has to receive for them.
//
// The change by adding, removing or exchanging a unit is found in O(log n) for each of the unit's ranges, from lists of
// keys by the number of the rank's units that need them (none, one, more) and by whether the rank owns them.
class RankChunks {
public:
    RankChunks(const Units& units, std::vector<int> members);

    std::span<const int> members() const { return members_; }
    int64_t area() const { return area_; }
    int64_t received() const { return received_.rows(); }
    const CountedRanges& received_keys() const { return received_; }

    void exchange(int place, int unit);

    // Returns by how much the received rows grow without the member at `place`.
    int without(int place) const { return without_[place]; }
    // Returns by how much they grow with one more unit.
    int with(int unit) const;
    // Returns the rows that an exchange costs beyond without() and with(): rows that only the leaving member needed, or
    // owned, and that the coming one needs, and rows of the coming one that only the leaving one needed. Never
    // negative.
    int exchange_surcharge(int place, int unit) const;

private:
    // A key from which on the member at `place` changes the numbers of members that need or own keys by `needed`,
    // `owned`.
    struct Edge {
        int key, needed, owned, place;
    };
    struct Users;

    void add_edges(int place);
    void count_rows();
    void count_step(int begin, int end, const Users& users);

    const Units* units_;
    std::vector<int> members_;
    std::vector<Edge> edges_;  // by key
    int64_t area_ = 0;
    CountedRanges held_;            // keys that it needs or owns
    CountedRanges received_;        // keys that it needs and does not own
    CountedRanges needed_once_;     // received keys that one member needs
    CountedRanges owned_unneeded_;  // keys that it owns and no member needs
    std::vector<int> without_;
};

}  // namespace jaxmagi::planning
