#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "csrc/collectives/segments.cuh"

// Sums of what several ranks have for each row. The first warp of a CTA, the loader, fetches its chunk piece by piece,
// for each piece what the peers have of it, in the order of the sends. The other warps, the adders, add up in registers
// and write each piece once.
//
// Schedule: kStages buffers in turn, a segment of a piece in each. A piece that nobody has a part of takes a buffer too,
// without bytes: its rows are zero.

namespace jaxmagi::collectives {
namespace {

constexpr int kPiece = 8192, kStages = 14, kMostChunkBytes = 64 * kPiece;
constexpr int kAdderWarps = 8, kAdders = kAdderWarps * kWarp, kVectorBytes = 16;
constexpr int kVectors = kPiece / kVectorBytes / kAdders;  // of an adder

// Bytes [begin, end) of a piece are in the buffer. After the last segment the sum is complete.
struct Item {
    char* sum;  // of the piece; null tells the adders to end
    int begin, end, piece_bytes;
    bool is_last;
};

struct Memory {
    alignas(128) char stages[kStages][kPiece];
    Segments segments;
    Meeting meeting;
    Item items[kStages];
    alignas(8) uint64_t full[kStages], empty[kStages];

    __device__ sm90::Mbarrier is_full(unsigned stage) { return {sm90::shared_address(&full[stage])}; }
    __device__ sm90::Mbarrier is_empty(unsigned stage) { return {sm90::shared_address(&empty[stage])}; }
};

// --- numbers ---

// A vector of what travels, as the numbers that are added.
template <typename Wire> struct Vector;

template <> struct Vector<__nv_bfloat16> {
    using Sum = float;
    static constexpr int kNumbers = 8;
    static __device__ void add(const uint4& x, float (&sum)[8]) {
        const uint32_t words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[2 * i] += __uint_as_float(words[i] << 16);
            sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
        }
    }
};

template <> struct Vector<__half> {
    using Sum = float;
    static constexpr int kNumbers = 8;
    static __device__ void add(const uint4& x, float (&sum)[8]) {
        const __half2* const halves = reinterpret_cast<const __half2*>(&x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = __half22float2(halves[i]);
            sum[2 * i] += two.x;
            sum[2 * i + 1] += two.y;
        }
    }
};

template <> struct Vector<float> {
    using Sum = float;
    static constexpr int kNumbers = 4;
    static __device__ void add(const uint4& x, float (&sum)[4]) {
        const float* const numbers = reinterpret_cast<const float*>(&x);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sum[i] += numbers[i];
    }
};

template <> struct Vector<double> {
    using Sum = double;
    static constexpr int kNumbers = 2;
    static __device__ void add(const uint4& x, double (&sum)[2]) {
        const double* const numbers = reinterpret_cast<const double*>(&x);
        sum[0] += numbers[0];
        sum[1] += numbers[1];
    }
};

template <typename To, typename From> __device__ __forceinline__ To rounded(From x) {
    if constexpr (std::is_same_v<To, __nv_bfloat16>)
        return __float2bfloat16_rn(x);
    else if constexpr (std::is_same_v<To, __half>)
        return __float2half_rn(x);
    else
        return x;
}

template <typename Result, typename Sum, int kNumbers>
__device__ __forceinline__ void write(char* to, const Sum (&sum)[kNumbers]) {
    struct alignas(16) Results {
        Result numbers[kNumbers];
    } results;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
        results.numbers[i] = rounded<Result>(sum[i]);
    *reinterpret_cast<Results*>(to) = results;
}

// --- the two roles ---

class Loader {
public:
    __device__ explicit Loader(Memory& memory) : memory_(memory) {}

    // `sum` is that of the chunk.
    __device__ void load(char* sum, int bytes, int num_segments, int widening) {
        for (int begin = 0; begin < bytes; begin += kPiece)
            load_piece(sum + int64_t{begin} * widening, begin, min(begin + kPiece, bytes), num_segments);
    }

    // Returns when the adders have taken everything.
    __device__ void end() {
        for (unsigned number = put_; number < put_ + kStages; ++number)
            wait_for_room(number);
        put({}, nullptr);
    }

private:
    // A segment is held back until the next one is found, for the last one is to be known.
    __device__ void load_piece(char* sum, int piece_begin, int piece_end, int num_segments) {
        Item held{.sum = sum, .piece_bytes = piece_end - piece_begin};
        const char* held_from = nullptr;
        for (int first = 0; first < num_segments; first += kWarp) {
            Segment segment{};
            if (first + lane_ < num_segments)
                segment = memory_.segments.list[first + lane_];
            const int begin = max(piece_begin, segment.begin), end = min(piece_end, segment.begin + segment.bytes);
            const char* const from = segment.remote + (begin - segment.begin);
            for (unsigned rest = __ballot_sync(~0u, begin < end); rest; rest &= rest - 1) {
                if (held_from)
                    put(held, held_from);
                const int lane = __ffs(rest) - 1;
                held.begin = __shfl_sync(~0u, begin, lane) - piece_begin;
                held.end = __shfl_sync(~0u, end, lane) - piece_begin;
                held_from = reinterpret_cast<const char*>(
                    __shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), lane));
            }
        }
        held.is_last = true;
        put(held, held_from);
    }

    __device__ void wait_for_room(unsigned number) {
        memory_.is_empty(number % kStages).wait((number / kStages & 1) ^ 1);
    }

    __device__ void put(const Item& item, const char* from) {
        wait_for_room(put_);
        const unsigned stage = put_++ % kStages;
        if (lane_ != 0)
            return;
        memory_.items[stage] = item;
        if (from == nullptr)
            return memory_.is_full(stage).arrive();
        memory_.is_full(stage).arrive_and_expect(item.end - item.begin);
        sm90::bulk_load(sm90::shared_address(memory_.stages[stage]) + item.begin, from, item.end - item.begin,
                        memory_.is_full(stage));
    }

    Memory& memory_;
    const int lane_ = threadIdx.x % kWarp;
    unsigned put_ = 0;
};

template <typename Wire, typename Result> __device__ void add_up(Memory& memory) {
    using Numbers = Vector<Wire>;
    const int adder = threadIdx.x - kWarp;
    typename Numbers::Sum sums[kVectors][Numbers::kNumbers] = {};
    for (unsigned taken = 0;; ++taken) {
        const unsigned stage = taken % kStages;
        memory.is_full(stage).wait(taken / kStages & 1);
        const Item item = memory.items[stage];
        if (item.sum == nullptr)
            return;
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            if (const int at = (adder + i * kAdders) * kVectorBytes; item.begin <= at and at < item.end)
                Numbers::add(*reinterpret_cast<const uint4*>(memory.stages[stage] + at), sums[i]);
        __syncwarp();
        if (threadIdx.x % kWarp == 0)
            memory.is_empty(stage).arrive();
        if (not item.is_last)
            continue;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            if (const int at = (adder + i * kAdders) * kVectorBytes; at < item.piece_bytes)
                write<Result>(item.sum + at * static_cast<int>(sizeof(Result) / sizeof(Wire)), sums[i]);
#pragma unroll
            for (auto& sum : sums[i])
                sum = 0;
        }
    }
}

template <typename Wire, typename Result>
__global__ void __launch_bounds__(kWarp + kAdders)
    pull(const __grid_constant__ Transfer transfer, const __grid_constant__ Chunks chunks) {
    extern __shared__ __align__(128) char shared[];
    Memory& memory = *reinterpret_cast<Memory*>(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            memory.is_full(i).init(1);
            memory.is_empty(i).init(kAdderWarps);
        }
        sm90::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= kWarp)
        return add_up<Wire, Result>(memory);
    constexpr int kWidening = sizeof(Result) / sizeof(Wire);
    Loader loader(memory);
    meet(transfer, memory.meeting);
    for (int number; (number = next_chunk(transfer)) < chunks.total;) {
        const Chunk chunk = chunks(transfer, number);
        const Array& array = transfer.arrays[chunk.array];
        char* const to = array.to + int64_t{chunk.group} * transfer.input_rows * array.row_bytes * kWidening;
        for_parts(transfer, memory.meeting, transfer.incoming, chunk, memory.segments,
                  [&](const Chunk& part, int count) {
                      loader.load(to + part.begin * kWidening, part.bytes, count, kWidening);
                  });
    }
    loader.end();
    leave(transfer, memory.meeting);
}

using Kernel = void (*)(Transfer, Chunks);

// In the order of `Number`: sums as they travel, and in float.
constexpr Kernel kPull[][2] = {{pull<__nv_bfloat16, __nv_bfloat16>, pull<__nv_bfloat16, float>},
                               {pull<__half, __half>, pull<__half, float>},
                               {pull<float, float>, pull<float, float>},
                               {pull<double, double>, nullptr}};

}  // namespace

cudaError_t pull_sums(const Transfer& transfer, cudaStream_t stream) {
    const Chunks chunks = cut_into_chunks(transfer, kPiece, kMostChunkBytes);
    const Kernel kernel = kPull[static_cast<int>(transfer.number)][transfer.sum_number != transfer.number];
    kernel<<<transfer.num_sms, kWarp + kAdders, sizeof(Memory), stream>>>(transfer, chunks);
    return cudaGetLastError();
}

cudaError_t preload_pull() {
    for (const auto& kernels : kPull)
        for (const Kernel kernel : kernels)
            if (kernel)
                if (const cudaError_t error =
                        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
                    error != cudaSuccess)
                    return error;
    return cudaSuccess;
}

}  // namespace jaxmagi::collectives
