#include "csrc/planning/hand.h"

#include <algorithm>
#include <utility>

namespace jaxmagi::planning {

Hand::Hand(const Units& units, std::vector<int> members) : units_(&units), members_(std::move(members)) {
    rebuild();
}

void Hand::exchange(int place, int unit) {
    members_[place] = unit;
    rebuild();
}

void Hand::rebuild() {
    std::vector<Edge> edges;
    edges.reserve(6 * members_.size());
    area_ = 0;
    for (const int unit : members_) {
        area_ += units_->area(unit);
        const Range own = units_->rows(unit);
        edges.push_back({own.begin, 0, 1});
        edges.push_back({own.end, 0, -1});
        for (const Range& keys : units_->foreign(unit)) {
            edges.push_back({keys.begin, 1, 0});
            edges.push_back({keys.end, -1, 0});
        }
    }
    std::ranges::sort(edges, {}, &Edge::key);
    count_rows(edges);

    without_.resize(members_.size());
    for (size_t place = 0; place < members_.size(); ++place) {
        const Range own = units_->rows(members_[place]);
        without_[place] = length_of(own) - rows_of(kOwnedUnneeded, own);
        for (const Range& keys : units_->foreign(members_[place]))
            without_[place] -= rows_of(kNeededOnce, keys);
    }
}

void Hand::count_rows(std::span<const Edge> edges) {
    steps_.assign(1, {.begin = -1, .rows_before = {}, .kind = kUnused});
    received_ = 0;
    received_keys_.clear();
    int needed = 0, owned = 0;
    bool is_received = false;
    for (size_t i = 0; i < edges.size();) {
        const int key = edges[i].key;
        for (; i < edges.size() and edges[i].key == key; ++i) {
            needed += edges[i].needed;
            owned += edges[i].owned;
        }
        Step step = steps_.back();
        const int length = key - step.begin;
        if (step.kind < kNumCounted)
            step.rows_before[step.kind] += length;
        if (is_received) {
            received_ += length;
            received_keys_.push_back({step.begin, key});
        }
        is_received = needed > 0 and owned == 0;
        step.begin = key;
        step.kind = kind_of(needed, owned);
        steps_.push_back(step);
    }
}

Hand::Kind Hand::kind_of(int needed, int owned) {
    if (needed == 0)
        return owned ? kOwnedUnneeded : kUnused;
    return needed == 1 and not owned ? kNeededOnce : kOther;
}

int Hand::with(int unit) const {
    const Range own = units_->rows(unit);
    int rows = rows_of(kUnused, own) - length_of(own);
    for (const Range& keys : units_->foreign(unit))
        rows += rows_of(kUnused, keys);
    return rows;
}

int Hand::exchange_surcharge(int place, int unit) const {
    const int leaving = members_[place];
    int rows = 0;
    for (const Range& keys : units_->foreign(unit)) {
        rows += rows_of(kOwnedUnneeded, intersect(keys, units_->rows(leaving)));
        for (const Range& before : units_->foreign(leaving))
            rows += rows_of(kNeededOnce, intersect(keys, before));
    }
    for (const Range& before : units_->foreign(leaving))
        rows += rows_of(kNeededOnce, intersect(units_->rows(unit), before));
    return rows;
}

// The last step that begins at `key` or before, without branches that depend on the data.
const Hand::Step& Hand::step_at(int key) const {
    const Step* step = steps_.data();
    for (size_t count = steps_.size(); count > 1;) {
        const size_t half = count / 2;
        step += step[half].begin <= key ? half : 0;
        count -= half;
    }
    return *step;
}

int Hand::rows_before(Kind kind, int key) const {
    const Step& step = step_at(key);
    return step.rows_before[kind] + (step.kind == kind ? key - step.begin : 0);
}

int Hand::rows_of(Kind kind, Range keys) const {
    return is_empty(keys) ? 0 : rows_before(kind, keys.end) - rows_before(kind, keys.begin);
}

}  // namespace jaxmagi::planning
