#include "csrc/planning/hand.h"

#include <algorithm>
#include <utility>

namespace jaxmagi::planning {
namespace {

// The last entry that begins at `key` or before, without branches that depend on the data.
template <typename Entry> const Entry& last_before(const std::vector<Entry>& entries, int key) {
    const Entry* entry = entries.data();
    for (size_t count = entries.size(); count > 1;) {
        const size_t half = count / 2;
        entry += entry[half].begin <= key ? half : 0;
        count -= half;
    }
    return *entry;
}

}  // namespace

// The members that need keys, or own them.
struct Hand::Users {
    int needed = 0, owned = 0;
    int64_t needed_places = 0, owned_places = 0;  // sums

    void change_by(const Edge& edge) {
        needed += edge.needed;
        owned += edge.owned;
        needed_places += int64_t{edge.needed} * edge.place;
        owned_places += int64_t{edge.owned} * edge.place;
    }
    Kind kind() const {
        if (needed == 0)
            return owned > 0 ? kOwnedUnneeded : kOther;
        return needed == 1 and owned == 0 ? kNeededOnce : kOther;
    }
    // Of the only one, if the kind is counted.
    int64_t place() const { return owned > 0 ? owned_places : needed_places; }
};

Hand::Hand(const Units& units, std::vector<int> members) : units_(&units), members_(std::move(members)) {
    for (int place = 0; place < static_cast<int>(members_.size()); ++place)
        add_edges(place);
    std::ranges::sort(edges_, {}, &Edge::key);
    count_rows();
}

void Hand::exchange(int place, int unit) {
    std::erase_if(edges_, [&](const Edge& edge) { return edge.place == place; });
    members_[place] = unit;
    const auto kept = static_cast<std::ptrdiff_t>(edges_.size());
    add_edges(place);
    std::ranges::sort(edges_.begin() + kept, edges_.end(), {}, &Edge::key);
    std::ranges::inplace_merge(edges_, edges_.begin() + kept, {}, &Edge::key);
    count_rows();
}

void Hand::add_edges(int place) {
    const Range own = units_->rows(members_[place]);
    edges_.push_back({own.begin, 0, 1, place});
    edges_.push_back({own.end, 0, -1, place});
    for (const Range& keys : units_->foreign(members_[place])) {
        edges_.push_back({keys.begin, 1, 0, place});
        edges_.push_back({keys.end, -1, 0, place});
    }
}

void Hand::count_rows() {
    area_ = received_ = 0;
    without_.clear();
    for (const int unit : members_) {
        area_ += units_->area(unit);
        without_.push_back(length_of(units_->rows(unit)));
    }
    steps_.assign(1, {.begin = -1, .rows_before = {}, .kind = kOther});
    held_.assign(1, {.begin = -1, .end = -1, .rows_before = 0});
    received_keys_.clear();
    Users users;
    for (size_t i = 0; i < edges_.size();) {
        const int key = edges_[i].key;
        close_step(key, users);
        for (; i < edges_.size() and edges_[i].key == key; ++i)
            users.change_by(edges_[i]);
        open_step(key, users);
    }
}

void Hand::close_step(int end, const Users& users) {
    const int begin = steps_.back().begin;
    if (users.kind() != kOther)
        without_[users.place()] -= end - begin;
    if (users.needed > 0 and users.owned == 0) {
        received_ += end - begin;
        received_keys_.push_back({begin, end});
    }
    if (users.needed + users.owned > 0)
        held_.back().end = end;
}

void Hand::open_step(int begin, const Users& users) {
    Step step = steps_.back();
    if (step.kind != kOther)
        step.rows_before[step.kind] += begin - step.begin;
    step.begin = begin;
    step.kind = users.kind();
    steps_.push_back(step);
    const Held& last = held_.back();
    if (users.needed + users.owned > 0 and last.end < begin)
        held_.push_back({begin, begin, last.rows_before + last.end - last.begin});
}

int Hand::with(int unit) const {
    int rows = units_->foreign_before(unit) + units_->foreign_behind(unit);
    for (const Range& keys : units_->held(unit))
        rows -= held_before(keys.end) - held_before(keys.begin);
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

int Hand::rows_of(Kind kind, Range keys) const {
    const auto rows_before = [&](int key) {
        const Step& step = last_before(steps_, key);
        return step.rows_before[kind] + (step.kind == kind ? key - step.begin : 0);
    };
    return is_empty(keys) ? 0 : rows_before(keys.end) - rows_before(keys.begin);
}

int Hand::held_before(int key) const {
    const Held& held = last_before(held_, key);
    return held.rows_before + std::min(key, held.end) - held.begin;
}

}  // namespace jaxmagi::planning
