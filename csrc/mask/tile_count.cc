#include "csrc/mask/tile_count.h"

#include <algorithm>

#include "csrc/common/math.h"

namespace jaxmagi {
namespace {

// Returns the number of keys that all of the rows see.
int64_t keys_of_all(const Band& band, Range rows) {
    const int64_t begin = std::max<int64_t>(band.k0, int64_t{rows.end} - 1 + band.lo);
    const int64_t end = std::min<int64_t>(band.k1, int64_t{rows.begin} + band.hi + 1);
    return std::max<int64_t>(0, end - begin);
}

TileCount count_in_rows(const Band& band, Range tile, int keys) {
    const Range rows = intersect({band.q0, band.q1}, tile), visible = keys_of_rows(band, rows);
    const int64_t tiles = ceil_div(visible.end - visible.begin, keys);
    const bool has_all_rows = rows.begin == tile.begin and rows.end == tile.end;
    const int64_t full = has_all_rows ? keys_of_all(band, rows) / keys : 0;
    return {.full = full, .partial = tiles - full};
}

TileCount count_in_rectangle(const Band& band, int rows, int keys) {
    const int64_t touched = ceil_div(band.q1, rows) - band.q0 / rows;
    const int64_t full_rows = std::max(0, band.q1 / rows - ceil_div(band.q0, rows));
    const int64_t width = band.k1 - band.k0, full = full_rows * (width / keys);
    return {.full = full, .partial = touched * ceil_div(band.k1 - band.k0, keys) - full};
}

void add(TileCount& count, TileCount more) {
    count.full += more.full;
    count.partial += more.partial;
}

TileCount count_in_band(const Band& band, int rows, int keys) {
    if (band.q0 >= band.q1)
        return {};
    if (covers(band, {band.q0, band.q1}, {band.k0, band.k1}))
        return count_in_rectangle(band, rows, keys);
    TileCount count;
    for (int begin = band.q0 / rows * rows; begin < band.q1; begin += rows)
        add(count, count_in_rows(band, {begin, begin + rows}, keys));
    return count;
}

}  // namespace

TileCount count_tiles(std::span<const Band> bands, int rows, int keys, bool by_keys) {
    TileCount count;
    for (const Band& band : bands) {
        const Band tight = tighten(band, kUnbounded, kUnbounded);
        add(count, by_keys ? count_in_band(transposed(tight), keys, rows) : count_in_band(tight, rows, keys));
    }
    return count;
}

}  // namespace jaxmagi
