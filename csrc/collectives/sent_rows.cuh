#pragma once

#include "csrc/collectives/checks.cuh"
#include "csrc/collectives/tables.h"

// Finds the input rows that some entry of `sends` has: a cast sends them, and a reduction gets sums for them.

namespace jaxmagi::collectives {

constexpr int kSentThreads = 256, kSentRows = 64;

// Says for each of the input rows [begin, end), at most kSentRows, whether an entry has it. For a CTA of kSentThreads.
__device__ inline void find_sent_rows(const Send* sends, int entries, int64_t begin, int64_t end,
                                      bool (&is_sent)[kSentRows]) {
    __syncthreads();  // no thread still reads the flags of the rows before
    for (unsigned i = threadIdx.x; i < kSentRows; i += kSentThreads)
        is_sent[i] = false;
    __syncthreads();
    for (int i = threadIdx.x; i < entries; i += kSentThreads) {
        const Send& send = sends[i];
        const int64_t last = min(end, int64_t{send.row} + send.length);
        for (int64_t row = max(begin, int64_t{send.row}); row < last; ++row)
            is_sent[row - begin] = true;
    }
    __syncthreads();
}

}  // namespace jaxmagi::collectives
