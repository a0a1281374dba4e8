#pragma once

#include "csrc/attention/cpu/kernel_table.h"
#include "csrc/attention/cpu/simd.h"
#include "csrc/common/math.h"

namespace jaxmagi::cpu::JAXMAGI_ISA {

// Allocates aligned arrays one after another in a workspace. Without a workspace it only adds up their sizes.
template <typename T> class WorkspaceAllocator {
public:
    explicit WorkspaceAllocator(void* base) : base_(static_cast<T*>(base)) {}

    T* allocate(int64_t count) {
        T* array = base_ ? base_ + used_ : nullptr;
        used_ += round_up(count, kWorkspaceAlignment / static_cast<int>(sizeof(T)));
        return array;
    }
    int64_t bytes() const { return used_ * static_cast<int64_t>(sizeof(T)); }

private:
    T* base_;
    int64_t used_ = 0;
};

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
