#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/mask/band.h"

namespace jaxmagi {

namespace detail {

constexpr int64_t triangle(int64_t n) {
    return n > 0 ? n * (n + 1) / 2 : 0;
}

// Returns the number of cells with k - q <= limit. Row q has q + limit + 1 - k0 of them, clamped to [0, k1 - k0]; the
// clamped count is a difference of two ramps.
constexpr int64_t cells_up_to(const Band& band, int64_t limit) {
    const int64_t first = band.q0 + limit - band.k0, last = band.q1 + limit - band.k0, width = band.k1 - band.k0;
    return triangle(last) - triangle(first) - triangle(last - width) + triangle(first - width);
}

}  // namespace detail

// Returns the number of cells of a band. It is exact for lengths up to 2^30.
constexpr int64_t area(const Band& band) {
    if (band.q0 >= band.q1 or band.k0 >= band.k1 or band.lo > band.hi)
        return 0;
    const int64_t q0 = band.q0, q1 = band.q1, k0 = band.k0, k1 = band.k1;
    const int64_t up_to_hi = std::clamp<int64_t>(band.hi, k0 - q1, k1 - 1 - q0);
    const int64_t up_to_lo = std::clamp<int64_t>(band.lo, k0 - q1 + 1, k1 - q0) - 1;
    return detail::cells_up_to(band, up_to_hi) - detail::cells_up_to(band, up_to_lo);
}

}  // namespace jaxmagi
