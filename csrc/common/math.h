#pragma once

#include "csrc/common/macros.h"

namespace jaxmagi {

template <typename Int> JAXMAGI_HOST_DEVICE constexpr Int ceil_div(Int x, int divisor) {
    return (x + divisor - 1) / divisor;
}

template <typename Int> JAXMAGI_HOST_DEVICE constexpr Int round_up(Int x, int multiple) {
    return ceil_div(x, multiple) * multiple;
}

}  // namespace jaxmagi
