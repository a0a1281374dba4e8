#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/planning/counted_ranges.h"
#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// The units of one rank, and the keys that it has to receive for them.
//
// What changes when a unit comes, goes, or is exchanged is found in O(log n) for each of the unit's ranges: keys are
// counted by how many of the rank's units need them (none, one, more) and by whether the rank owns them.
class Hand {
public:
    Hand(const Units& units, std::vector<int> members);

    std::span<const int> members() const { return members_; }
    int64_t area() const { return area_; }
    int64_t received() const { return received_.rows(); }
    const CountedRanges& received_keys() const { return received_; }

    void exchange(int place, int unit);

    // By how much the received rows grow without the member at `place`.
    int without(int place) const { return without_[place]; }
    // By how much they grow with one more unit.
    int with(int unit) const;
    // What an exchange costs beyond without() and with(): rows that only the leaving member needed, or owned, and that
    // the coming one needs, and rows of the coming one that only the leaving one needed. Never negative.
    int exchange_surcharge(int place, int unit) const;

private:
    // Where the number of members that need the keys, or own them, changes, by the member at `place`.
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
    CountedRanges received_;        // needs and does not own
    CountedRanges needed_once_;     // of these, for one member only
    CountedRanges owned_unneeded_;  // owns, and no other member needs
    std::vector<int> without_;
};

}  // namespace jaxmagi::planning
