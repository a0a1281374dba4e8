#pragma once

#include "csrc/attention/cpu/params.h"
#include "csrc/common/parallel.h"

namespace jaxmagi::cpu {

// Writes every element of dq, dk and dv. Bitwise the same for any number of threads.
//
// NaN and infinities in rows with lse = -inf, and in keys and values that no row sees, reach nothing. Elsewhere what
// a product multiplies by the zeros of hidden cells spreads within tiles of kTileRows x kTileKeys: NaN in a key to
// the dq of all rows of a tile where one sees it; NaN in a query (to dk) or in its dout (to dv) to all keys that
// share a tile with one it sees. NaN in a value stays between the keys and the rows that see it.
void attention_backward(const BackwardParams& params, const Scheduler& scheduler);

}  // namespace jaxmagi::cpu
