#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "csrc/collectives/control.h"
#include "csrc/common/macros.h"

// One group cast, or one group reduce, of a rank: what the kernels take. Rows of all arrays are multiples of 16 bytes.
//
// Pairs of ranks that do not reach each other's memory exchange pair buffers by NCCL: `size` parts of `pair_bytes`,
// each with a header and then [groups, pair_rows] rows of each array in turn.

namespace jaxmagi::collectives {

// Rows [row, row + length) of a rank go to `peer`, where they are the rows [peer_row, peer_row + length); in a pair
// buffer they have the slots [slot, slot + length).
struct Send {
    int peer, slot, row, length, peer_row;
};

// Rows [row, row + length) come from `peer`.
struct Receive {
    int peer, slot, row, length;
};

struct PairHeader {
    uint64_t call, rows;
};

struct Array {
    const char* from;
    char* to;
    int row_bytes;        // of what travels
    int64_t pair_offset;  // in a part of a pair buffer
};

enum class Number { kBF16, kF16, kF32, kF64 };

struct Transfer {
    int rank, size;
    uint64_t native;          // a bit for each rank whose memory is reached, the own one among them
    const Send* sends;        // [groups, entries], by peer, then slot; unused ones, of length 0, last
    const Receive* receives;  // [groups, entries], by row; unused ones last
    int groups, entries;
    int input_rows, output_rows, pair_rows;
    int num_arrays;
    Array arrays[kMaxArrays];
    Number number, sum_number;  // of a group reduce: what travels, and what is written, the same or kF32
    char *outgoing, *incoming;  // pair buffers, null if there are none
    int64_t pair_bytes;

    // Of native pairs.
    uint64_t call;                // the same on all ranks if they make the same call
    uint64_t places[kMaxArrays];  // where the peers find this rank's side of the arrays
    Control* controls[kMaxRanks];
    char* shared[kMaxRanks];  // see `Peers`
    uint64_t timeout_ns;
    int num_sms;

    // Of a row of all arrays.
    int64_t row_bytes() const {
        int64_t bytes = 0;
        for (int i = 0; i < num_arrays; ++i)
            bytes += arrays[i].row_bytes;
        return bytes;
    }
    JAXMAGI_HOST_DEVICE bool is_native(int peer) const { return peer < kMaxRanks and (native >> peer & 1); }
    JAXMAGI_HOST_DEVICE bool has_native_peers() const { return (native & ~(uint64_t{1} << rank)) != 0; }
};

// A place is an address that means the same to all who reach it, or one in what the rank that tells it shares with
// other processes, which every peer sees at an address of its own.
constexpr uint64_t kInShared = uint64_t{1} << 63;

// Rows to the native peers, and into `outgoing` for the others, and zeros to the output rows that nobody sends. It ends
// when no native peer stores here any more. `begun`, unless it is null, is recorded when all of the kernel has begun to
// run.
cudaError_t push_rows(const Transfer& transfer, cudaStream_t stream, cudaEvent_t begun);

// Writes the output rows that came by `incoming`.
cudaError_t fill_rows(const Transfer& transfer, cudaStream_t stream);

// Into `outgoing` what goes back to peers that are not native: of arrays [groups, output_rows].
cudaError_t pack_partials(const Transfer& transfer, cudaStream_t stream);

// Adds up what the native peers have and what came by `incoming` for each input row, in the order of its sends; zeros
// where nobody has anything. It ends when no native peer reads here any more. `begun` as above.
cudaError_t pull_sums(const Transfer& transfer, cudaStream_t stream, cudaEvent_t begun);

// Load the kernels, on each device before their first use.
cudaError_t preload_push();
cudaError_t preload_pair_rows();
cudaError_t preload_pull();

}  // namespace jaxmagi::collectives
