#pragma once

// Marks functions for host and device. On the host they are always inlined: files that are compiled once per
// instruction set must not leave out-of-line copies behind, since the linker would keep any one of them for the whole
// module.
#if defined(__CUDACC__)
#define JAXMAGI_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAXMAGI_HOST_DEVICE [[gnu::always_inline]] inline
#endif
