#include <algorithm>

#include "csrc/collectives/launch.cuh"
#include "csrc/collectives/segments.cuh"
#include "csrc/collectives/unsent_rows.cuh"

// Rows to where they are needed. Each warp takes chunks of its own. It loads a chunk piece by piece into shared memory,
// as far as somebody needs it, and stores every piece to all who do, each lane to another. The last warp of each CTA
// writes zeros where nobody sends anything.
//
// Schedule of a warp: kStages buffers in turn. Up to kAhead loads are under way, so that kStages - kAhead pieces may be
// on their way out. Between chunks there is a pause of some microseconds, which the other warps fill.

namespace jaxmagi::collectives {
namespace {

constexpr int kWarps = 4, kThreads = (kWarps + 1) * kWarp;
constexpr int kPiece = 8192, kStages = 5, kAhead = 2;
constexpr int kMostChunkBytes = 32 * kPiece;  // a bit for each piece
constexpr int kZeroedBytesOfCta = 1 << 18;  // at most, if there are as many CTAs

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

struct Range {
    int begin, end;
    __device__ Range both(const Segment& segment) const {
        return {max(begin, segment.begin), min(end, segment.begin + segment.bytes)};
    }
};

class Pusher {
public:
    __device__ explicit Pusher(WarpMemory& memory) : memory_(memory) {
        if (lane_ == 0)
            for (int i = 0; i < kStages; ++i)
                arrived(i).init(1);
        sm90::fence_mbarrier_init();
        __syncwarp();
    }

    __device__ void push(const char* from, int bytes, int num_segments) {
        const uint32_t wanted = wanted_pieces(num_segments);
        uint32_t to_load = wanted, to_store = wanted;
        while (to_store) {
            for (; to_load and loaded_ - stored_ < kAhead; to_load &= to_load - 1)
                load(from, piece(__ffs(to_load) - 1, bytes));
            store(piece(__ffs(to_store) - 1, bytes), num_segments);
            to_store &= to_store - 1;
        }
    }

private:
    static __device__ Range piece(int number, int bytes) {
        return {number * kPiece, min((number + 1) * kPiece, bytes)};
    }
    __device__ sm90::Mbarrier arrived(int stage) const { return {sm90::shared_address(&memory_.arrived[stage])}; }

    __device__ uint32_t wanted_pieces(int num_segments) const {
        uint32_t wanted = 0;
        for (int i = lane_; i < num_segments; i += kWarp) {
            const Segment& segment = memory_.segments.list[i];
            const int first = segment.begin / kPiece, last = (segment.begin + segment.bytes - 1) / kPiece;
            wanted |= (~0u << first) & (~0u >> (31 - last));
        }
        return __reduce_or_sync(~0u, wanted);
    }

    // Each lane waits until what it stored from the buffer has been read.
    __device__ void load(const char* from, Range range) {
        sm90::bulk_wait_read<kStages - kAhead>();
        __syncwarp();
        const unsigned stage = loaded_++ % kStages;
        if (lane_ == 0) {
            arrived(stage).arrive_and_expect(range.end - range.begin);
            sm90::bulk_load(sm90::shared_address(memory_.stages[stage]), from + range.begin, range.end - range.begin,
                            arrived(stage));
        }
    }

    __device__ void store(Range range, int num_segments) {
        const unsigned stage = stored_ % kStages;
        arrived(stage).wait(stored_ / kStages & 1);
        ++stored_;
        for (int i = lane_; i < num_segments; i += kWarp) {
            const Segment& segment = memory_.segments.list[i];
            const Range part = range.both(segment);
            if (part.begin < part.end)
                sm90::bulk_store(segment.remote + (part.begin - segment.begin),
                                 sm90::shared_address(memory_.stages[stage]) + part.begin - range.begin,
                                 part.end - part.begin);
        }
        sm90::bulk_commit();
    }

    WarpMemory& memory_;
    const int lane_ = threadIdx.x % kWarp;
    unsigned loaded_ = 0, stored_ = 0;
};

__device__ void push_chunks(const Transfer& transfer, const Chunks& chunks, const Meeting& meeting,
                            WarpMemory& memory) {
    Pusher pusher(memory);
    for (Parts parts(transfer, chunks, meeting, transfer.outgoing, memory.segments); parts.next();) {
        const Chunk& part = parts.part();
        const char* const from = transfer.arrays[part.array].from + first_byte(transfer, part);
        pusher.push(from, part.bytes, parts.num_segments());
    }
    sm90::bulk_wait();
}

__global__ void __launch_bounds__(kThreads, 1)
    push(const __grid_constant__ Transfer transfer, const __grid_constant__ Chunks chunks) {
    extern __shared__ __align__(128) char shared[];
    Memory& memory = *reinterpret_cast<Memory*>(shared);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    meet(transfer, memory.meeting);
    if (blockIdx.x == 0)
        write_headers(transfer, transfer.sends, memory.meeting.rows);
    if (warp < kWarps)
        push_chunks(transfer, chunks, memory.meeting, memory.warps[warp]);
    else
        zero_unsent_rows(transfer, memory.meeting);
    leave(transfer, memory.meeting);
}

// How many rows nobody sends is known on the device only.
int num_ctas(const Transfer& transfer, const Chunks& chunks) {
    const int64_t zeroing = transfer.row_bytes() * transfer.output_rows * transfer.groups / kZeroedBytesOfCta;
    return std::max(chunks.num_ctas(transfer, kWarps), static_cast<int>(std::min<int64_t>(zeroing, transfer.num_sms)));
}

}  // namespace

cudaError_t push_rows(const Transfer& transfer, cudaStream_t stream, cudaEvent_t begun) {
    const Chunks chunks = cut_into_chunks(transfer, kWarps, kPiece, kMostChunkBytes);
    const int ctas = num_ctas(transfer, chunks);
    return launch(push, ctas, kThreads, sizeof(Memory), stream, {.event = begun}, transfer, chunks);
}

cudaError_t preload_push() {
    return cudaFuncSetAttribute(push, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Memory));
}

}  // namespace jaxmagi::collectives
