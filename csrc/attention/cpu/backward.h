#pragma once

#include "csrc/attention/cpu/params.h"
#include "csrc/common/parallel.h"

namespace jaxmagi::cpu {

// Writes every element of dq, dk and dv. Bitwise the same for any number of threads.
void attention_backward(const BackwardParams& params, const Scheduler& scheduler);

}  // namespace jaxmagi::cpu
