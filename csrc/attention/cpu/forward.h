#pragma once

#include "csrc/attention/cpu/params.h"
#include "csrc/common/parallel.h"

namespace jaxmagi::cpu {

// Writes every element of out and lse. Bitwise the same for any number of threads.
void attention_forward(const ForwardParams& params, const Scheduler& scheduler);

}  // namespace jaxmagi::cpu
