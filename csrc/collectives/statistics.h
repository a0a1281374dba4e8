#pragma once

#include <cstdint>

// Counts what the transfers of this process have moved, for tests and for users who wonder.

namespace jaxmagi::collectives {

// Sums over the ranks of this process since it began. Bytes that a rank keeps for itself do not count.
struct Statistics {
    int64_t transfers;      // calls of a group cast or a group reduce, by rank
    int64_t native_bytes;   // that kernels stored to peers, or loaded from them
    int64_t nccl_bytes;     // of rows, sent over NCCL
    int64_t nccl_messages;  // sent over NCCL, headers not counted
    int64_t control_bytes;  // of headers, sent over NCCL
};

void count_transfer();
void count_native(int64_t bytes);
void count_nccl(int64_t messages, int64_t bytes, int64_t control_bytes);

// Returns what has been counted on the host; `statistics` in peers.h adds what kernels have counted.
Statistics counted_on_host();

}  // namespace jaxmagi::collectives
