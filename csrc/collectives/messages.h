#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "csrc/collectives/tables.h"

// The messages by which a rank exchanges rows with its remote peers: exactly the rows of each pair, and none where
// there are no rows. The two ranks of a pair list the same messages, although each has only its own table. Large ranges
// are messages of their own, so that the rows of a cast go from the input arrays straight into the output arrays. If
// ranges are small, rows that are consecutive in the output arrays share a message, or all rows of the pair do, and are
// staged in memory of their own where they are not consecutive in the rank's array.

namespace jaxmagi::collectives {

// Kinds of calls of a group. Products with a collective have no messages.
enum class Kind { kCast, kReduce, kMatmulReduceScatter, kAllGatherMatmul };

// Returns the name of a kind in messages.
constexpr const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::kCast: return "group_cast";
        case Kind::kReduce: return "group_reduce";
        case Kind::kMatmulReduceScatter: return "matmul_reduce_scatter";
        case Kind::kAllGatherMatmul: return "all_gather_matmul";
    }
    return "";
}

// A rank and the shape of its transfer, which is equal on all ranks.
struct TransferShape {
    int rank, size;
    int batch, entries;
    int input_rows, output_rows, pair_rows;
    int input_stride;  // input rows from one transfer of the batch to the next
};

// Rows that follow each other at this rank and among the output rows. Both count on through the batch.
struct RowRange {
    int64_t row, output_row, length;
};

// The rows that this rank sends to `peer`, or receives from it, in the order of the batch, then of slots.
struct Pair {
    int peer;
    int64_t rows;
    std::vector<RowRange> ranges;
};

using IsRemote = std::function<bool(int peer)>;

// Return the pairs of a rank with remote peers, by peer. Throw std::invalid_argument if an entry does not fit the
// shape, or slots have gaps.
std::vector<Pair> pairs_of(std::span<const Send> sends, const TransferShape& shape, const IsRemote& is_remote);
std::vector<Pair> pairs_of(std::span<const Receive> receives, const TransferShape& shape, const IsRemote& is_remote);

// Bytes from `offset` on of one of the rank's arrays, or of its staging memory.
struct Place {
    static constexpr int kStaging = -1;
    int array;
    int64_t offset;
};

struct Message {
    int peer;
    Place place;
    int64_t bytes;
};

// Bytes to be copied between an array and the staging memory.
struct StagedCopy {
    Place array, staging;
    int64_t bytes;
};

// The facts that two ranks compare before rows move between them.
struct PairHeader {
    uint64_t call_hash;
    int64_t call;  // counts the group's calls, so that a header never passes for that of another call
    uint64_t rows, range_hash;
    int source, destination;

    constexpr bool operator==(const PairHeader&) const = default;
};

// All that a rank sends to remote peers, or receives from them.
struct Traffic {
    std::vector<Message> messages;
    std::vector<StagedCopy> copies;  // of messages that are staged
    std::vector<PairHeader> headers;  // by peer
    int64_t staging_bytes = 0;
};

// A rank and the call that it makes.
struct Call {
    Kind kind;
    int rank;
    uint64_t hash;
    int64_t number;
};

enum class Direction { kOutgoing, kIncoming };

// Lists the messages of pairs, for arrays with rows of these bytes. Staging memory begins at `staging_offset`.
Traffic traffic_of(const Call& call, Direction direction, std::span<const Pair> pairs, std::span<const int> row_bytes,
                   int64_t staging_offset);

// Incoming rows of a reduction are all staged: by array, then in the order of pairs and their ranges. A kernel sums
// them there. Returns the first row of each peer and transfer of the batch, [batch, size], for the pairs of the sends.
std::vector<int64_t> staged_rows(std::span<const Pair> sent, const TransferShape& shape);

}  // namespace jaxmagi::collectives
