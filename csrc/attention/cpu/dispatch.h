#pragma once

#include <string>
#include <vector>

#include "csrc/attention/cpu/kernel_table.h"

namespace jaxmagi::cpu {

// The kernels in use for operands of this type: the fastest that this machine runs, unless told otherwise.
const KernelTable& kernel_table(DType operand);

// The instruction sets with kernels that this machine runs, fastest first.
std::vector<std::string> instruction_sets();

// Switches to the kernels of one of instruction_sets(), so that tests reach them all.
void use_instruction_set(const std::string& name);

}  // namespace jaxmagi::cpu
