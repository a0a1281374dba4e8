#pragma once

#include <algorithm>
#include <numeric>

#include "csrc/collectives/barrier.cuh"

// The work of a grid: the input rows of a rank are cut into chunks of bytes, which warps take from a counter in the
// control block. The sends that a chunk meets make its segments: bytes of the chunk, and their address at one peer. All
// device functions are for a whole warp.

namespace jaxmagi::collectives {

// Bytes [begin, begin + bytes) of the input rows of one array and one transfer of the batch.
struct Chunk {
    int index, array;  // index in the batch
    int64_t begin;
    int bytes;
};

// Returns the byte of the chunk's array, if rows are dense, at which its transfer begins.
__device__ __forceinline__ int64_t transfer_begin(const TransferParams& params, const Chunk& chunk) {
    return int64_t{chunk.index} * params.input_stride * params.arrays[chunk.array].row_bytes;
}

// The order of chunks. Consecutive ones are `stride` apart, so that at any time warps work far from each other, and
// ranks start at different places: all links are busy.
struct ChunkSchedule {
    int chunk_bytes;
    int per_transfer, total;
    int first, stride;

    __device__ __forceinline__ Chunk operator()(const TransferParams& params, int i) const {
        const int chunk = static_cast<int>((int64_t{i} * stride + first) % total);
        int rest = chunk % per_transfer, array = 0;
        int64_t size = array_bytes(params, 0);
        for (; rest >= num_chunks(size); size = array_bytes(params, ++array))
            rest -= num_chunks(size);
        const int64_t begin = int64_t{rest} * chunk_bytes;
        return {chunk / per_transfer, array, begin, static_cast<int>(min(size - begin, int64_t{chunk_bytes}))};
    }

    // Returns the number of CTAs, each on an SM of its own, that have something to do.
    int num_ctas(const TransferParams& params, int warps) const {
        return std::min(params.num_sms, (total + warps - 1) / warps);
    }

    static JAXMAGI_HOST_DEVICE int64_t array_bytes(const TransferParams& params, int array) {
        return int64_t{params.input_rows} * params.arrays[array].row_bytes;
    }
    JAXMAGI_HOST_DEVICE int num_chunks(int64_t size) const {
        return static_cast<int>((size + chunk_bytes - 1) / chunk_bytes);
    }
};

// Cuts the input into at least four chunks per warp where it is large enough. A chunk is a multiple of `unit` bytes and
// at most `max_bytes`; the last one of an array may be shorter.
inline ChunkSchedule make_chunk_schedule(const TransferParams& params, int warps, int unit, int max_bytes) {
    const int64_t share = params.row_bytes() * params.input_rows * params.batch / (4 * params.num_sms * warps);
    ChunkSchedule chunks{};
    chunks.chunk_bytes = static_cast<int>(std::clamp<int64_t>(share / unit * unit, unit, max_bytes));
    for (int i = 0; i < params.num_arrays; ++i)
        chunks.per_transfer += chunks.num_chunks(chunks.array_bytes(params, i));
    chunks.total = chunks.per_transfer * params.batch;
    chunks.first = static_cast<int>(int64_t{chunks.total} * params.rank / params.size);
    chunks.stride = std::max(1, static_cast<int>(chunks.total * 0.618));
    while (std::gcd(chunks.stride, chunks.total) != 1)
        ++chunks.stride;
    return chunks;
}

// Bytes [begin, begin + bytes) of a chunk, and their address at a peer or among the rows that NCCL has brought.
struct Segment {
    char* remote;
    int begin, bytes;
};

constexpr int kMaxSegments = 256;

// Returns the address of a send's first row at a native peer, or of a remote one's in `incoming`. Null if there is
// none: rows of a group cast reach remote peers without this kernel.
__device__ __forceinline__ char* peer_row(const TransferParams& params, const CallState& call, const Chunk& chunk,
                                          const Send& send) {
    const ArrayParams& array = params.arrays[chunk.array];
    if (const int slot = params.slot_of(send.peer); params.is_native(slot)) {
        const int64_t row = int64_t{chunk.index} * params.output_rows + send.peer_row;
        return reinterpret_cast<char*>(call.addresses[slot][chunk.array]) + row * array.row_bytes;
    }
    if (params.incoming == nullptr)
        return nullptr;
    const int64_t row = params.incoming_rows[int64_t{chunk.index} * params.size + send.peer] + send.slot;
    return params.incoming + array.incoming_offset + row * array.row_bytes;
}

// Writes the first kMaxSegments segments of a chunk, in the order of the sends, and returns the number of all.
__device__ inline int find_segments(const TransferParams& params, const CallState& call, const Chunk& chunk,
                                    Segment* segments) {
    const int64_t row_bytes = params.arrays[chunk.array].row_bytes, chunk_end = chunk.begin + chunk.bytes;
    const Send* const sends = params.sends + int64_t{chunk.index} * params.entries;
    const int lane = threadIdx.x % kWarp;
    int count = 0;
    __syncwarp();  // no lane still reads the segments before
    for (int first = 0; first < params.entries; first += kWarp) {
        const int length = first + lane < params.entries ? sends[first + lane].length : 0;
        if (__all_sync(~0u, length <= 0))
            break;
        const int64_t row = length > 0 ? sends[first + lane].row : 0;
        const int64_t begin = max(row * row_bytes, chunk.begin), end = min((row + length) * row_bytes, chunk_end);
        char* remote = nullptr;
        if (length > 0 and begin < end) {
            const Send send = sends[first + lane];
            check_fits(params, send);
            remote = peer_row(params, call, chunk, send);
        }
        const unsigned all = __ballot_sync(~0u, remote != nullptr);
        const int place = count + __popc(all & ((1u << lane) - 1));
        if (remote != nullptr and place < kMaxSegments)
            segments[place] = {remote + (begin - row * row_bytes), static_cast<int>(begin - chunk.begin),
                               static_cast<int>(end - begin)};
        count += __popc(all);
    }
    __syncwarp();
    return count;
}

// Iterates over the chunks that a warp takes. A chunk with more than kMaxSegments segments is split; chunks with none
// are skipped. Together, the warps of a grid take each chunk once.
class ChunkIterator {
public:
    __device__ ChunkIterator(const TransferParams& params, const ChunkSchedule& schedule, const CallState& call,
                             Segment* segments)
        : params_(params), schedule_(schedule), call_(call), segments_(segments) {}

    // Goes to the next chunk and overwrites the segments of the one before. Returns false after the last one.
    __device__ bool next() {
        do {
            if (rest_ == 0 and not take_chunk())
                return false;
            split();
        } while (count_ == 0);
        return true;
    }
    __device__ const Chunk& chunk() const { return chunk_; }
    __device__ int num_segments() const { return count_; }
    __device__ const Segment& segment(int i) const { return segments_[i]; }

private:
    __device__ bool take_chunk() {
        int i = 0;
        if (threadIdx.x % kWarp == 0)
            i = atomicAdd(&params_.controls[params_.slot]->next_chunk, 1);
        i = __shfl_sync(~0u, i, 0);
        if (i >= schedule_.total)
            return false;
        chunk_ = schedule_(params_, i);
        rest_ = chunk_.bytes;
        chunk_.bytes = 0;
        return true;
    }

    // Goes on with as many of the remaining bytes as have few enough segments.
    __device__ void split() {
        chunk_.begin += chunk_.bytes;
        chunk_.bytes = rest_;
        while ((count_ = find_segments(params_, call_, chunk_, segments_)) > kMaxSegments) {
            if (chunk_.bytes == 16)
                abort_kernel("jaxmagi: rank %d sends a row to %d places, and the native kernels can to %d\n",
                             params_.rank, count_, kMaxSegments);
            chunk_.bytes = (chunk_.bytes / 2 + 15) / 16 * 16;
        }
        rest_ -= chunk_.bytes;
    }

    const TransferParams& params_;
    const ChunkSchedule& schedule_;
    const CallState& call_;
    Segment* const segments_;
    Chunk chunk_{};
    int rest_ = 0;  // bytes of the taken chunk after chunk_
    int count_ = 0;
};

}  // namespace jaxmagi::collectives
