#pragma once

// Programmatic dependent launch: a kernel that was launched with that attribute may begin before the kernel in front of
// it in the stream is complete.

namespace jaxmagi::sm90 {

// Lets the next kernel of the stream begin once all CTAs of this grid have called this or have ended.
__device__ __forceinline__ void launch_dependent_grids() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the kernels in front of this one are complete and their writes are visible.
__device__ __forceinline__ void wait_for_prior_grids() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace jaxmagi::sm90
