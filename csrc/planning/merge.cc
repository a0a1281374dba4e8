#include "csrc/planning/merge.h"

#include <algorithm>
#include <tuple>

#include "csrc/mask/area.h"

namespace jaxmagi::planning {
namespace {

// Returns the band with limits that are the exact hull of its k - q, as its ranges are of its rows and keys.
Band hull_of(const Band& band) {
    Band hull = tighten(band, kUnbounded, kUnbounded);
    hull.lo = std::max(hull.lo, hull.k0 - hull.q1 + 1);
    hull.hi = std::min(hull.hi, hull.k1 - 1 - hull.q0);
    return hull;
}

Band loosened(Band hull) {
    if (hull.lo <= hull.k0 - hull.q1 + 1)
        hull.lo = -kUnbounded;
    if (hull.hi >= hull.k1 - 1 - hull.q0)
        hull.hi = kUnbounded;
    return hull;
}

Band around(const Band& a, const Band& b) {
    return {std::min(a.q0, b.q0), std::max(a.q1, b.q1), std::min(a.k0, b.k0),
            std::max(a.k1, b.k1), std::min(a.lo, b.lo), std::max(a.hi, b.hi)};
}

bool is_exact(const Band& a, const Band& b) {
    return area(around(a, b)) == area(a) + area(b);
}

// Joins neighbours in the order of `key` for which `touch` returns that the second begins where the first ends.
template <typename Key, typename Touch> void join(std::vector<Band>& hulls, Key key, Touch touch) {
    std::ranges::stable_sort(hulls, {}, key);
    size_t last = 0;
    for (size_t i = 1; i < hulls.size(); ++i)
        if (touch(hulls[last], hulls[i]) and is_exact(hulls[last], hulls[i]))
            hulls[last] = around(hulls[last], hulls[i]);
        else
            hulls[++last] = hulls[i];
    if (not hulls.empty())
        hulls.resize(last + 1);
}

}  // namespace

std::vector<Band> merge(const std::vector<Band>& bands) {
    std::vector<Band> hulls;
    hulls.reserve(bands.size());
    for (const Band& band : bands)
        if (const Band hull = hull_of(band); hull.q0 < hull.q1)
            hulls.push_back(hull);
    const auto side_by_side = [](const Band& a, const Band& b) { return a.k1 == b.k0; };
    const auto above = [](const Band& a, const Band& b) { return a.q1 == b.q0; };
    for (size_t count = hulls.size() + 1; hulls.size() < count;) {
        count = hulls.size();
        join(hulls, [](const Band& band) { return std::tuple(band.q0, band.q1, band.k0); }, side_by_side);
        join(hulls, [](const Band& band) { return std::tuple(band.lo, band.hi, band.q0); }, above);
        join(hulls, [](const Band& band) { return std::tuple(band.k0, band.k1, band.q0); }, above);
    }
    std::ranges::sort(hulls, {}, [](const Band& band) {
        return std::tuple(band.q0, band.k0, band.q1, band.k1, band.lo, band.hi);
    });
    std::ranges::transform(hulls, hulls.begin(), loosened);
    return hulls;
}

}  // namespace jaxmagi::planning
