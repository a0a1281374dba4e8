#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace jaxmagi::planning {

// Raised where a mask is cut into more pieces than a plan can have.
struct TooManyPieces : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Throws TooManyPieces if `pieces` are too many; the message also names the ranges and runs that meet in them.
inline void check_pieces(int64_t pieces, int64_t ranges, int64_t runs) {
    constexpr int64_t kMostPieces = int64_t{1} << 22;
    if (pieces > kMostPieces)
        throw TooManyPieces("the layout's " + std::to_string(runs) + " runs of consecutive tokens cut " +
                            std::to_string(ranges) + " pieces of the mask into " + std::to_string(pieces) +
                            ", more than " + std::to_string(kMostPieces) + ": use longer runs (larger chunks).");
}

}  // namespace jaxmagi::planning
