#include "csrc/planning/rank_chunks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace jaxmagi::planning {

// Counts the members that need or own a range of keys. The sum of their places is the place of a single one.
struct RankChunks::Users {
    int needed = 0, owned = 0;
    int64_t needed_places = 0, owned_places = 0;

    void change_by(const Edge& edge) {
        needed += edge.needed;
        owned += edge.owned;
        needed_places += int64_t{edge.needed} * edge.place;
        owned_places += int64_t{edge.owned} * edge.place;
    }
};

RankChunks::RankChunks(const Units& units, std::vector<int> members) : units_(&units), members_(std::move(members)) {
    for (int place = 0; place < static_cast<int>(members_.size()); ++place)
        add_edges(place);
    std::ranges::sort(edges_, {}, &Edge::key);
    count_rows();
}

void RankChunks::exchange(int place, int unit) {
    std::erase_if(edges_, [&](const Edge& edge) { return edge.place == place; });
    members_[place] = unit;
    const auto kept = static_cast<std::ptrdiff_t>(edges_.size());
    add_edges(place);
    std::ranges::sort(edges_.begin() + kept, edges_.end(), {}, &Edge::key);
    std::ranges::inplace_merge(edges_, edges_.begin() + kept, {}, &Edge::key);
    count_rows();
}

void RankChunks::add_edges(int place) {
    const Range own = units_->rows(members_[place]);
    edges_.push_back({own.begin, 0, 1, place});
    edges_.push_back({own.end, 0, -1, place});
    for (const Range& keys : units_->remote(members_[place])) {
        edges_.push_back({keys.begin, 1, 0, place});
        edges_.push_back({keys.end, -1, 0, place});
    }
}

void RankChunks::count_rows() {
    area_ = 0;
    without_.clear();
    for (const int unit : members_) {
        area_ += units_->area(unit);
        without_.push_back(length_of(units_->rows(unit)));
    }
    for (CountedRanges* ranges : {&held_, &received_, &needed_once_, &owned_unneeded_})
        ranges->clear();
    Users users;
    for (size_t i = 0; i + 1 < edges_.size(); ++i) {
        users.change_by(edges_[i]);
        if (edges_[i].key < edges_[i + 1].key)
            count_step(edges_[i].key, edges_[i + 1].key, users);
    }
}

void RankChunks::count_step(int begin, int end, const Users& users) {
    if (users.needed > 0 or users.owned > 0)
        held_.add(begin, end);
    if (users.needed > 0 and users.owned == 0) {
        received_.add(begin, end);
        if (users.needed == 1) {
            needed_once_.add(begin, end);
            without_[users.needed_places] -= end - begin;
        }
    }
    if (users.owned > 0 and users.needed == 0) {
        owned_unneeded_.add(begin, end);
        without_[users.owned_places] -= end - begin;
    }
}

int RankChunks::with(int unit) const {
    int rows = units_->remote_before(unit) + units_->remote_after(unit);
    for (const Range& keys : units_->held(unit))
        rows -= held_.rows_in(keys);
    return rows;
}

int RankChunks::exchange_surcharge(int place, int unit) const {
    const int leaving = members_[place];
    int rows = 0;
    for (const Range& keys : units_->remote(unit)) {
        rows += owned_unneeded_.rows_in(intersect(keys, units_->rows(leaving)));
        for (const Range& before : units_->remote(leaving))
            rows += needed_once_.rows_in(intersect(keys, before));
    }
    for (const Range& before : units_->remote(leaving))
        rows += needed_once_.rows_in(intersect(units_->rows(unit), before));
    return rows;
}

}  // namespace jaxmagi::planning
