#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "csrc/collectives/control_block.h"
#include "csrc/collectives/messages.h"
#include "csrc/common/macros.h"

// Parameters of the kernels of one transfer: a rank's part in one group cast or group reduce. A transfer moves rows of
// up to kMaxArrays arrays; rows are multiples of 16 bytes. A batch of independent transfers runs as one.
//
// A native peer is a rank that maps this rank's memory and is mapped by it: kernels load from it and store to it. Rows
// to and from all other ranks, the remote peers, travel by NCCL (remote_rows.h). Native peers are known by slots, their
// places among the ranks of the host (peers.h).

namespace jaxmagi::collectives {

struct ArrayParams {
    const char* from;
    char* to;
    int row_bytes;            // of the rows that travel
    int64_t incoming_offset;  // of a group reduce: where the rows from remote peers begin in `incoming`
};

enum class DType { kBF16, kF16, kF32, kF64 };

// A published address is a device address that is valid for all native peers, or this bit and an offset in the shared
// memory of its rank, which each peer maps at a different address.
constexpr uint64_t kIsOffset = uint64_t{1} << 63;

struct TransferParams {
    Kind kind;
    const char* host_name;  // on the device, for messages; null for none
    int rank, size;
    int slot, num_slots;
    const int16_t* slots;        // by rank, on the device; null where ranks are their own slots
    int ranks[kMaxNativeRanks];  // by slot
    uint64_t native;             // bit mask of the slots of this rank and its native peers
    const Send* sends;        // [batch, entries], sorted by peer, then slot; unused entries (length 0) are last
    const Receive* receives;  // [batch, entries], sorted by row; unused entries are last
    int batch, entries;
    int input_rows, output_rows, pair_rows;
    int input_stride;      // input rows from one transfer of the batch to the next
    int input_pitch;       // of a group cast without remote peers: widths of a row from one input row to the next
    int first_output_row;  // of a group cast: nothing is written to the output rows before it
    bool keeps_empty_sums;  // of a group reduce: nothing is written to rows that nobody has sums for
    int num_arrays;
    ArrayParams arrays[kMaxArrays];
    DType dtype, sum_dtype;        // of a group reduce: of the rows that travel, and of the sums (the same or kF32)
    char* incoming;                // of a group reduce: rows from remote peers, null if there are none
    const int64_t* incoming_rows;  // [batch, size], the first row in `incoming` of each remote peer

    uint64_t call_hash;              // equal on all ranks that make the same call
    int64_t call;                    // counts the calls of the group
    uint64_t published[kMaxArrays];  // addresses by which native peers access this rank's arrays
    ControlBlock* controls[kMaxNativeRanks];
    char* shared[kMaxNativeRanks];  // shared memory of this rank and each native peer, mapped on this device
    uint64_t timeout_ns;
    int num_sms;

    // Returns the bytes of one row of all arrays.
    JAXMAGI_HOST_DEVICE int64_t row_bytes() const {
        int64_t bytes = 0;
        for (int i = 0; i < num_arrays; ++i)
            bytes += arrays[i].row_bytes;
        return bytes;
    }
    // Returns where a published address of a rank is on this device.
    JAXMAGI_HOST_DEVICE uint64_t resolve(uint64_t published, int at_slot) const {
        return published & kIsOffset ? reinterpret_cast<uint64_t>(shared[at_slot]) + (published & ~kIsOffset)
                                     : published;
    }
    JAXMAGI_HOST_DEVICE bool is_native(int at_slot) const { return at_slot >= 0 and (native >> at_slot & 1); }
    JAXMAGI_HOST_DEVICE bool has_native_peers() const { return (native & ~(uint64_t{1} << slot)) != 0; }
#ifdef __CUDACC__
    // Returns the slot of a rank, or -1 if it has none.
    __device__ __forceinline__ int slot_of(int peer) const { return slots == nullptr ? peer : slots[peer]; }
#endif
};

// Group cast: stores rows to native peers, and zeros to output rows that nobody sends. When the kernel has ended, no
// native peer stores to this rank any more.
cudaError_t push_rows(const TransferParams& params, cudaStream_t stream);

// Group reduce: sums the rows of native peers and those in `incoming` into each input row, in the order of its sends.
// Input rows that nobody contributes to become zero, unless they are kept (keeps_empty_sums). When the kernel has
// ended, no native peer loads from this rank any more.
cudaError_t pull_sums(const TransferParams& params, cudaStream_t stream);

// Load the kernels, on each device before their first use.
cudaError_t preload_push();
cudaError_t preload_pull();

}  // namespace jaxmagi::collectives
