#pragma once

#include "csrc/common/macros.h"

namespace jaxmagi {

// Lengths are at most kUnbounded, and -kUnbounded / +kUnbounded stand for "no limit" in lo / hi. Within these bounds no
// intermediate value of the functions below exceeds int32.
inline constexpr int kUnbounded = 1 << 30;

// Query q sees key k when q0 <= q < q1, k0 <= k < k1 and lo <= k - q <= hi.
struct Band {
    int q0, q1, k0, k1, lo, hi;
};

// The half-open interval [begin, end).
struct Range {
    int begin, end;
};

namespace detail {
JAXMAGI_HOST_DEVICE constexpr int smaller(int a, int b) {
    return a < b ? a : b;
}
JAXMAGI_HOST_DEVICE constexpr int larger(int a, int b) {
    return a > b ? a : b;
}
}  // namespace detail

JAXMAGI_HOST_DEVICE constexpr bool is_empty(Range range) {
    return range.begin >= range.end;
}

JAXMAGI_HOST_DEVICE constexpr Range intersect(Range a, Range b) {
    return {detail::larger(a.begin, b.begin), detail::smaller(a.end, b.end)};
}

// Returns the part of [0, length) that a tile of `size` covers.
JAXMAGI_HOST_DEVICE constexpr Range tile_range(int tile, int size, int length) {
    return intersect({tile * size, (tile + 1) * size}, {0, length});
}

JAXMAGI_HOST_DEVICE constexpr Band crop(Band band, Range rows, Range keys) {
    const Range q = intersect({band.q0, band.q1}, rows);
    const Range k = intersect({band.k0, band.k1}, keys);
    return {q.begin, q.end, k.begin, k.end, band.lo, band.hi};
}

// Returns the rows of a range that see at least one key; they are contiguous.
JAXMAGI_HOST_DEVICE constexpr Range visible_rows(Band band, Range rows) {
    rows = intersect(rows, {band.q0, band.q1});
    if (is_empty(rows) or band.k0 >= band.k1 or band.lo > band.hi)
        return {0, 0};
    // q >= k0 - hi and q < k1 - lo
    if (band.k0 - rows.begin > band.hi)
        rows.begin = band.k0 - band.hi;
    if (band.k1 - rows.end < band.lo)
        rows.end = band.k1 - band.lo;
    return is_empty(rows) ? Range{0, 0} : rows;
}

// Exchanges queries and keys.
JAXMAGI_HOST_DEVICE constexpr Band transposed(Band band) {
    return {band.k0, band.k1, band.q0, band.q1, -band.hi, -band.lo};
}

// Returns the keys of a range that at least one row sees; they are contiguous.
JAXMAGI_HOST_DEVICE constexpr Range visible_keys(Band band, Range keys) {
    return visible_rows(transposed(band), keys);
}

// Returns the keys that at least one row of a range sees; they are contiguous.
JAXMAGI_HOST_DEVICE constexpr Range keys_of_rows(Band band, Range rows) {
    rows = intersect(rows, {band.q0, band.q1});
    return is_empty(rows) ? Range{0, 0}
                          : visible_keys({rows.begin, rows.end, band.k0, band.k1, band.lo, band.hi}, {0, kUnbounded});
}

// Returns the rows that see at least one key of a range; they are contiguous.
JAXMAGI_HOST_DEVICE constexpr Range rows_of_keys(Band band, Range keys) {
    return visible_rows(crop(band, {0, kUnbounded}, keys), {0, kUnbounded});
}

// Returns the rows of a range that see a key of the band; there may be none.
JAXMAGI_HOST_DEVICE constexpr Range rows_of_key(Band band, int key, Range rows) {
    rows = intersect(rows, {band.q0, band.q1});
    if (key - rows.begin > band.hi)
        rows.begin = key - band.hi;
    if (key - rows.end < band.lo - 1)
        rows.end = key - band.lo + 1;
    return rows;
}

// Crops any band to [0, q_len) x [0, kv_len), and shrinks it to the rows and keys that have a visible cell. Returns all
// zeros if there are none.
JAXMAGI_HOST_DEVICE constexpr Band tighten(Band band, int q_len, int kv_len) {
    const Range rows{0, q_len}, keys{0, kv_len};
    band = crop(band, rows, keys);
    band.lo = detail::smaller(detail::larger(band.lo, -kUnbounded), kUnbounded);
    band.hi = detail::smaller(detail::larger(band.hi, -kUnbounded), kUnbounded);
    const Range q = visible_rows(band, rows);
    if (is_empty(q))
        return {};
    const Range k = visible_keys(band, keys);
    return {q.begin, q.end, k.begin, k.end, band.lo, band.hi};
}

// Returns whether every row of a range sees every key of a range.
JAXMAGI_HOST_DEVICE constexpr bool covers(Band band, Range rows, Range keys) {
    return band.q0 <= rows.begin and rows.end <= band.q1 and band.k0 <= keys.begin and keys.end <= band.k1 and
           band.lo <= keys.begin - (rows.end - 1) and keys.end - 1 - rows.begin <= band.hi;
}

}  // namespace jaxmagi
