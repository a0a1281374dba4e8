#pragma once

#include "csrc/attention/cpu/kernel_table.h"
#include "csrc/attention/cpu/vector_math.h"

// Scores are held transposed, [keys, kTileRows queries]: the queries of a tile lie along the vectors, so that
// maxima, sums and limits of a softmax row never cross lanes, and the queries that see one key are a lane interval.

namespace jaxmagi::cpu::JAXMAGI_ISA {

// Lanes [begin, end) of a row of scores, with a comparison per vector.
template <typename T> struct LaneInterval {
    bits_t<T> lanes = lane_indices<T>();
    int begin, end;

    explicit LaneInterval(Range rows) : begin(rows.begin), end(rows.end) {}
    bits_t<T> contains(int column) const {
        return (lanes >= begin - column) & (lanes < end - column);
    }
};

// Those of the tile's `rows` that see `key`, as lanes.
inline Range seeing_lanes(const Band& band, int key, Range rows) {
    const Range seeing = rows_of_key(band, key, rows);
    return {seeing.begin - rows.begin, seeing.end - rows.begin};
}

template <typename T> inline vec_t<T> cap_score(vec_t<T> score, T cap) {
    return cap * tanh<T>(score / cap);
}

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
