#pragma once

#include "csrc/common/macros.h"

// 16-bit matrices lie in shared memory in panels of 64 columns, whose rows are 128 bytes with 128-byte swizzle.

namespace jaxmagi::sm90 {

inline constexpr int kElementBytes = 2, kPanelColumns = 64, kPanelRowBytes = kPanelColumns * kElementBytes;

// Returns the number of panels of a matrix.
JAXMAGI_HOST_DEVICE constexpr int panels(int columns) {
    return (columns + kPanelColumns - 1) / kPanelColumns;
}

}  // namespace jaxmagi::sm90
