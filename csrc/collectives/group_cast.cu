#include <algorithm>

#include "csrc/collectives/launch.cuh"
#include "csrc/collectives/shared_storage.cuh"
#include "csrc/collectives/zero_fill_cast.cuh"

// Group cast: each rank pushes its input rows into the output arrays of the native peers that need them.
//
// Protocol: after the barrier at the start, which tells each rank where its peers' outputs are, each warp takes chunks
// of input rows. It loads a chunk piece by piece into shared memory, as far as any peer needs it, and stores each piece
// to all who do, one lane per segment. The last warp of each CTA writes zeros to this rank's output rows that nobody
// sends. Nobody waits for single rows: the barrier at the end says that all stores of all peers are complete.
//
// Pipeline of a warp: a ring of kStages buffers with up to kAhead loads in flight, so that the stores of
// kStages - kAhead pieces may still read theirs. Between chunks there is a bubble of some microseconds, which the other
// warps fill.

namespace jaxmagi::collectives {
namespace {

constexpr int kWarps = 4, kThreads = (kWarps + 1) * kWarp;
constexpr int kPiece = 8192, kStages = 5, kAhead = 2;
constexpr int kMaxChunkBytes = 32 * kPiece;     // one bit per piece in `needed`
constexpr int kZeroedBytesPerCta = 1 << 18;     // if there are enough SMs

using Storage = SharedStorage<kWarps, kStages, kPiece>;
static_assert(sizeof(Storage) <= Storage::kMaxBytes);
using PushStorage = WarpStorage<kStages, kPiece>;

struct ByteRange {
    int begin, end;
};

// Says where the bytes of a chunk are. Its rows lie behind each other, or apart, with heads of other parts between them.
struct Source {
    const char* rows;  // the first row of the transfer
    int64_t begin;     // the first byte of the chunk, without those between rows
    int row_bytes, pitch;

    __device__ Source(const TransferParams& params, const Chunk& chunk)
        : rows(params.arrays[chunk.array].from + transfer_begin(params, chunk) * params.input_pitch),
          begin(chunk.begin),
          row_bytes(params.arrays[chunk.array].row_bytes),
          pitch(params.input_pitch) {}
};

class Pusher {
public:
    __device__ explicit Pusher(PushStorage& storage) : storage_(storage) { storage.init_barriers(); }

    __device__ void push(const Source& source, int bytes, int num_segments) {
        const uint32_t needed = needed_pieces(num_segments);
        uint32_t to_load = needed, to_store = needed;
        while (to_store) {
            for (; to_load and loaded_ - stored_ < kAhead; to_load &= to_load - 1)
                load(source, piece(__ffs(to_load) - 1, bytes));
            store(piece(__ffs(to_store) - 1, bytes), num_segments);
            to_store &= to_store - 1;
        }
    }

private:
    static __device__ ByteRange piece(int i, int bytes) { return {i * kPiece, min((i + 1) * kPiece, bytes)}; }

    // Returns a bit for each piece of the chunk that meets a segment.
    __device__ uint32_t needed_pieces(int num_segments) const {
        uint32_t needed = 0;
        for (int i = lane_; i < num_segments; i += kWarp) {
            const Segment& segment = storage_.segments[i];
            const int first = segment.begin / kPiece, last = (segment.begin + segment.bytes - 1) / kPiece;
            needed |= (~0u << first) & (~0u >> (31 - last));
        }
        return __reduce_or_sync(~0u, needed);
    }

    // Waits first until each lane's bulk stores have read the buffer that the load overwrites.
    __device__ void load(const Source& source, ByteRange range) {
        sm90::bulk_wait_read<kStages - kAhead>();
        __syncwarp();
        if (source.pitch > 1)
            load_rows(source, range);
        else if (lane_ == 0)
            storage_.load(loaded_, 0, source.rows + source.begin + range.begin, range.end - range.begin);
        ++loaded_;
    }

    // Loads rows that lie apart, one in each lane.
    __device__ void load_rows(const Source& source, ByteRange range) {
        if (lane_ == 0)
            storage_.expect(loaded_, range.end - range.begin);
        __syncwarp();
        const int64_t begin = source.begin + range.begin, end = source.begin + range.end, bytes = source.row_bytes;
        for (int64_t row = begin / bytes + lane_; row * bytes < end; row += kWarp) {
            const int64_t first = max(row * bytes, begin), last = min((row + 1) * bytes, end);
            storage_.load_piece(loaded_, static_cast<int>(first - begin),
                                source.rows + row * bytes * (source.pitch - 1) + first, static_cast<int>(last - first));
        }
    }

    __device__ void store(ByteRange range, int num_segments) {
        const unsigned stage = stored_ % kStages;
        storage_.wait(stored_++);
        for (int i = lane_; i < num_segments; i += kWarp) {
            const Segment& segment = storage_.segments[i];
            const int begin = max(range.begin, segment.begin), end = min(range.end, segment.begin + segment.bytes);
            if (begin < end)
                sm90::bulk_store(segment.remote + (begin - segment.begin),
                                 sm90::shared_address(storage_.stages[stage]) + begin - range.begin, end - begin);
        }
        sm90::bulk_commit();
    }

    PushStorage& storage_;
    const int lane_ = threadIdx.x % kWarp;
    unsigned loaded_ = 0, stored_ = 0;
};

__device__ void push_chunks(const TransferParams& params, const ChunkSchedule& schedule, const CallState& call,
                            PushStorage& storage) {
    Pusher pusher(storage);
    for (ChunkIterator chunks(params, schedule, call, storage.segments); chunks.next();) {
        const Chunk& chunk = chunks.chunk();
        pusher.push({params, chunk}, chunk.bytes, chunks.num_segments());
    }
    sm90::bulk_wait();
}

__global__ void __launch_bounds__(kThreads, 1)
    push(const __grid_constant__ TransferParams params, const __grid_constant__ ChunkSchedule schedule) {
    extern __shared__ __align__(128) char shared[];
    Storage& storage = *reinterpret_cast<Storage*>(shared);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    barrier_at_start(params, storage.call);
    if (warp < kWarps)
        push_chunks(params, schedule, storage.call, storage.warps[warp]);
    else
        zero_unsent_rows(params, storage.call);
    barrier_at_end(params, storage.call);
}

// Decides on how many SMs a group cast runs, one CTA each: at most params.num_sms, and fewer where there is less to
// send and to zero. Only the device knows how many rows are to be zeroed, so that all output rows count.
int num_ctas(const TransferParams& params, const ChunkSchedule& schedule) {
    const int64_t zeroing = params.row_bytes() * params.output_rows * params.batch / kZeroedBytesPerCta;
    return std::max(schedule.num_ctas(params, kWarps), static_cast<int>(std::min<int64_t>(zeroing, params.num_sms)));
}

}  // namespace

cudaError_t push_rows(const TransferParams& params, cudaStream_t stream) {
    const ChunkSchedule schedule = make_chunk_schedule(params, kWarps, kPiece, kMaxChunkBytes);
    const int ctas = num_ctas(params, schedule);
    return launch(push, ctas, kThreads, sizeof(Storage), stream, {}, params, schedule);
}

cudaError_t preload_push() {
    return cudaFuncSetAttribute(push, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage));
}

}  // namespace jaxmagi::collectives
