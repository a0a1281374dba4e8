#pragma once

#include <vector>

#include "csrc/mask/band.h"

namespace jaxmagi::planning {

// Returns fewer bands with the same cells (and counts), sorted by (q0, k0); empty bands are dropped, limits that
// restrict nothing are unbounded.
//
// Two bands side by side, or one above the other, become the smallest band around both where that has exactly as many
// cells as they have together. Bands that cover a cell twice stay as they are.
std::vector<Band> merge(const std::vector<Band>& bands);

}  // namespace jaxmagi::planning
