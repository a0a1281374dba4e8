#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "csrc/collectives/empty_sums.cuh"
#include "csrc/collectives/launch.cuh"
#include "csrc/collectives/segments.cuh"

// Sums of what several ranks have for each row. Each warp takes chunks of its own. It goes through a chunk piece by
// piece, for each piece through the segments that meet it, in the order of the sends: loads these from the peers into
// shared memory, adds them up in registers, and writes the piece once. Pieces that nobody has a part of are left to
// another kernel, which runs at the same time.
//
// Schedule of a warp: kStages buffers in turn, one for the part of a segment that is in a piece, an item. Loads are
// ahead of the additions by all buffers, from one chunk to the next as well.

namespace jaxmagi::collectives {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kPiece = 4096, kStages = 5, kMostChunkBytes = 32 * kPiece;
constexpr int kVectorBytes = 16, kVectors = kPiece / kVectorBytes / kWarp;  // of a lane

struct WarpMemory {
    alignas(128) char stages[kStages][kPiece];
    Segments segments;
    alignas(8) uint64_t arrived[kStages];
};

struct Memory {
    WarpMemory warps[kWarps];
    Meeting meeting;
};
static_assert(sizeof(Memory) <= kMostSharedBytes);

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
__device__ __forceinline__ void write_numbers(char* to, const Sum (&sum)[kNumbers]) {
    struct alignas(16) Results {
        Result numbers[kNumbers];
    } results;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
        results.numbers[i] = rounded<Result>(sum[i]);
    *reinterpret_cast<Results*>(to) = results;
}

// --- items ---

// Bytes [begin, end) of a piece as a peer has them, the piece's size, and where its sums belong.
struct Item {
    const char* from;
    char* to;
    int begin, end, bytes;
};

template <typename T> __device__ __forceinline__ T* shuffled(T* pointer, int lane) {
    return reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
}

// All items of the parts that a warp takes. For a whole warp.
class Items {
public:
    __device__ Items(const Transfer& transfer, const Parts& parts, int widening)
        : transfer_(transfer), widening_(widening), parts_(parts) {}

    // False after the last one.
    __device__ bool next(Item& item) {
        while (rest_ == 0)
            if (not advance())
                return false;
        const int lane = __ffs(rest_) - 1;
        rest_ &= rest_ - 1;
        item.to = to_ + int64_t{piece_} * widening_;
        item.bytes = min(kPiece, parts_.part().bytes - piece_);
        item.begin = __shfl_sync(~0u, begin_, lane);
        item.end = __shfl_sync(~0u, end_, lane);
        item.from = shuffled(from_, lane);
        return true;
    }

private:
    // To the next segments, one for each lane, of the piece, or of the next piece.
    __device__ bool advance() {
        first_ += kWarp;
        if (first_ >= parts_.num_segments()) {
            first_ = 0;
            piece_ += kPiece;
            if (piece_ >= parts_.part().bytes and not next_part())
                return false;
        }
        begin_ = end_ = 0;
        if (const int number = first_ + static_cast<int>(threadIdx.x % kWarp); number < parts_.num_segments()) {
            const Segment& segment = parts_.segment(number);
            const int begin = max(piece_, segment.begin);
            begin_ = begin - piece_;
            end_ = min(piece_ + kPiece, segment.begin + segment.bytes) - piece_;
            from_ = segment.remote + (begin - segment.begin);
        }
        rest_ = __ballot_sync(~0u, begin_ < end_);
        return true;
    }

    __device__ bool next_part() {
        if (not parts_.next())
            return false;
        const Chunk& part = parts_.part();
        to_ = transfer_.arrays[part.array].to + first_byte(transfer_, part) * widening_;
        piece_ = 0;
        return true;
    }

    const Transfer& transfer_;
    const int widening_;
    Parts parts_;
    char* to_ = nullptr;  // of the part
    int piece_ = 0, first_ = 0;
    unsigned rest_ = 0;
    int begin_ = 0, end_ = 0;  // of the lane's segment
    const char* from_ = nullptr;
};

// --- a warp ---

template <typename Wire, typename Result> class Adder {
public:
    static constexpr int kWidening = sizeof(Result) / sizeof(Wire);

    __device__ explicit Adder(WarpMemory& memory) : memory_(memory) {
        if (lane_ == 0)
            for (int i = 0; i < kStages; ++i)
                arrived(i).init(1);
        sm90::fence_mbarrier_init();
        __syncwarp();
    }

    __device__ void add_up(Items items) {
        Item in_buffer;  // of the lane's number
        bool are_more = true;
        const auto load_more = [&] {
            for (Item item; are_more and loaded_ - added_ < kStages;)
                if (are_more = items.next(item); are_more) {
                    if (lane_ == loaded_ % kStages)
                        in_buffer = item;
                    load(item);
                }
        };
        Sums sums = {};
        Item last{};
        for (load_more(); added_ != loaded_; load_more()) {
            const Item item = of_lane(in_buffer, added_ % kStages);
            if (item.to != last.to and last.to != nullptr)
                write(last, sums);
            last = item;
            add(item, sums);
        }
        if (last.to != nullptr)
            write(last, sums);
    }

private:
    using Numbers = Vector<Wire>;
    using Sums = typename Numbers::Sum[kVectors][Numbers::kNumbers];

    __device__ sm90::Mbarrier arrived(int stage) const { return {sm90::shared_address(&memory_.arrived[stage])}; }
    __device__ int place(int vector) const { return (vector * kWarp + static_cast<int>(lane_)) * kVectorBytes; }

    static __device__ Item of_lane(const Item& item, unsigned lane) {
        return {.from = nullptr,
                .to = shuffled(item.to, lane),
                .begin = __shfl_sync(~0u, item.begin, lane),
                .end = __shfl_sync(~0u, item.end, lane),
                .bytes = __shfl_sync(~0u, item.bytes, lane)};
    }

    __device__ void load(const Item& item) {
        const unsigned stage = loaded_++ % kStages;
        __syncwarp();  // all lanes have read the buffer
        if (lane_ == 0) {
            arrived(stage).arrive_and_expect(item.end - item.begin);
            sm90::bulk_load(sm90::shared_address(memory_.stages[stage]) + item.begin, item.from, item.end - item.begin,
                            arrived(stage));
        }
    }

    __device__ void add(const Item& item, Sums& sums) {
        const unsigned stage = added_ % kStages;
        arrived(stage).wait(added_ / kStages & 1);
        ++added_;
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            if (item.begin <= place(i) and place(i) < item.end)
                Numbers::add(*reinterpret_cast<const uint4*>(memory_.stages[stage] + place(i)), sums[i]);
    }

    // Sums of the item's piece. Leaves zeros.
    __device__ void write(const Item& item, Sums& sums) const {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            if (place(i) < item.bytes)
                write_numbers<Result>(item.to + place(i) * kWidening, sums[i]);
#pragma unroll
            for (auto& sum : sums[i])
                sum = 0;
        }
    }

    WarpMemory& memory_;
    const unsigned lane_ = threadIdx.x % kWarp;
    unsigned loaded_ = 0, added_ = 0;
};

template <typename Wire, typename Result>
__global__ void __launch_bounds__(kThreads, 1)
    pull(const __grid_constant__ Transfer transfer, const __grid_constant__ Chunks chunks) {
    extern __shared__ __align__(128) char shared[];
    Memory& memory = *reinterpret_cast<Memory*>(shared);
    WarpMemory& warp_memory = memory.warps[threadIdx.x / kWarp];
    Adder<Wire, Result> adder(warp_memory);
    meet(transfer, memory.meeting);
    if (blockIdx.x == 0)
        check_headers(transfer, transfer.sends, memory.meeting.rows);
    const Parts parts(transfer, chunks, memory.meeting, transfer.incoming, warp_memory.segments);
    adder.add_up(Items(transfer, parts, adder.kWidening));
    leave(transfer, memory.meeting);
    sm90::wait_for_prior_grids();  // what comes next finds the zeros, too
}

using Kernel = void (*)(Transfer, Chunks);

// In the order of `Number`: sums as they travel, and in float.
constexpr Kernel kPull[][2] = {{pull<__nv_bfloat16, __nv_bfloat16>, pull<__nv_bfloat16, float>},
                               {pull<__half, __half>, pull<__half, float>},
                               {pull<float, float>, nullptr},
                               {pull<double, double>, nullptr}};

}  // namespace

cudaError_t pull_sums(const Transfer& transfer, cudaStream_t stream, cudaEvent_t begun) {
    const Chunks chunks = cut_into_chunks(transfer, kWarps, kPiece, kMostChunkBytes);
    const bool is_widening = transfer.sum_number != transfer.number;
    if (const cudaError_t error = zero_empty_sums(transfer, is_widening ? 2 : 1, stream); error != cudaSuccess)
        return error;
    const Kernel kernel = kPull[static_cast<int>(transfer.number)][is_widening];
    const int ctas = chunks.num_ctas(transfer, kWarps);
    return launch(kernel, ctas, kThreads, sizeof(Memory), stream, {.event = begun, .overlaps = true}, transfer, chunks);
}

cudaError_t preload_pull() {
    for (const auto& kernels : kPull)
        for (const Kernel kernel : kernels)
            if (kernel)
                if (const cudaError_t error =
                        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
                    error != cudaSuccess)
                    return error;
    // As much shared memory as `pull` has, which could not begin beside it otherwise.
    return cudaFuncSetAttribute(zero_where_empty, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
}

}  // namespace jaxmagi::collectives
