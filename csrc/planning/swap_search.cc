#include "csrc/planning/swap_search.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace jaxmagi::planning {
namespace {

// The numbers below were chosen by trial. A cell above the limit has a price in received rows: at first an eighth
// (kFirstShift) of the mean number of rows for a cell, then twice as much after each sweep, so that area leaves where
// that costs few rows. At least one of kLeastShare rows counts as received for that mean, so that the price does not
// vanish.
constexpr int kSweeps = 14, kFirstShift = 3, kLeastShare = 16;
constexpr int64_t kRowPrice = 4;  // received rows that weigh as much as one that is sent or received above the limit
// Sweeps where sent rows are above the limit, which seldom all of them leave. Five and seven made plans no faster.
constexpr int kFewSweeps = 3;
constexpr int kFarthest = 64;  // largest difference of two ranks that are compared; bounds the time of many ranks

class Search {
public:
    // Looks at all pairs, or with `keep_swap` only at those with an area above its limit.
    Search(std::vector<RankChunks>& ranks, const Units& units, const Limits& limits, KeepSwap keep_swap)
        : ranks_(ranks), units_(units), limits_(limits), keep_swap_(std::move(keep_swap)), changed_(ranks.size(), 1) {
        const int num_ranks = static_cast<int>(ranks.size());
        checked_.resize(static_cast<size_t>(num_ranks) * std::min(num_ranks, kFarthest));
    }

    void run();

private:
    struct Swap {
        int place_a, place_b;
    };

    // The area and the rows, sent and received together, that two ranks have above the limits.
    struct Excess {
        int64_t area, rows;
    };

    // The growth by a swap: the first rank's area and demand, and the rows that each of the two receives.
    struct Change {
        int64_t area = 0, demand = 0, received = 0, other_received = 0;
    };

    // A unit that could leave a rank for another.
    struct Move {
        int unit, without, with;  // growth of the received rows of the rank that it leaves, and of the other rank
        int64_t area, demand;
        int64_t rows() const { return int64_t{without} + with; }
    };

    bool sweep();
    bool improve(int rank, int other);
    void find_moves(std::vector<Move>& moves, const RankChunks& from, const RankChunks& to) const;
    std::optional<Swap> best_swap(int rank, int other);
    Excess excess_of(int rank, int other, const Change& change) const;
    int64_t saved(Excess before, Excess after) const {
        return ((before.area - after.area) >> shift_) + (before.rows - after.rows) * kRowPrice;
    }

    std::vector<RankChunks>& ranks_;
    const Units& units_;
    const Limits& limits_;
    const KeepSwap keep_swap_;
    int shift_ = 0;  // cells above the limit that weigh as much as one received row, as a power of two
    int clock_ = 1;
    std::vector<int> changed_, checked_;
    std::vector<int64_t> demand_, sent_;
    std::vector<Move> moves_a_, moves_b_;
};

void Search::run() {
    const int64_t rows = units_.rows(units_.count() - 1).end;
    const int64_t received = std::max({int64_t{1}, rows / kLeastShare, received_rows(ranks_)});
    int64_t cells_per_row = units_.total_area() / received;
    for (shift_ = kFirstShift; cells_per_row > 1; cells_per_row /= 2)
        ++shift_;
    for (int i = 0; i < kSweeps; ++i) {
        demand_ = demand_of(ranks_, units_);
        sent_ = sent_rows(ranks_, demand_);
        const bool is_done = not sweep() or (i + 1 >= kFewSweeps and std::ranges::max(sent_) > limits_.sent);
        if (is_done and area_above(ranks_, limits_.areas) == 0)
            return;
        shift_ = std::max(0, shift_ - 1);
    }
}

bool Search::sweep() {
    const int num_ranks = static_cast<int>(ranks_.size()), farthest = std::min(num_ranks - 1, kFarthest);
    bool changed = false;
    for (int distance = 1; distance <= farthest; ++distance)
        for (int rank = 0; rank + distance < num_ranks; ++rank) {
            const int other = rank + distance;
            int& checked = checked_[static_cast<size_t>(rank) * farthest + distance - 1];
            const bool is_done = keep_swap_ or checked >= std::max(changed_[rank], changed_[other]);
            if (is_done and excess_of(rank, other, {}).area == 0)
                continue;
            if (improve(rank, other)) {
                changed_[rank] = changed_[other] = ++clock_;
                changed = true;
            } else {
                checked = clock_;
            }
        }
    return changed;
}

Search::Excess Search::excess_of(int rank, int other, const Change& change) const {
    const auto above = [](int64_t value, int64_t limit) { return value > limit ? value - limit : 0; };
    const RankChunks &a = ranks_[rank], &b = ranks_[other];
    return {.area = above(a.area() + change.area, limits_.areas[rank]) +
                    above(b.area() - change.area, limits_.areas[other]),
            .rows = above(sent_[rank] + change.demand, limits_.sent) +
                    above(sent_[other] - change.demand, limits_.sent) +
                    above(a.received() + change.received, limits_.received) +
                    above(b.received() + change.other_received, limits_.received)};
}

bool Search::improve(int rank, int other) {
    const std::optional<Swap> swap = best_swap(rank, other);
    if (not swap)
        return false;
    RankChunks &a = ranks_[rank], &b = ranks_[other];
    const int from_a = a.members()[swap->place_a], from_b = b.members()[swap->place_b];
    a.exchange(swap->place_a, from_b);
    b.exchange(swap->place_b, from_a);
    if (keep_swap_ and not keep_swap_(rank, other)) {
        a.exchange(swap->place_a, from_a);
        b.exchange(swap->place_b, from_b);
        return false;
    }
    const int64_t moved_demand = demand_[from_b] - demand_[from_a];
    sent_[rank] += moved_demand;
    sent_[other] -= moved_demand;
    return true;
}

void Search::find_moves(std::vector<Move>& moves, const RankChunks& from, const RankChunks& to) const {
    moves.clear();
    for (int place = 0; place < static_cast<int>(from.members().size()); ++place) {
        const int unit = from.members()[place];
        moves.push_back({unit, from.without(place), to.with(unit), units_.area(unit), demand_[unit]});
    }
}

std::optional<Search::Swap> Search::best_swap(int rank, int other) {
    const RankChunks &a = ranks_[rank], &b = ranks_[other];
    find_moves(moves_a_, a, b);
    find_moves(moves_b_, b, a);
    const Excess before = excess_of(rank, other, {});
    const int64_t most_saved = saved(before, {0, 0});
    const int64_t lowest_b = std::ranges::min(moves_b_, {}, &Move::rows).rows();
    std::optional<Swap> best;
    int64_t best_cost = 0;
    for (const Move& leaving : moves_a_) {
        // The terms that are left out here are never negative, so this bounds all swaps of the unit.
        if (leaving.rows() + lowest_b - most_saved >= best_cost)
            continue;
        for (const Move& coming : moves_b_) {
            const int64_t rows = leaving.rows() + coming.rows();
            if (rows - most_saved >= best_cost)
                continue;
            Change change{.area = coming.area - leaving.area,
                          .demand = coming.demand - leaving.demand,
                          .received = int64_t{leaving.without} + coming.with,
                          .other_received = int64_t{coming.without} + leaving.with};
            const Excess after = excess_of(rank, other, change);
            if (after.area > before.area or rows - saved(before, after) >= best_cost)
                continue;
            const int i = static_cast<int>(&leaving - moves_a_.data()), j = static_cast<int>(&coming - moves_b_.data());
            change.received += a.exchange_surcharge(i, coming.unit);
            change.other_received += b.exchange_surcharge(j, leaving.unit);
            const int64_t cost =
                change.received + change.other_received - saved(before, excess_of(rank, other, change));
            if (cost < best_cost) {
                best = {.place_a = i, .place_b = j};
                best_cost = cost;
            }
        }
    }
    return best;
}

}  // namespace

int64_t num_pairs(int num_ranks) {
    const int64_t farthest = std::min(num_ranks - 1, kFarthest);
    return farthest * num_ranks - farthest * (farthest + 1) / 2;
}

int64_t area_above(const std::vector<RankChunks>& ranks, std::span<const int64_t> limits) {
    int64_t excess = 0;
    for (size_t rank = 0; rank < ranks.size(); ++rank)
        excess += std::max<int64_t>(0, ranks[rank].area() - limits[rank]);
    return excess;
}

int64_t received_rows(const std::vector<RankChunks>& ranks) {
    int64_t rows = 0;
    for (const RankChunks& rank : ranks)
        rows += rank.received();
    return rows;
}

std::vector<int64_t> demand_of(const std::vector<RankChunks>& ranks, const Units& units) {
    const int size = std::max(1, length_of(units.rows(0)));
    // Whole units are counted by the steps of their numbers, parts of units one by one.
    std::vector<int64_t> demand(units.count() + 1), steps(units.count() + 1);
    for (const RankChunks& rank : ranks)
        rank.received_keys().for_each([&](Range keys) {
            const int first = keys.begin / size, last = (keys.end - 1) / size;
            steps[first] += size;
            steps[last + 1] -= size;
            demand[first] -= keys.begin - first * size;
            demand[last] -= (last + 1) * size - keys.end;
        });
    int64_t whole = 0;
    for (int unit = 0; unit < units.count(); ++unit)
        demand[unit] += whole += steps[unit];
    demand.pop_back();
    return demand;
}

std::vector<int64_t> sent_rows(const std::vector<RankChunks>& ranks, std::span<const int64_t> demand) {
    std::vector<int64_t> sent;
    for (const RankChunks& rank : ranks) {
        sent.push_back(0);
        for (const int unit : rank.members())
            sent.back() += demand[unit];
    }
    return sent;
}

void reduce_rows(std::vector<RankChunks>& ranks, const Units& units, const Limits& limits) {
    Search(ranks, units, limits, nullptr).run();
}

void reduce_areas(std::vector<RankChunks>& ranks, const Units& units, const Limits& limits, const KeepSwap& keep_swap) {
    Search(ranks, units, limits, keep_swap).run();
}

}  // namespace jaxmagi::planning
