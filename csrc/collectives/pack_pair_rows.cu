#include <algorithm>

#include "csrc/collectives/launch.cuh"
#include "csrc/collectives/pair_headers.cuh"

// Copies rows between the output arrays and pair buffers, which NCCL moves between remote peers. A group cast unpacks
// `incoming` after NCCL, and a group reduce packs `outgoing` before it. CTA 0 also checks or writes the headers. Each
// warp takes one row of all arrays at a time.

namespace jaxmagi::collectives {
namespace {

constexpr int kThreads = 256, kMaxCtas = 1024, kRowsPerCta = kThreads / kWarp;

enum class Direction { kPack, kUnpack };

// Returns the index of the last used entry that begins at or before a row, or -1.
__device__ int last_at_most(const Receive* receives, int entries, int row) {
    int begin = 0, end = entries;
    while (begin < end) {
        const int middle = (begin + end) / 2;
        const bool is_before = receives[middle].length > 0 and receives[middle].row <= row;
        (is_before ? begin : end) = is_before ? middle + 1 : middle;
    }
    return begin - 1;
}

__device__ void copy_row(const char* from, char* to, int bytes) {
    for (int at = threadIdx.x % kWarp * 16; at < bytes; at += kWarp * 16)
        *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(from + at);
}

template <Direction kDirection>
__global__ void __launch_bounds__(kThreads) copy_pair_rows(const __grid_constant__ TransferParams params) {
    constexpr bool kIsPack = kDirection == Direction::kPack;
    __shared__ RowCounts rows;
    if (blockIdx.x == 0)
        (kIsPack ? write_headers<Receive> : check_headers<Receive>)(params, params.receives, rows);
    const int64_t num_rows = int64_t{params.batch} * params.output_rows;
    const int64_t first = int64_t{blockIdx.x} * kRowsPerCta + threadIdx.x / kWarp;
    for (int64_t i = first; i < num_rows; i += int64_t{gridDim.x} * kRowsPerCta) {
        const int index = static_cast<int>(i / params.output_rows);
        const int row = static_cast<int>(i % params.output_rows);
        const Receive* const receives = params.receives + int64_t{index} * params.entries;
        const int entry = last_at_most(receives, params.entries, row);
        if (entry < 0 or row - receives[entry].row >= receives[entry].length)
            continue;
        const Receive receive = receives[entry];
        check_fits(params, receive);
        if (params.is_native(receive.peer))
            continue;
        const int64_t slot = int64_t{index} * params.pair_rows + receive.slot + row - receive.row;
        for (int j = 0; j < params.num_arrays; ++j) {
            const ArrayParams& array = params.arrays[j];
            const int64_t in_part = array.pair_offset + slot * array.row_bytes;
            const int64_t in_buffer = receive.peer * params.pair_bytes + in_part, in_array = i * array.row_bytes;
            if constexpr (kIsPack)
                copy_row(array.from + in_array, params.outgoing + in_buffer, array.row_bytes);
            else
                copy_row(params.incoming + in_buffer, array.to + in_array, array.row_bytes);
        }
    }
}

template <Direction kDirection> cudaError_t launch_copy(const TransferParams& params, cudaStream_t stream) {
    const int64_t num_rows = int64_t{params.batch} * params.output_rows;
    const int ctas = static_cast<int>(std::min<int64_t>((num_rows + kRowsPerCta - 1) / kRowsPerCta, kMaxCtas));
    return launch(copy_pair_rows<kDirection>, ctas, kThreads, 0, stream, {}, params);
}

}  // namespace

cudaError_t unpack_rows(const TransferParams& params, cudaStream_t stream) {
    return launch_copy<Direction::kUnpack>(params, stream);
}

cudaError_t pack_rows(const TransferParams& params, cudaStream_t stream) {
    return launch_copy<Direction::kPack>(params, stream);
}

cudaError_t preload_pack() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, copy_pair_rows<Direction::kUnpack>);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, copy_pair_rows<Direction::kPack>) : error;
}

}  // namespace jaxmagi::collectives
