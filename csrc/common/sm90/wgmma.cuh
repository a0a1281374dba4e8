#pragma once

#include <cstdint>

#include "csrc/common/sm90/element.cuh"
#include "csrc/common/sm90/shared.cuh"

// Asynchronous matrix products of a warpgroup: 64 x N += 64 x 16 · 16 x N, accumulators in registers.
//
// Thread t of the warpgroup holds rows 16 · (t / 32) + t % 32 / 4 + {0, 8}; of d[4i .. 4i + 3] the first two belong to
// the first row, the last two to the second, at columns 8i + 2 · (t % 4) + {0, 1}. As A operand from registers, the
// columns 16c .. 16c + 15 are pack(d[8c], d[8c + 1]), pack(d[8c + 2], d[8c + 3]), and so on: no shuffles.

namespace jaxmagi::sm90 {

using Descriptor = uint64_t;

// The descriptor of an operand in shared memory: panels of rows of 128 bytes (64 numbers) with 128-byte swizzle, as TMA
// writes them, that begin at multiples of 1024 bytes.
//   K-major (the inner dimension is summed over): a step of 16 is 32 bytes inside the panel; `panel_stride` is unused.
//   MN-major (rows are summed over; kTransposed): a step of 16 is 16 rows, 2048 bytes; panels along M or N are
//   `panel_stride` bytes apart.
struct SwizzledOperand {
    uint32_t low;  // the half of the descriptor with the address

    __device__ __forceinline__ SwizzledOperand(SharedAddress address, int panel_stride)
        : low((address & 0x3ffff) >> 4 | static_cast<uint32_t>(panel_stride >> 4) << 16) {}

    // Returns the descriptor of the part `offset` bytes further on; this is cheap for an offset known at compile time.
    __device__ __forceinline__ Descriptor at(int offset) const {
        constexpr uint32_t kSwizzle128B = 1, kEightRows = 8 * 128;
        return static_cast<uint64_t>(kEightRows >> 4 | kSwizzle128B << 30) << 32 | (low + (offset >> 4));
    }
};

// generate_wgmma.py writes its two members, which multiply one step of 16:
// mma<kTransposedA, kTransposedB>(d, descriptor a, descriptor b, accumulate)
// mma<kTransposedB>(d, registers a, descriptor b, accumulate)
template <typename Element, int kColumns> struct Wgmma;
#include "wgmma_shapes.inc"

// Orders register accesses with the products that follow. Called before the first product, and after ordinary code
// wrote accumulators or A registers.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Closes a group of the products issued since the last one.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `kPending` committed groups are unfinished.
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of accumulators across a fence or wait, to where wgmma still writes them: inline
// PTX does not say that it writes asynchronously. The empty asm changes each register as far as the compiler knows, and
// its memory clobber keeps it in place. A moved use would make ptxas serialize the products (warning C7510).
template <int kCount> __device__ __forceinline__ void fence_operand(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        asm volatile("" : "+f"(registers[i])::"memory");
}

}  // namespace jaxmagi::sm90
