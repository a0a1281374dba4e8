#pragma once

#include <cstdio>

namespace jaxmagi::collectives {

// Says why, and ends the program with an error. Out of line, as calls of printf take registers.
template <typename... Args> [[noreturn]] __device__ __noinline__ void stop(const char* format, Args... args) {
    printf(format, args...);
    __trap();
    __builtin_unreachable();
}

}  // namespace jaxmagi::collectives
