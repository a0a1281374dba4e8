#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/attention/cpu/params.h"
#include "csrc/mask/band.h"

namespace jaxmagi::cpu {

// Consecutive query tiles that a key chunk works on, with the bands [begin, end) of the schedule's band_ids. Of the
// chunks that add to the dQ of such a tile, in ascending order, the chunk has the number `turn`.
struct QueryTiles {
    Range tiles;
    int turn;
    int64_t begin, end;
};

// The query tiles of every key chunk, and the order in which chunks add to a tile's dQ.
class BackwardSchedule {
public:
    BackwardSchedule(const BandTable& table, int64_t batch, int q_len, int kv_len);

    const std::vector<Band>& bands() const { return bands_; }
    const int* band_ids() const { return band_ids_.data(); }
    std::span<const QueryTiles> query_tiles(int chunk) const {
        return {query_tiles_.data() + offsets_[chunk], static_cast<size_t>(offsets_[chunk + 1] - offsets_[chunk])};
    }
    int num_turns(int query_tile) const { return num_turns_[query_tile]; }

private:
    void add_chunk(std::span<const int> ids, Range keys);
    void add_tile(int tile, std::span<const int> ids);

    std::vector<Band> bands_;
    std::vector<int64_t> offsets_;
    std::vector<QueryTiles> query_tiles_;
    std::vector<int> band_ids_;
    std::vector<int> num_turns_;
};

}  // namespace jaxmagi::cpu
