#include "csrc/planning/tile_work.h"

#include <algorithm>
#include <utility>

#include "csrc/mask/tile_count.h"
#include "csrc/planning/shard.h"

namespace jaxmagi::planning {
namespace {

// Makes the shard of a rank's units for one mask.
class ShardMaker {
public:
    ShardMaker(const Units& units, int mask) : units_(units), mask_(mask) {}

    // `members` are in ascending order.
    Shard make(std::span<const int> members) {
        for (const int unit : members)
            if (const Range rows = units_.rows(unit); not is_empty(rows)) {
                add_rows(rows);
                add_pieces(unit);
            }
        find_remote(shard_);
        return std::move(shard_);
    }

private:
    // A piece that ended with the previous unit, and its index in the shard.
    struct OpenPiece {
        int id;
        size_t place;
    };

    void add_rows(Range rows) {
        if (not shard_.rows.empty() and shard_.rows.back().end == rows.begin) {
            shard_.rows.back().end = rows.end;
        } else {
            shard_.rows.push_back({rows.begin, rows.end, num_rows_});
            open_.clear();
        }
        num_rows_ += length_of(rows);
    }

    // Extends pieces of bands that continue from the previous unit, and adds the others.
    void add_pieces(int unit) {
        std::vector<OpenPiece> seen;
        for (const auto& [band, id] : units_.pieces(unit, mask_)) {
            const auto before = std::ranges::lower_bound(open_, id, {}, &OpenPiece::id);
            if (before == open_.end() or before->id != id) {
                seen.push_back({.id = id, .place = shard_.pieces.size()});
                shard_.pieces.push_back({.band = band, .run = static_cast<int>(shard_.rows.size()) - 1});
            } else {
                seen.push_back(*before);
                Band& whole = shard_.pieces[before->place].band;
                whole = {whole.q0, band.q1, std::min(whole.k0, band.k0), std::max(whole.k1, band.k1), band.lo, band.hi};
            }
        }
        open_ = std::move(seen);
    }

    const Units& units_;
    const int mask_;
    Shard shard_;
    int num_rows_ = 0;
    std::vector<OpenPiece> open_;
};

}  // namespace

std::vector<double> TileWork::of(std::span<const int> members) const {
    std::vector<int> ascending(members.begin(), members.end());
    std::ranges::sort(ascending);
    std::vector<double> work(passes_.size());
    for (size_t mask = 0; mask < masks_.size(); ++mask) {
        const Shard shard = ShardMaker(units_, static_cast<int>(mask)).make(ascending);
        if (shard.rows.empty())
            continue;
        const int own_rows = static_cast<int>(num_rows(shard.rows));
        const std::vector<Band> bands = local_bands(shard, own_rows);
        for (size_t i = 0; i < passes_.size(); ++i) {
            const TiledPass& pass = passes_[i];
            const TileCount tiles = count_tiles(bands, pass.rows, pass.keys, pass.by_keys);
            const auto full = static_cast<double>(tiles.full), partial = static_cast<double>(tiles.partial);
            work[i] += static_cast<double>(masks_[mask].weight) * (full + pass.partial_cost * partial);
        }
    }
    return work;
}

int64_t TileWork::num_pieces(std::span<const int> members) const {
    int64_t pieces = 0;
    for (size_t mask = 0; mask < masks_.size(); ++mask)
        for (const int unit : members)
            pieces += std::ssize(units_.pieces(unit, static_cast<int>(mask)));
    return pieces;
}

TileShares::TileShares(const Assignment& assignment, const TileWork& work) : work_(work) {
    std::vector<std::vector<double>> of_ranks;
    for (const auto& members : assignment) {
        of_ranks.push_back(work.of(members));
        means_.resize(of_ranks.back().size());
        for (size_t pass = 0; pass < means_.size(); ++pass)
            means_[pass] += of_ranks.back()[pass] / static_cast<double>(assignment.size());
    }
    for (const auto& of_rank : of_ranks)
        shares_.push_back(share(of_rank));
}

double TileShares::largest() const {
    return std::ranges::max(shares_);
}

double TileShares::share(std::span<const double> work) const {
    double largest = 0;
    for (size_t pass = 0; pass < work.size(); ++pass)
        if (means_[pass] > 0)
            largest = std::max(largest, work[pass] / means_[pass]);
    return largest;
}

}  // namespace jaxmagi::planning
