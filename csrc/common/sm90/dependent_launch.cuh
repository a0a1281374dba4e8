#pragma once

// Programmatic dependent launch: a kernel that was launched for it begins when all CTAs of the kernel before it in the
// stream have let it, or have ended.

namespace jaxmagi::sm90 {

__device__ __forceinline__ void let_next_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the kernel before is complete.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace jaxmagi::sm90
