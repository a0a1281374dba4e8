#include "csrc/planning/shard.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <ranges>
#include <utility>

#include "csrc/mask/area.h"
#include "csrc/planning/merge.h"

namespace jaxmagi::planning {
namespace {

Range keys_of(const Piece& piece) {
    return {piece.band.k0, piece.band.k1};
}

Band crop_keys(const Band& band, const Run& keys) {
    return crop(band, {0, kUnbounded}, {keys.begin, keys.end});
}

int shifted_limit(int limit, int64_t distance) {
    if (limit <= -kUnbounded or limit >= kUnbounded)
        return limit;
    return static_cast<int>(std::clamp<int64_t>(limit + distance, -kUnbounded, kUnbounded));
}

// Returns the band moved down by dq rows and right by dk keys.
Band shifted(const Band& band, int dq, int dk) {
    const int64_t distance = int64_t{dk} - dq;
    return {band.q0 + dq, band.q1 + dq, band.k0 + dk,
            band.k1 + dk, shifted_limit(band.lo, distance), shifted_limit(band.hi, distance)};
}

// Counts the cells of bands with keys below a limit.
class AreaBelow {
public:
    void add(const Band& band) {
        bands_.push_back({.band = band, .area = area(band)});
        total_ += bands_.back().area;
    }
    int64_t total() const { return total_; }
    int64_t operator()(int limit) const {
        int64_t below = 0;
        for (const auto& [band, cells] : bands_)
            if (band.k1 <= limit)
                below += cells;
            else if (band.k0 < limit)
                below += area(crop(band, {0, kUnbounded}, {0, limit}));
        return below;
    }

private:
    struct Entry {
        Band band;
        int64_t area;
    };
    std::vector<Entry> bands_;
    int64_t total_ = 0;
};

// Remote keys of one run of an owner.
struct OwnedRun {
    int distance;  // from the rank to the owner, in a ring
    Range keys;
    int64_t area;  // visible cells with these keys
};

// Returns length * part / whole for part < whole, rounded so that the product fits into 64 bits.
int share_of(int length, int64_t part, int64_t whole) {
    int shift = 0;
    while (whole >> shift >= int64_t{1} << 32)
        ++shift;
    return static_cast<int>(length * (part >> shift) / (whole >> shift));
}

// Returns the owned runs of a shard's remote keys, by distance, then by key.
std::vector<OwnedRun> owned_runs(const Shard& shard, int rank, int num_ranks, const Owners& owners) {
    std::vector<OwnedRun> runs;
    Runs keys;
    for (const Run& remote : shard.remote)
        for (const Run& run : meeting(owners.runs, {remote.begin, remote.end})) {
            const Range both = intersect({remote.begin, remote.end}, {run.begin, run.end});
            const int owner = owners.ranks[owners.index_of(run)];
            runs.push_back({.distance = (owner - rank + num_ranks) % num_ranks, .keys = both, .area = 0});
            keys.push_back({both.begin, both.end, static_cast<int>(keys.size())});
        }
    check_meetings(shard.pieces | std::views::transform(keys_of), keys);
    for (const Piece& piece : shard.pieces)
        for (const Run& run : meeting(keys, keys_of(piece)))
            runs[run.place].area += area(crop_keys(piece.band, run));
    std::ranges::stable_sort(runs, {}, &OwnedRun::distance);
    return runs;
}

}  // namespace

void find_remote(Shard& shard) {
    std::vector<Range> needed;
    for (const Piece& piece : shard.pieces)
        needed.push_back(keys_of(piece));
    shard.remote = without(union_of(std::move(needed)), shard.rows);
}

std::vector<Shard> make_shards(const std::vector<Band>& bands, std::vector<Runs> rows_of_ranks, const Owners& owners) {
    std::vector<Shard> shards(rows_of_ranks.size());
    for (size_t rank = 0; rank < shards.size(); ++rank)
        shards[rank].rows = std::move(rows_of_ranks[rank]);
    for (const Band& band : bands)
        for (const Run& run : meeting(owners.runs, {band.q0, band.q1})) {
            const Band piece = tighten(crop(band, {run.begin, run.end}, {0, kUnbounded}), kUnbounded, kUnbounded);
            const int index = owners.index_of(run);
            Shard& shard = shards[owners.ranks[index]];
            if (piece.q0 < piece.q1)
                shard.pieces.push_back({.band = piece, .run = owners.indices[index]});
            check_pieces(std::ssize(shard.pieces), std::ssize(bands), std::ssize(shard.rows));
        }
    std::ranges::for_each(shards, find_remote);
    return shards;
}

std::vector<Runs> split_remote(const Shard& shard, std::span<const int32_t> shares) {
    const int num_parts = static_cast<int>(shares.size());
    if (num_parts == 1)
        return {shard.remote};
    check_meetings(shard.pieces | std::views::transform(keys_of), shard.remote);
    AreaBelow area_below;
    for (const Piece& piece : shard.pieces)
        for (const Run& run : meeting(shard.remote, keys_of(piece)))
            area_below.add(crop_keys(piece.band, run));
    const int64_t all = std::accumulate(shares.begin(), shares.end(), int64_t{0});
    std::vector<Runs> parts;
    int begin = 0;
    int64_t share = 0;
    for (int part = 1; part <= num_parts; ++part) {
        share += shares[part - 1];
        // This is total * share / all, whose product would leave 64 bits.
        const int64_t target = area_below.total() / all * share + area_below.total() % all * share / all;
        int cut = 0, upper = part < num_parts and not shard.remote.empty() ? shard.remote.back().end : 0;
        while (cut < upper) {
            const int middle = cut + (upper - cut) / 2;
            if (area_below(middle) < target)
                cut = middle + 1;
            else
                upper = middle;
        }
        const int end = part < num_parts ? cut : kUnbounded;
        parts.push_back(part_of(shard.remote, {begin, end}));
        begin = end;
    }
    return parts;
}

std::vector<Runs> split_remote_by_owner(const Shard& shard, int rank, int num_ranks, const Owners& owners,
                                        std::span<const int32_t> shares) {
    std::vector<OwnedRun> runs = owned_runs(shard, rank, num_ranks, owners);
    int64_t total = 0;
    for (const OwnedRun& run : runs)
        total += run.area;
    const int64_t all = std::accumulate(shares.begin(), shares.end(), int64_t{0});
    std::vector<std::vector<Range>> parts(shares.size());
    size_t part = 0;
    int64_t share = shares[0], before = 0;
    for (OwnedRun& run : runs)
        for (;;) {
            const int64_t target = total / all * share + total % all * share / all;
            if (part + 1 == parts.size() or before + run.area <= target) {
                parts[part].push_back(run.keys);
                before += run.area;
                break;
            }
            // All keys of a run are assumed to have equally many cells.
            const int cut = run.keys.begin + share_of(run.keys.end - run.keys.begin, target - before, run.area);
            parts[part].push_back({run.keys.begin, cut});
            run.keys.begin = cut;
            run.area -= target - before;
            before = target;
            share += shares[++part];
        }
    std::vector<Runs> split;
    for (auto& ranges : parts)
        split.push_back(without(union_of(std::move(ranges)), {}));
    return split;
}

Runs keys_of_one_call(const Runs& own, const Runs& received, int own_rows) {
    Runs keys = own;
    for (const Run& run : received)
        keys.push_back({run.begin, run.end, run.place + own_rows});
    std::ranges::sort(keys, {}, &Run::begin);
    return keys;
}

std::vector<Band> local_bands(const Shard& shard, const Runs& keys) {
    check_meetings(shard.pieces | std::views::transform(keys_of), keys);
    std::vector<Band> bands;
    for (const Piece& piece : shard.pieces) {
        const Run& rows = shard.rows[piece.run];
        for (const Run& run : meeting(keys, keys_of(piece))) {
            const Band cropped = tighten(crop_keys(piece.band, run), kUnbounded, kUnbounded);
            if (cropped.q0 < cropped.q1)
                bands.push_back(shifted(cropped, rows.place - rows.begin, run.place - run.begin));
        }
    }
    return merge(bands);
}

}  // namespace jaxmagi::planning
