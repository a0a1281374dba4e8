#pragma once

#include <string>
#include <vector>

#include "csrc/attention/cpu/kernel_table.h"

namespace jaxmagi::cpu {

// Returns the kernels for operands of this type: those of the fastest instruction set that this machine has, or of the
// set that a test has chosen.
const KernelTable& kernel_table(DType operand);

// Returns the instruction sets that have kernels and that this machine has, fastest first.
std::vector<std::string> instruction_sets();

// Switches to the kernels of one of instruction_sets(), for tests.
void use_instruction_set(const std::string& name);

}  // namespace jaxmagi::cpu
