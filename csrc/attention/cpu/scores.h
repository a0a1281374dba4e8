#pragma once

#include "csrc/attention/cpu/kernel_table.h"
#include "csrc/attention/cpu/vector_math.h"

// Scores are held transposed, [keys, kTileRows queries]: the queries of a tile lie along the vectors, so that
// maxima, sums and limits of a softmax row never cross lanes, and the queries that see one key are a lane interval.

namespace jaxmagi::cpu::JAXMAGI_ISA {

// Calls body(band, keys) for the keys in `range` that `rows` see, band by band and in tiles of at most kTileKeys.
template <typename Body>
inline void for_each_key_tile(const BandList& visible, Range rows, Range range, const Body& body) {
    for (int i = 0; i < visible.count; ++i) {
        const Band& band = visible.bands[visible.ids[i]];
        const Range keys = intersect(keys_of_rows(band, rows), range);
        for (int key = keys.begin; key < keys.end; key += kTileKeys)
            body(band, intersect(keys, {key, key + kTileKeys}));
    }
}

// The lanes of the queries, among `rows`, that see a key. Each vector of scores takes one comparison.
template <typename T> struct VisibleLanes {
    bits_t<T> lanes = lane_indices<T>();
    int begin, end;

    VisibleLanes(const Band& band, int key, Range rows) {
        const Range visible = rows_of_key(band, key, rows);
        begin = visible.begin - rows.begin;
        end = visible.end - rows.begin;
    }
    bits_t<T> at(int column) const { return (lanes >= begin - column) & (lanes < end - column); }
};

template <typename T> inline vec_t<T> apply_soft_cap(vec_t<T> score, T soft_cap) {
    return soft_cap * tanh<T>(score / soft_cap);
}

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
