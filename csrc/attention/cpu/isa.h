#pragma once

// The tile kernels are compiled once per instruction set, each time inside its own namespace JAXMAGI_ISA.
// They use no std:: templates and no other inline functions of external linkage: the linker keeps one copy of each
// for the whole module, which may hold instructions that the machine does not have.
#if not defined(JAXMAGI_ISA)
#error "compile with -DJAXMAGI_ISA=<name of the instruction set>"
#endif

namespace jaxmagi::cpu::JAXMAGI_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kBlockRows = 8;  // rows x 2 vectors of accumulators: 16 of 32 registers
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kBlockRows = 6;  // 12 of 16
#elif defined(__aarch64__)
inline constexpr int kVectorBytes = 16;
inline constexpr int kBlockRows = 8;  // 16 of 32
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kBlockRows = 4;  // 8 of 16: without FMA, products need registers of their own
#endif

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
