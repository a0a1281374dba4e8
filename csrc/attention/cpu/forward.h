#pragma once

#include "csrc/attention/cpu/params.h"
#include "csrc/common/parallel.h"

namespace jaxmagi::cpu {

// Writes every element of out and lse. Bitwise the same for any number of threads.
//
// NaN and infinities in keys, values and queries that the mask joins with nothing reach nothing. NaN in a key reaches
// the rows that see it. NaN or an infinity in a value reaches the outputs of all rows in tiles of kTileRows where one
// row sees it, since it is multiplied by the others' zeros; not their lse, nor rows with lse = -inf.
void attention_forward(const ForwardParams& params, const Scheduler& scheduler);

}  // namespace jaxmagi::cpu
