#include "csrc/attention/sm90/tile_schedule.h"

#include <algorithm>
#include <climits>

#include "csrc/common/math.h"
#include "csrc/mask/band.h"

// Four phases: bands get keys, are sorted by them, give every tile its window and its cost, and tiles are sorted by
// that. Sorting is by rank, the number of keys that come before: n^2 comparisons, but on all SMs at once and without a
// barrier between CTAs.
// A small plan runs all phases in one CTA.

namespace jaxmagi::sm90 {
namespace {

constexpr unsigned kAllLanes = ~0u;
constexpr int kWarpSize = 32;
constexpr int kRankedPerWarp = 4;
constexpr int kStagedKeys = 4096;  // in shared memory at a time, while keys are counted
constexpr int kReachGroup = 128;
constexpr int kThreads = 256, kThreadsAlone = 1024;
constexpr int kMaxAlone = 256;  // bands, and tiles, of a plan that one CTA makes
constexpr int kMaxCtas = 65535;

// What one plan reads and writes. Sorting is stable.
struct Plan {
    const int32_t* bands;
    ScheduledBand* sorted;
    ScheduledTile* tiles;
    ScheduledTile* unsorted_tiles;
    uint32_t *band_keys, *tile_keys;  // below 2^31
    int* reach;  // per kReachGroup sorted bands the largest q1
};

// The threads that share a phase; whole warps.
struct Threads {
    int index, count;

    __device__ int lane() const { return index % kWarpSize; }
    __device__ int warp() const { return index / kWarpSize; }
    __device__ int num_warps() const { return count / kWarpSize; }
};

constexpr int kWordsPerTile = sizeof(ScheduledTile) / sizeof(uint64_t);

JAXMAGI_HOST_DEVICE int64_t words_of_plan(int capacity, int num_tiles) {
    const int64_t keys = int64_t{capacity} + num_tiles, groups = ceil_div(capacity, kReachGroup);
    return round_up(int64_t{num_tiles} * kWordsPerTile + ceil_div(keys + groups, 2), kWordsPerTile);
}

// Of what is cut into tiles.
JAXMAGI_HOST_DEVICE int tiled_length(const TileScheduleParams& params) {
    return params.by_keys ? params.kv_len : params.q_len;
}

JAXMAGI_HOST_DEVICE int num_tiles_of(const TileScheduleParams& params) {
    return ceil_div(tiled_length(params), params.tile_rows);
}

__device__ Plan plan_at(const TileScheduleParams& params, int64_t index) {
    const int num_tiles = num_tiles_of(params);
    uint64_t* workspace = params.workspace + index * words_of_plan(params.capacity, num_tiles);
    uint32_t* tile_keys = reinterpret_cast<uint32_t*>(workspace + int64_t{num_tiles} * kWordsPerTile);
    uint32_t* band_keys = tile_keys + num_tiles;
    return {.bands = params.bands + index * params.capacity * 6,
            .sorted = params.sorted + index * params.capacity,
            .tiles = params.tiles + index * num_tiles,
            .unsorted_tiles = reinterpret_cast<ScheduledTile*>(workspace),
            .band_keys = band_keys,
            .tile_keys = tile_keys,
            .reach = reinterpret_cast<int*>(band_keys + params.capacity)};
}

__device__ Band tight_band(const TileScheduleParams& params, const Plan& plan, int index) {
    const int2* row = reinterpret_cast<const int2*>(plan.bands + int64_t{index} * 6);
    const int2 q = row[0], k = row[1], offsets = row[2];
    const Band band = tighten({q.x, q.y, k.x, k.y, offsets.x, offsets.y}, params.q_len, params.kv_len);
    return params.by_keys ? transposed(band) : band;
}

__device__ void key_bands(const TileScheduleParams& params, const Plan& plan, Threads threads) {
    for (int i = threads.index; i < params.capacity; i += threads.count) {
        const Band band = tight_band(params, plan, i);
        plan.band_keys[i] = band.q0 < band.q1 ? band.q0 : INT_MAX;
    }
    for (int i = threads.index; i < ceil_div(params.capacity, kReachGroup); i += threads.count)
        plan.reach[i] = 0;
}

// Copies keys [start, start + kStagedKeys), and behind the last one what is larger than any key.
__device__ void stage_keys(const uint32_t* keys, int num_keys, int start, uint32_t (&staged)[kStagedKeys]) {
    const int count = min(kStagedKeys, round_up(num_keys - start, kWarpSize * 4));
    __syncthreads();
#pragma unroll 16  // loads in flight
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        staged[i] = start + i < num_keys ? keys[start + i] : UINT_MAX;
    __syncthreads();
}

// count -= key < bound, as a borrow: two instructions instead of four.
__device__ void subtract_if_smaller(int& count, uint32_t key, uint32_t bound) {
    asm("{\n"
        ".reg .u32 unused;\n"
        "sub.cc.u32 unused, %1, %2;\n"
        "subc.u32 %0, %0, 0;\n"
        "}\n"
        : "+r"(count)
        : "r"(key), "r"(bound));
}

// Counts down, for the keys at first + t, by the staged keys that come before them: smaller ones, and equal ones in
// front of `first`.
__device__ void count_before(const uint32_t (&staged)[kStagedKeys], int start, int end, int first, int lane,
                             const uint32_t (&own)[kRankedPerWarp], int (&minus_before)[kRankedPerWarp]) {
#pragma unroll 4
    for (int i = start + lane * 4; i < end; i += kWarpSize * 4) {
        const uint4 keys = reinterpret_cast<const uint4*>(staged)[(i - start) / 4];
        const uint32_t tie = i < first;  // first and i are multiples of 4
        for (int t = 0; t < kRankedPerWarp; ++t) {
            const uint32_t bound = own[t] + tie;
            for (const uint32_t key : {keys.x, keys.y, keys.z, keys.w})
                subtract_if_smaller(minus_before[t], key, bound);
        }
    }
}

// To lane t the rank of key first + t, for t < kRankedPerWarp.
__device__ int rank_of_lane(const uint32_t (&own)[kRankedPerWarp], const int (&minus_before)[kRankedPerWarp],
                            int lane) {
    int rank = 0;
    for (int t = 0; t < kRankedPerWarp; ++t) {
        int total = -__reduce_add_sync(kAllLanes, minus_before[t]);
        for (int other = 0; other < t; ++other)
            total += own[other] == own[t];
        rank = lane == t ? total : rank;
    }
    return rank;
}

// Calls place(load(index), rank) for every key. All threads of the CTA take part.
template <typename Load, typename Place>
__device__ void sort(const uint32_t* keys, int num_keys, Threads threads, Load load, Place place) {
    static_assert(kRankedPerWarp == 4);  // see `tie`
    __shared__ alignas(16) uint32_t staged[kStagedKeys];
    const int stride = threads.num_warps() * kRankedPerWarp, lane = threads.lane();
    for (int base = 0; base < num_keys; base += stride) {
        const int first = base + threads.warp() * kRankedPerWarp;
        const auto item = load(min(first + lane % kRankedPerWarp, num_keys - 1));  // arrives while keys are counted
        uint32_t own[kRankedPerWarp];
        int minus_before[kRankedPerWarp] = {};
        for (int t = 0; t < kRankedPerWarp; ++t)
            own[t] = keys[min(first + t, num_keys - 1)];
        for (int start = 0; start < num_keys; start += kStagedKeys) {
            stage_keys(keys, num_keys, start, staged);
            count_before(staged, start, min(start + kStagedKeys, num_keys), first, lane, own, minus_before);
        }
        const int rank = rank_of_lane(own, minus_before, lane);
        if (lane < kRankedPerWarp and first + lane < num_keys)
            place(item, rank);
    }
}

__device__ void sort_bands(const TileScheduleParams& params, const Plan& plan, Threads threads) {
    const auto load = [&](int index) { return tight_band(params, plan, index); };
    sort(plan.band_keys, params.capacity, threads, load, [&](const Band& band, int rank) {
        plan.sorted[rank] = {band.q0, band.q1, band.k0, band.k1, band.lo, band.hi, 0, 0};
        int* const reach = plan.reach + rank / kReachGroup;
        if (*static_cast<volatile int*>(reach) < band.q1)  // spares most of the atomics, on few addresses
            atomicMax(reach, band.q1);
    });
}

// The first index of [range) where holds(index), or range.end.
template <typename Holds> __device__ int find_first(Range range, int lane, Holds holds) {
    for (int i = range.begin; i < range.end; i += kWarpSize) {
        const unsigned found = __ballot_sync(kAllLanes, i + lane < range.end and holds(i + lane));
        if (found != 0)
            return i + __ffs(found) - 1;
    }
    return range.end;
}

// The end of the indices from range.begin on where holds(index); it must not hold again beyond.
template <typename Holds> __device__ int find_end(Range range, int lane, Holds holds) {
    while (not is_empty(range)) {
        const int step = ceil_div(range.end - range.begin, kWarpSize), probe = range.begin + lane * step;
        const int held = __popc(__ballot_sync(kAllLanes, probe < range.end and holds(probe)));
        range.end = min(range.end, range.begin + held * step);
        range.begin = held == 0 ? range.begin : range.begin + (held - 1) * step + 1;
    }
    return range.begin;
}

// From the first band that ends beyond the first row to the last one that begins before the end.
__device__ Range window_of(const TileScheduleParams& params, const Plan& plan, Range rows, int lane) {
    const Range groups{0, ceil_div(params.capacity, kReachGroup)}, all{0, params.capacity};
    const int group = find_first(groups, lane, [&](int i) { return plan.reach[i] > rows.begin; });
    const Range members{group * kReachGroup, params.capacity};
    const int first = find_first(members, lane, [&](int i) { return plan.sorted[i].q1 > rows.begin; });
    const int end = find_end(all, lane, [&](int i) { return plan.sorted[i].q1 > 0 and plan.sorted[i].q0 < rows.end; });
    return first < end ? Range{first, end} : Range{0, 0};
}

__device__ int64_t add_lanes(int64_t x) {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(kAllLanes, x, distance);
    return x;
}

__device__ int count_blocks(const TileScheduleParams& params, const Plan& plan, Range rows, Range window, int lane) {
    int64_t blocks = 0;
#pragma unroll 4
    for (int i = window.begin + lane; i < window.end; i += kWarpSize) {
        const ScheduledBand band = plan.sorted[i];
        const Range keys = keys_of_rows({band.q0, band.q1, band.k0, band.k1, band.lo, band.hi}, rows);
        const unsigned size = max(keys.end - keys.begin, 0), block = params.block_keys;
        blocks += (size + block - 1) / block;
    }
    return static_cast<int>(min(add_lanes(blocks), int64_t{INT_MAX}));
}

__device__ void plan_tiles(const TileScheduleParams& params, const Plan& plan, Threads threads) {
    const int num_tiles = num_tiles_of(params), lane = threads.lane();
    for (int tile = threads.warp(); tile < num_tiles; tile += threads.num_warps()) {
        const Range rows = tile_range(tile, params.tile_rows, tiled_length(params));
        const Range window = window_of(params, plan, rows, lane);
        const int blocks = count_blocks(params, plan, rows, window, lane);
        if (lane == 0) {
            plan.unsorted_tiles[tile] = {tile, window.begin, window.end, blocks};
            plan.tile_keys[tile] = INT_MAX - blocks;
        }
    }
}

__device__ void sort_tiles(const TileScheduleParams& params, const Plan& plan, Threads threads) {
    const auto load = [&](int index) { return plan.unsorted_tiles[index]; };
    sort(plan.tile_keys, num_tiles_of(params), threads, load,
         [&](const ScheduledTile& tile, int rank) { plan.tiles[rank] = tile; });
}

using Phase = void(const TileScheduleParams&, const Plan&, Threads);

// Four CTAs a multiprocessor leave 64 registers to a thread; by itself ptxas takes 48, and spills.
template <Phase& kPhase>
__global__ void __launch_bounds__(kThreads, 4) run_phase(const __grid_constant__ TileScheduleParams params) {
    const int index = blockIdx.y * blockDim.x + threadIdx.x, count = gridDim.y * blockDim.x;
    kPhase(params, plan_at(params, blockIdx.x), {index, count});
}

// What phases leave for each other stays in shared memory: a small plan is little more than waiting for memory.
__global__ void __launch_bounds__(kThreadsAlone) run_all_phases(const __grid_constant__ TileScheduleParams params) {
    __shared__ ScheduledBand sorted[kMaxAlone];
    __shared__ ScheduledTile unsorted_tiles[kMaxAlone];
    __shared__ uint32_t band_keys[kMaxAlone], tile_keys[kMaxAlone];
    __shared__ int reach[kMaxAlone / kReachGroup];
    const Plan result = plan_at(params, blockIdx.x);
    const Plan plan{.bands = result.bands,
                    .sorted = sorted,
                    .tiles = result.tiles,
                    .unsorted_tiles = unsorted_tiles,
                    .band_keys = band_keys,
                    .tile_keys = tile_keys,
                    .reach = reach};
    const Threads threads{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
    key_bands(params, plan, threads);
    __syncthreads();
    sort_bands(params, plan, threads);
    __syncthreads();
    for (int i = threads.index; i < params.capacity; i += threads.count)
        result.sorted[i] = sorted[i];
    plan_tiles(params, plan, threads);
    __syncthreads();
    sort_tiles(params, plan, threads);
}

using Kernel = void (*)(TileScheduleParams);

cudaError_t launch(Kernel kernel, const TileScheduleParams& params, int ctas, int threads, cudaStream_t stream) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(params.num_masks, std::clamp(ctas, 1, kMaxCtas));
    config.blockDim = threads;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

int64_t tile_schedule_workspace_words(int num_masks, int capacity, int length, int tile_rows) {
    return num_masks * words_of_plan(capacity, ceil_div(length, tile_rows));
}

cudaError_t make_tile_schedule(const TileScheduleParams& params, cudaStream_t stream) {
    const int num_tiles = num_tiles_of(params);
    if (std::max(params.capacity, num_tiles) <= kMaxAlone)
        return launch(run_all_phases, params, 1, kThreadsAlone, stream);
    constexpr int kWarps = kThreads / kWarpSize, kRanked = kWarps * kRankedPerWarp;
    const struct {
        Kernel kernel;
        int ctas;
    } phases[] = {{run_phase<key_bands>, ceil_div(params.capacity, kThreads)},
                  {run_phase<sort_bands>, ceil_div(params.capacity, kRanked)},
                  {run_phase<plan_tiles>, ceil_div(num_tiles, kWarps)},
                  {run_phase<sort_tiles>, ceil_div(num_tiles, kRanked)}};
    for (const auto& [kernel, ctas] : phases)
        if (const cudaError_t error = launch(kernel, params, ctas, kThreads, stream); error != cudaSuccess)
            return error;
    return cudaSuccess;
}

cudaError_t preload_tile_schedule() {
    const Kernel kernels[] = {run_all_phases, run_phase<key_bands>, run_phase<sort_bands>, run_phase<plan_tiles>,
                              run_phase<sort_tiles>};
    for (const Kernel kernel : kernels) {
        cudaFuncAttributes attributes;
        if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

}  // namespace jaxmagi::sm90
