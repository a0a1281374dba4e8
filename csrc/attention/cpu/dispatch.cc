#include "csrc/attention/cpu/dispatch.h"

#include <atomic>
#include <stdexcept>

namespace jaxmagi::cpu {

#define JAXMAGI_DECLARE_KERNELS(ISA)         \
    namespace ISA {                          \
    extern const KernelTable kFloatKernels;  \
    extern const KernelTable kDoubleKernels; \
    }

JAXMAGI_DECLARE_KERNELS(generic)
#if defined(JAXMAGI_X86_DISPATCH)
JAXMAGI_DECLARE_KERNELS(avx2)
JAXMAGI_DECLARE_KERNELS(avx512)
#endif

namespace {

struct KernelSet {
    const char* name;
    bool (*runs_here)();
    const KernelTable* float_kernels;
    const KernelTable* double_kernels;
};

// The sets, fastest first. cmake/JaxmagiCpu.cmake has the compiler flags of each.
constexpr KernelSet kKernelSets[] = {
#if defined(JAXMAGI_X86_DISPATCH)
    {"avx512",
     [] {
         return __builtin_cpu_supports("avx2") and __builtin_cpu_supports("fma") and
                __builtin_cpu_supports("avx512f") and __builtin_cpu_supports("avx512bw") and
                __builtin_cpu_supports("avx512dq") and __builtin_cpu_supports("avx512vl");
     },
     &avx512::kFloatKernels, &avx512::kDoubleKernels},
    {"avx2", [] { return __builtin_cpu_supports("avx2") and __builtin_cpu_supports("fma"); }, &avx2::kFloatKernels,
     &avx2::kDoubleKernels},
#endif
    {"generic", [] { return true; }, &generic::kFloatKernels, &generic::kDoubleKernels},
};

const KernelSet* fastest() {
    const KernelSet* set = kKernelSets;
    while (not set->runs_here())
        ++set;
    return set;
}

std::atomic<const KernelSet*>& chosen() {
    static std::atomic<const KernelSet*> set = fastest();
    return set;
}

}  // namespace

const KernelTable& kernel_table(DType operand) {
    const KernelSet& set = *chosen().load();
    return operand == DType::kF64 ? *set.double_kernels : *set.float_kernels;
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const KernelSet& set : kKernelSets)
        if (set.runs_here())
            names.emplace_back(set.name);
    return names;
}

void use_instruction_set(const std::string& name) {
    for (const KernelSet& set : kKernelSets)
        if (set.name == name and set.runs_here()) {
            chosen() = &set;
            return;
        }
    throw std::invalid_argument("instruction set " + name + " is unknown or does not run on this machine");
}

}  // namespace jaxmagi::cpu
