#pragma once

#include "csrc/attention/cpu/params.h"
#include "csrc/common/parallel.h"

namespace jaxmagi::cpu {

// Writes every element of dq, dk and dv. The results are bitwise equal for any number of threads.
//
// NaN and infinities in rows with lse = -inf, and in keys and values that no row sees, change no result. Elsewhere
// products with the zeros of masked cells spread them within tiles of kTileRows x kTileKeys: NaN in a key reaches dq of
// all rows of a tile in which a row sees the key; NaN in a query (or its dout) reaches dk (or dv) of all keys that
// share a tile with a key that it sees. NaN in a value reaches only gradients of its key and of rows that see it.
void attention_backward(const BackwardParams& params, const Scheduler& scheduler);

}  // namespace jaxmagi::cpu
