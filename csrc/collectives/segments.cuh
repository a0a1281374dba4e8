#pragma once

#include <algorithm>
#include <numeric>

#include "csrc/collectives/entries.cuh"
#include "csrc/collectives/pair_headers.cuh"
#include "csrc/collectives/rendezvous.cuh"

// How the input rows of a rank are cut into chunks, which warps take one after the other, and what a chunk's bytes have
// to do with which peer's memory. All functions are for a whole warp.

namespace jaxmagi::collectives {

// Bytes [begin, begin + bytes) of an array's rows, of one of the groups.
struct Chunk {
    int group, array;
    int64_t begin;
    int bytes;
};

// The byte of its array where a chunk begins.
__device__ __forceinline__ int64_t first_byte(const Transfer& transfer, const Chunk& chunk) {
    return int64_t{chunk.group} * transfer.input_rows * transfer.arrays[chunk.array].row_bytes + chunk.begin;
}

// What a grid has to do. Chunks are taken in steps of `stride`, from `first` on: at any time warps work in places that
// are far apart, and ranks in different ones, so that all links are busy.
struct Chunks {
    int chunk_bytes;
    int of_group, total;
    int first, stride;

    __device__ __forceinline__ Chunk operator()(const Transfer& transfer, int number) const {
        const int index = static_cast<int>((int64_t{number} * stride + first) % total);
        int rest = index % of_group, array = 0;
        int64_t size = size_of(transfer, 0);
        for (; rest >= num_chunks(size); size = size_of(transfer, ++array))
            rest -= num_chunks(size);
        const int64_t begin = int64_t{rest} * chunk_bytes;
        return {index / of_group, array, begin, static_cast<int>(min(size - begin, int64_t{chunk_bytes}))};
    }

    int num_ctas(const Transfer& transfer, int warps) const {
        return std::min(transfer.num_sms, (total + warps - 1) / warps);
    }

private:
    static __device__ __forceinline__ int64_t size_of(const Transfer& transfer, int array) {
        return int64_t{transfer.input_rows} * transfer.arrays[array].row_bytes;
    }
    __device__ __forceinline__ int num_chunks(int64_t size) const {
        return static_cast<int>((size + chunk_bytes - 1) / chunk_bytes);
    }
};

// Four chunks for each warp at least, of whole units where that leaves more than one for it.
inline Chunks cut_into_chunks(const Transfer& transfer, int warps, int unit, int most_bytes) {
    const int64_t share = transfer.row_bytes() * transfer.input_rows * transfer.groups / (4 * transfer.num_sms * warps);
    Chunks chunks{};
    chunks.chunk_bytes = static_cast<int>(std::clamp<int64_t>(share / unit * unit, unit, most_bytes));
    for (int i = 0; i < transfer.num_arrays; ++i) {
        const int64_t size = int64_t{transfer.input_rows} * transfer.arrays[i].row_bytes;
        chunks.of_group += static_cast<int>((size + chunks.chunk_bytes - 1) / chunks.chunk_bytes);
    }
    chunks.total = chunks.of_group * transfer.groups;
    chunks.first = static_cast<int>(int64_t{chunks.total} * transfer.rank / transfer.size);
    chunks.stride = std::max(1, static_cast<int>(chunks.total * 0.618));
    while (std::gcd(chunks.stride, chunks.total) != 1)
        ++chunks.stride;
    return chunks;
}

// Bytes [begin, begin + bytes) of a chunk, and where they are at a peer.
struct Segment {
    char* remote;
    int begin, bytes;
};

constexpr int kMaxSegments = 256;

struct Segments {
    Segment list[kMaxSegments];
};

// The byte where a send's first row is at its peer.
__device__ __forceinline__ char* remote_row(const Transfer& transfer, const Meeting& meeting, char* pair_buffer,
                                            const Chunk& chunk, const Send& send) {
    const Array& array = transfer.arrays[chunk.array];
    if (transfer.is_native(send.peer)) {
        const int64_t row = int64_t{chunk.group} * transfer.output_rows + send.peer_row;
        return reinterpret_cast<char*>(meeting.addresses[send.peer][chunk.array]) + row * array.row_bytes;
    }
    const int64_t slot = int64_t{chunk.group} * transfer.pair_rows + send.slot;
    return pair_buffer + send.peer * transfer.pair_bytes + array.pair_offset + slot * array.row_bytes;
}

// The segments of a chunk in the order of the sends, and how many they are; only the first kMaxSegments are written.
__device__ inline int find_segments(const Transfer& transfer, const Meeting& meeting, char* pair_buffer,
                                    const Chunk& chunk, Segments& found) {
    const int64_t row_bytes = transfer.arrays[chunk.array].row_bytes, chunk_end = chunk.begin + chunk.bytes;
    const Send* const sends = transfer.sends + int64_t{chunk.group} * transfer.entries;
    const int lane = threadIdx.x % kWarp;
    int count = 0;
    __syncwarp();  // what was found before is not read any more
    for (int first = 0; first < transfer.entries; first += kWarp) {
        const int length = first + lane < transfer.entries ? sends[first + lane].length : 0;
        if (__all_sync(~0u, length <= 0))
            break;
        const int64_t row = length > 0 ? sends[first + lane].row : 0;
        const int64_t begin = max(row * row_bytes, chunk.begin), end = min((row + length) * row_bytes, chunk_end);
        const bool meets = length > 0 and begin < end;
        const unsigned all = __ballot_sync(~0u, meets);
        const int place = count + __popc(all & ((1u << lane) - 1));
        if (meets and place < kMaxSegments) {
            const Send send = sends[first + lane];
            check(transfer, send);
            found.list[place] = {remote_row(transfer, meeting, pair_buffer, chunk, send) + (begin - row * row_bytes),
                                 static_cast<int>(begin - chunk.begin), static_cast<int>(end - begin)};
        }
        count += __popc(all);
    }
    __syncwarp();
    return count;
}

// The chunks that a warp takes, one after the other, cut into parts with few enough segments each; parts with none are
// left out. Together, the warps of a grid take each chunk once.
class Parts {
public:
    __device__ Parts(const Transfer& transfer, const Chunks& chunks, const Meeting& meeting, char* pair_buffer,
                     Segments& segments)
        : transfer_(transfer), chunks_(chunks), meeting_(meeting), pair_buffer_(pair_buffer), segments_(segments) {}

    // False after the last one. Overwrites the segments of the one before.
    __device__ bool next() {
        do {
            if (rest_ == 0 and not next_chunk())
                return false;
            cut();
        } while (count_ == 0);
        return true;
    }
    __device__ const Chunk& part() const { return part_; }
    __device__ int num_segments() const { return count_; }
    __device__ const Segment& segment(int i) const { return segments_.list[i]; }

private:
    __device__ bool next_chunk() {
        int number = 0;
        if (threadIdx.x % kWarp == 0)
            number = atomicAdd(&transfer_.controls[transfer_.rank]->next_chunk, 1);
        number = __shfl_sync(~0u, number, 0);
        if (number >= chunks_.total)
            return false;
        part_ = chunks_(transfer_, number);
        rest_ = part_.bytes;
        part_.bytes = 0;
        return true;
    }

    // As much of the rest as has few enough segments.
    __device__ void cut() {
        part_.begin += part_.bytes;
        part_.bytes = rest_;
        while ((count_ = find_segments(transfer_, meeting_, pair_buffer_, part_, segments_)) > kMaxSegments) {
            if (part_.bytes == 16)
                stop("jaxmagi: rank %d sends a row to %d places, and the native kernels can to %d\n", transfer_.rank,
                     count_, kMaxSegments);
            part_.bytes = (part_.bytes / 2 + 15) / 16 * 16;
        }
        rest_ -= part_.bytes;
    }

    const Transfer& transfer_;
    const Chunks& chunks_;
    const Meeting& meeting_;
    char* const pair_buffer_;
    Segments& segments_;
    Chunk part_{};
    int rest_ = 0;  // bytes of the chunk behind the part
    int count_ = 0;
};

}  // namespace jaxmagi::collectives
