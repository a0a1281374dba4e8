#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/attention/cpu/params.h"
#include "csrc/mask/band.h"

namespace jaxmagi::cpu {

// A key chunk meets neighbouring query tiles, all of them through the bands [begin, end) of the schedule's band_ids.
// For each of them it is the turn-th chunk, in ascending order, that adds to the tile's dQ.
struct Visits {
    Range query_tiles;
    int turn;
    int64_t begin, end;
};

// Which query tiles every key chunk visits, and in which order the chunks add to a tile's dQ.
class BackwardSchedule {
public:
    BackwardSchedule(const BandTable& table, int64_t batch, int q_len, int kv_len);

    const std::vector<Band>& bands() const { return bands_; }
    const int* band_ids() const { return band_ids_.data(); }
    std::span<const Visits> visits_of(int chunk) const {
        return {visits_.data() + offsets_[chunk], static_cast<size_t>(offsets_[chunk + 1] - offsets_[chunk])};
    }
    int num_turns(int query_tile) const { return num_turns_[query_tile]; }

private:
    void add_chunk(std::span<const int> ids, Range keys);
    void add_tile(int tile, std::span<const int> ids);

    std::vector<Band> bands_;
    std::vector<int64_t> offsets_;
    std::vector<Visits> visits_;
    std::vector<int> band_ids_;
    std::vector<int> num_turns_;
};

}  // namespace jaxmagi::cpu
