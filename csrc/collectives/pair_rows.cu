#include <algorithm>

#include "csrc/collectives/entries.cuh"
#include "csrc/collectives/launch.cuh"
#include "csrc/collectives/pair_headers.cuh"

// Between pair buffers and the rows that a rank receives in a group cast, or gives back in a group reduce. A warp has a
// row of all arrays.

namespace jaxmagi::collectives {
namespace {

constexpr int kThreads = 256, kMostCtas = 1024;

// The last used entry that begins at or before a row, -1 without one.
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

// What came, to the output rows.
struct Fill {
    static __device__ void header(const Transfer& transfer, RowCounts& rows) {
        check_headers(transfer, transfer.receives, rows);
    }
    static __device__ void row(const Array& array, const Transfer& transfer, int64_t in_pairs, int64_t row) {
        copy_row(transfer.incoming + in_pairs, array.to + row * array.row_bytes, array.row_bytes);
    }
};

// What goes back, from the output rows.
struct Pack {
    static __device__ void header(const Transfer& transfer, RowCounts& rows) {
        write_headers(transfer, transfer.receives, rows);
    }
    static __device__ void row(const Array& array, const Transfer& transfer, int64_t in_pairs, int64_t row) {
        copy_row(array.from + row * array.row_bytes, transfer.outgoing + in_pairs, array.row_bytes);
    }
};

template <typename Action>
__global__ void __launch_bounds__(kThreads) for_rows(const __grid_constant__ Transfer transfer) {
    __shared__ RowCounts rows;
    if (blockIdx.x == 0)
        Action::header(transfer, rows);
    const int64_t num_rows = int64_t{transfer.groups} * transfer.output_rows;
    const int64_t first = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
    for (int64_t number = first; number < num_rows; number += int64_t{gridDim.x} * (kThreads / kWarp)) {
        const int group = static_cast<int>(number / transfer.output_rows);
        const int row = static_cast<int>(number % transfer.output_rows);
        const Receive* const receives = transfer.receives + int64_t{group} * transfer.entries;
        const int entry = last_at_most(receives, transfer.entries, row);
        if (entry < 0 or row - receives[entry].row >= receives[entry].length)
            continue;
        const Receive receive = receives[entry];
        check(transfer, receive);
        if (transfer.is_native(receive.peer))
            continue;
        const int64_t slot = int64_t{group} * transfer.pair_rows + receive.slot + row - receive.row;
        for (int i = 0; i < transfer.num_arrays; ++i) {
            const Array& array = transfer.arrays[i];
            const int64_t in_part = array.pair_offset + slot * array.row_bytes;
            Action::row(array, transfer, receive.peer * transfer.pair_bytes + in_part, number);
        }
    }
}

template <typename Action> cudaError_t launch_for_rows(const Transfer& transfer, cudaStream_t stream) {
    constexpr int kRows = kThreads / kWarp;
    const int64_t num_rows = int64_t{transfer.groups} * transfer.output_rows;
    const int ctas = static_cast<int>(std::min<int64_t>((num_rows + kRows - 1) / kRows, kMostCtas));
    return launch(for_rows<Action>, ctas, kThreads, 0, stream, {}, transfer);
}

}  // namespace

cudaError_t fill_rows(const Transfer& transfer, cudaStream_t stream) {
    return launch_for_rows<Fill>(transfer, stream);
}

cudaError_t pack_partials(const Transfer& transfer, cudaStream_t stream) {
    return launch_for_rows<Pack>(transfer, stream);
}

cudaError_t preload_pair_rows() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, for_rows<Fill>);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, for_rows<Pack>) : error;
}

}  // namespace jaxmagi::collectives
