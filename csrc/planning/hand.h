#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/planning/units.h"

namespace jaxmagi::planning {

// The units of one rank, and the keys that it has to receive for them, as a step function over the sequence.
//
// What changes when a unit comes, goes, or is exchanged is found in O(log n) for each of the unit's ranges: keys are
// counted by how many of the rank's units need them (none, one, more) and by whether the rank owns them.
class Hand {
public:
    Hand(const Units& units, std::vector<int> members);

    std::span<const int> members() const { return members_; }
    int64_t area() const { return area_; }
    int64_t received() const { return received_; }
    // The keys that it receives: sorted, disjoint.
    std::span<const Range> received_keys() const { return received_keys_; }

    void exchange(int place, int unit);

    // By how much the received rows grow without the member at `place`.
    int without(int place) const { return without_[place]; }
    // By how much they grow with one more unit.
    int with(int unit) const;
    // What an exchange costs beyond without() and with(): rows that only the leaving member needed, or owned, and that
    // the coming one needs, and rows of the coming one that only the leaving one needed. Never negative.
    int exchange_surcharge(int place, int unit) const;

private:
    enum Kind : int { kNeededOnce, kOwnedUnneeded, kOther, kNumCounted = kOther };
    struct Step {
        int begin;
        std::array<int, kNumCounted> rows_before;  // of each kind
        Kind kind;
    };

    // Where the number of members that need the keys, or own them, changes, by the member at `place`.
    struct Edge {
        int key, needed, owned, place;
    };

    // Keys up to `end` that it owns or needs, and how many such lie before.
    struct Held {
        int begin, end, rows_before;
    };

    struct Users;

    void add_edges(int place);
    void count_rows();
    void close_step(int end, const Users& users);
    void open_step(int begin, const Users& users);
    int rows_of(Kind kind, Range keys) const;
    int held_before(int key) const;

    const Units* units_;
    std::vector<int> members_;
    std::vector<Edge> edges_;  // by key
    int64_t area_ = 0, received_ = 0;
    std::vector<Step> steps_;
    std::vector<Held> held_;
    std::vector<Range> received_keys_;
    std::vector<int> without_;
};

}  // namespace jaxmagi::planning
