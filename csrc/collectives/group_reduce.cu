#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "csrc/collectives/launch.cuh"
#include "csrc/collectives/shared_storage.cuh"
#include "csrc/collectives/zero_fill_sums.cuh"
#include "csrc/common/sm90/element.cuh"

// Group reduce: each rank pulls the rows that native peers have for its input rows, and those that NCCL has brought
// from remote peers, and sums them.
//
// Protocol: after the barrier at the start, which tells each rank where its peers' partial sums are, each warp takes
// chunks of input rows. It goes through a chunk piece by piece. For each piece it loads the segments that meet it from
// the peers into shared memory, in the order of the sends, adds them in registers, and writes the sums once. Pieces
// without segments are left to the zero-fill kernel, which runs at the same time, or keep what they have. The barrier at
// the end says that no peer loads from this rank any more.
//
// Pipeline of a warp: a ring of kStages buffers, one for the part of a segment that is in a piece, called a
// contribution. Loads run ahead of additions by all buffers, also from one chunk to the next.

namespace jaxmagi::collectives {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kPiece = 4096, kStages = 5, kMaxChunkBytes = 32 * kPiece;
constexpr int kVectorBytes = 16, kVectors = kPiece / kVectorBytes / kWarp;  // per lane

using Storage = SharedStorage<kWarps, kStages, kPiece>;
static_assert(sizeof(Storage) <= Storage::kMaxBytes);
using PullStorage = WarpStorage<kStages, kPiece>;

// --- vectors of 16 bytes ---

// Adds a vector of numbers of type T to sums of the same type.
template <typename T> struct Vector {
    using Sum = T;
    static constexpr int kNumbers = kVectorBytes / sizeof(T);
    static __device__ void add(const uint4& x, T (&sum)[kNumbers]) {
        const T* const numbers = reinterpret_cast<const T*>(&x);
#pragma unroll
        for (int i = 0; i < kNumbers; ++i)
            sum[i] += numbers[i];
    }
};

// Adds a vector of 16-bit numbers to sums in float.
template <typename Element> struct Vector16 {
    using Sum = float;
    static constexpr int kNumbers = 8;
    static __device__ void add(const uint4& x, float (&sum)[8]) {
        const uint32_t words[] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 two = Element::unpack(words[i]);
            sum[2 * i] += two.x;
            sum[2 * i + 1] += two.y;
        }
    }
};
template <> struct Vector<__nv_bfloat16> : Vector16<sm90::BFloat16> {};
template <> struct Vector<__half> : Vector16<sm90::Float16> {};

// Rounds sums to the type of the result, to nearest.
template <typename Result, typename Sum, int kNumbers>
__device__ __forceinline__ void write_numbers(char* to, const Sum (&sum)[kNumbers]) {
    struct alignas(16) Results {
        Result numbers[kNumbers];
    } results;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i)
        results.numbers[i] = static_cast<Result>(sum[i]);
    *reinterpret_cast<Results*>(to) = results;
}

// --- contributions ---

// Bytes [begin, end) of a piece at one peer, the size of the piece, and the address of its sums.
struct Contribution {
    const char* from;
    char* to;
    int begin, end, bytes;
};

template <typename T> __device__ __forceinline__ T* shuffled(T* pointer, int lane) {
    return reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
}

// Iterates over all contributions to the chunks that a warp takes. For a whole warp.
class ContributionIterator {
public:
    __device__ ContributionIterator(const TransferParams& params, const ChunkIterator& chunks, int widening)
        : params_(params), widening_(widening), chunks_(chunks) {}

    // Returns false after the last one.
    __device__ bool next(Contribution& next) {
        while (rest_ == 0)
            if (not advance())
                return false;
        const int lane = __ffs(rest_) - 1;
        rest_ &= rest_ - 1;
        next.to = to_ + int64_t{piece_} * widening_;
        next.bytes = min(kPiece, chunks_.chunk().bytes - piece_);
        next.begin = __shfl_sync(~0u, begin_, lane);
        next.end = __shfl_sync(~0u, end_, lane);
        next.from = shuffled(from_, lane);
        return true;
    }

private:
    // Gives each lane one of the next segments of the piece, or of the next piece.
    __device__ bool advance() {
        first_ += kWarp;
        if (first_ >= chunks_.num_segments()) {
            first_ = 0;
            piece_ += kPiece;
            if (piece_ >= chunks_.chunk().bytes and not next_chunk())
                return false;
        }
        begin_ = end_ = 0;
        if (const int i = first_ + static_cast<int>(threadIdx.x % kWarp); i < chunks_.num_segments()) {
            const Segment& segment = chunks_.segment(i);
            const int begin = max(piece_, segment.begin);
            begin_ = begin - piece_;
            end_ = min(piece_ + kPiece, segment.begin + segment.bytes) - piece_;
            from_ = segment.remote + (begin - segment.begin);
        }
        rest_ = __ballot_sync(~0u, begin_ < end_);
        return true;
    }

    __device__ bool next_chunk() {
        if (not chunks_.next())
            return false;
        const Chunk& chunk = chunks_.chunk();
        to_ = params_.arrays[chunk.array].to + (transfer_begin(params_, chunk) + chunk.begin) * widening_;
        piece_ = 0;
        return true;
    }

    const TransferParams& params_;
    const int widening_;
    ChunkIterator chunks_;
    char* to_ = nullptr;         // sums of the chunk
    int piece_ = 0, first_ = 0;  // first byte of the piece, and segment of lane 0
    unsigned rest_ = 0;          // lanes whose segments are still to come
    int begin_ = 0, end_ = 0;    // of the lane's segment in the piece
    const char* from_ = nullptr;
};

// --- a warp ---

template <typename Wire, typename Result> class Adder {
public:
    static constexpr int kWidening = sizeof(Result) / sizeof(Wire);

    __device__ explicit Adder(PullStorage& storage) : storage_(storage) { storage.init_barriers(); }

    __device__ void add_all(ContributionIterator contributions) {
        Contribution in_stage;  // lane i keeps the contribution in stage i
        bool has_more = true;
        const auto load_ahead = [&] {
            for (Contribution next; has_more and loaded_ - added_ < kStages;)
                if (has_more = contributions.next(next); has_more) {
                    if (lane_ == loaded_ % kStages)
                        in_stage = next;
                    load(next);
                }
        };
        Sums sums = {};
        Contribution last{};
        for (load_ahead(); added_ != loaded_; load_ahead()) {
            const Contribution current = of_lane(in_stage, added_ % kStages);
            if (current.to != last.to and last.to != nullptr)
                write(last, sums);
            last = current;
            add(current, sums);
        }
        if (last.to != nullptr)
            write(last, sums);
    }

private:
    using Numbers = Vector<Wire>;
    using Sums = typename Numbers::Sum[kVectors][Numbers::kNumbers];

    __device__ int place(int vector) const { return (vector * kWarp + static_cast<int>(lane_)) * kVectorBytes; }

    static __device__ Contribution of_lane(const Contribution& in_stage, unsigned lane) {
        return {.from = nullptr,
                .to = shuffled(in_stage.to, lane),
                .begin = __shfl_sync(~0u, in_stage.begin, lane),
                .end = __shfl_sync(~0u, in_stage.end, lane),
                .bytes = __shfl_sync(~0u, in_stage.bytes, lane)};
    }

    __device__ void load(const Contribution& next) {
        const unsigned n = loaded_++;
        __syncwarp();  // all lanes have read the buffer
        if (lane_ == 0)
            storage_.load(n, next.begin, next.from, next.end - next.begin);
    }

    __device__ void add(const Contribution& current, Sums& sums) {
        const unsigned stage = added_ % kStages;
        storage_.wait(added_++);
#pragma unroll
        for (int i = 0; i < kVectors; ++i)
            if (current.begin <= place(i) and place(i) < current.end)
                Numbers::add(*reinterpret_cast<const uint4*>(storage_.stages[stage] + place(i)), sums[i]);
    }

    // Writes the sums of a piece and resets them to zero.
    __device__ void write(const Contribution& last, Sums& sums) const {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            if (place(i) < last.bytes)
                write_numbers<Result>(last.to + place(i) * kWidening, sums[i]);
#pragma unroll
            for (auto& sum : sums[i])
                sum = 0;
        }
    }

    PullStorage& storage_;
    const unsigned lane_ = threadIdx.x % kWarp;
    unsigned loaded_ = 0, added_ = 0;
};

template <typename Wire, typename Result>
__global__ void __launch_bounds__(kThreads, 1)
    pull(const __grid_constant__ TransferParams params, const __grid_constant__ ChunkSchedule schedule) {
    extern __shared__ __align__(128) char shared[];
    Storage& storage = *reinterpret_cast<Storage*>(shared);
    PullStorage& warp_storage = storage.warps[threadIdx.x / kWarp];
    Adder<Wire, Result> adder(warp_storage);
    barrier_at_start(params, storage.call);
    const ChunkIterator chunks(params, schedule, storage.call, warp_storage.segments);
    adder.add_all(ContributionIterator(params, chunks, adder.kWidening));
    barrier_at_end(params, storage.call);
    sm90::wait_for_prior_grids();  // the end of this kernel then also means that the zeros are written
}

using Kernel = void (*)(TransferParams, ChunkSchedule);

// Kernels by DType: with sums of the same type, and in float.
constexpr Kernel kPull[][2] = {{pull<__nv_bfloat16, __nv_bfloat16>, pull<__nv_bfloat16, float>},
                               {pull<__half, __half>, pull<__half, float>},
                               {pull<float, float>, pull<float, float>},
                               {pull<double, double>, pull<double, double>}};

}  // namespace

cudaError_t pull_sums(const TransferParams& params, cudaStream_t stream) {
    const bool is_widening = params.sum_dtype != params.dtype;
    const bool has_zeros = not params.keeps_empty_sums;
    if (has_zeros)
        if (const cudaError_t error = launch_zero_empty_sums(params, is_widening ? 2 : 1, stream); error != cudaSuccess)
            return error;
    const ChunkSchedule schedule = make_chunk_schedule(params, kWarps, kPiece, kMaxChunkBytes);
    return launch(kPull[static_cast<int>(params.dtype)][is_widening], schedule.num_ctas(params, kWarps), kThreads,
                  sizeof(Storage), stream, {.overlaps = has_zeros}, params, schedule);
}

cudaError_t preload_pull() {
    for (const auto& kernels : kPull)
        for (const Kernel kernel : kernels)
            if (const cudaError_t error =
                    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage));
                error != cudaSuccess)
                return error;
    // With the carveout of `pull`, which otherwise could not start on the same SM while this kernel runs.
    return cudaFuncSetAttribute(zero_empty_sums, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
}

}  // namespace jaxmagi::collectives
