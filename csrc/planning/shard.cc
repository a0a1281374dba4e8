#include "csrc/planning/shard.h"

#include <algorithm>
#include <iterator>
#include <ranges>
#include <utility>

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

// Returns all keys that a shard needs, by token; their `place` is where attention finds them.
Runs all_keys(const Shard& shard, int own_rows) {
    Runs keys = shard.rows;
    for (const Run& run : shard.remote)
        keys.push_back({run.begin, run.end, run.place + own_rows});
    std::ranges::sort(keys, {}, &Run::begin);
    return keys;
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

std::vector<Band> local_bands(const Shard& shard, int own_rows) {
    const Runs keys = all_keys(shard, own_rows);
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
