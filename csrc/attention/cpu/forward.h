#pragma once

#include "csrc/attention/cpu/params.h"
#include "csrc/common/parallel.h"

namespace jaxmagi::cpu {

// Writes every element of out and lse. The results are bitwise equal for any number of threads.
//
// NaN and infinities in fully masked rows, and in keys and values that no row sees, change no result. NaN in a key
// reaches the rows that see it. NaN or an infinity in a value is multiplied by the zeros of masked cells: it reaches
// the outputs, not lse, of all rows in the tiles of kTileRows in which a row sees it, except rows with lse = -inf.
void attention_forward(const ForwardParams& params, const Scheduler& scheduler);

}  // namespace jaxmagi::cpu
