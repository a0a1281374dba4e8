#include "csrc/attention/sm90/tile_schedule.h"

#include <algorithm>
#include <climits>

#include "csrc/common/math.h"
#include "csrc/mask/band.h"

// The phases compute the sort keys of bands, sort bands, find where tiles begin beside multiples of their length (two
// phases), find the bands and the cost of each tile, and sort tiles by cost. The place of an element in sorted order is
// the number of keys before its own, which takes n^2 comparisons, but runs on all SMs at once and needs no barrier
// between CTAs. One CTA runs all phases of a small mask.

namespace jaxmagi::sm90 {
namespace {

constexpr unsigned kAllLanes = ~0u;
constexpr int kWarpSize = 32;
constexpr int kKeysPerWarp = 4;
constexpr int kStagedKeys = 4096;  // keys in shared memory at a time
constexpr int kBandGroup = 128;  // bands that share an entry of max_q1
constexpr int kThreads = 256, kOneCtaThreads = 1024;
constexpr int kMaxInOneCta = 384;  // bands, and tiles, of a mask that one CTA schedules
constexpr int kMaxCtas = 65535;
constexpr uint32_t kMaxBlocks = 1u << 30;  // of a tile: more are counted as so many

// The arrays of one mask. Sorting is stable.
struct MaskBuffers {
    const int32_t* bands;
    ScheduledBand* sorted;
    ScheduledTile* tiles;
    ScheduledTile* unsorted_tiles;
    uint32_t *band_keys, *tile_keys;  // sort keys, below 2^31
    int* max_q1;                      // largest q1 of each kBandGroup sorted bands
    uint32_t* begins_tile;            // whether a tile begins with a sorted band, 0 or 1
    int* starts;                      // the first rows of long bands that begin tiles, in order; INT_MAX: no more
};

// A thread among those that share a phase, which are whole warps.
struct Threads {
    int index, count;

    __device__ int lane() const { return index % kWarpSize; }
    __device__ int warp() const { return index / kWarpSize; }
    __device__ int num_warps() const { return count / kWarpSize; }
};

constexpr int kWordsPerTile = sizeof(ScheduledTile) / sizeof(uint64_t);

JAXMAGI_HOST_DEVICE int64_t workspace_words(int capacity, int num_tiles) {
    const int64_t keys = int64_t{capacity} + num_tiles, begins_and_starts = keys;
    const int64_t numbers = keys + begins_and_starts + ceil_div(capacity, kBandGroup);
    return round_up(int64_t{num_tiles} * kWordsPerTile + ceil_div(numbers, int64_t{2}), kWordsPerTile);
}

// Returns the length of the side that is cut into tiles.
JAXMAGI_HOST_DEVICE int tiled_length(const TileScheduleParams& params) {
    return params.by_keys ? params.kv_len : params.q_len;
}

// Returns how many tiles there are beside those that begin at multiples of their length.
JAXMAGI_HOST_DEVICE int num_starts(const TileScheduleParams& params) {
    return params.num_tiles - ceil_div(tiled_length(params), params.tile_rows);
}

__device__ MaskBuffers buffers_of(const TileScheduleParams& params, int64_t mask) {
    const int num_tiles = params.num_tiles;
    uint64_t* workspace = params.workspace + mask * workspace_words(params.capacity, num_tiles);
    uint32_t* tile_keys = reinterpret_cast<uint32_t*>(workspace + int64_t{num_tiles} * kWordsPerTile);
    uint32_t* band_keys = tile_keys + num_tiles;
    uint32_t* begins_tile = band_keys + params.capacity;
    int* starts = reinterpret_cast<int*>(begins_tile + params.capacity);
    return {.bands = params.bands + mask * params.capacity * 6,
            .sorted = params.sorted + mask * params.capacity,
            .tiles = params.tiles + mask * num_tiles,
            .unsorted_tiles = reinterpret_cast<ScheduledTile*>(workspace),
            .band_keys = band_keys,
            .tile_keys = tile_keys,
            .max_q1 = starts + num_tiles,
            .begins_tile = begins_tile,
            .starts = starts};
}

__device__ Band tight_band(const TileScheduleParams& params, const MaskBuffers& mask, int index) {
    const int2* row = reinterpret_cast<const int2*>(mask.bands + int64_t{index} * 6);
    const int2 q = row[0], k = row[1], offsets = row[2];
    const Band band = tighten({q.x, q.y, k.x, k.y, offsets.x, offsets.y}, params.q_len, params.kv_len);
    return params.by_keys ? transposed(band) : band;
}

__device__ void compute_band_keys(const TileScheduleParams& params, const MaskBuffers& mask, Threads threads) {
    for (int i = threads.index; i < params.capacity; i += threads.count) {
        const Band band = tight_band(params, mask, i);
        mask.band_keys[i] = band.q0 < band.q1 ? band.q0 : INT_MAX;
    }
    for (int i = threads.index; i < ceil_div(params.capacity, kBandGroup); i += threads.count)
        mask.max_q1[i] = 0;
    for (int i = threads.index; i < num_starts(params); i += threads.count)
        mask.starts[i] = INT_MAX;
}

// Returns the CTA's shared memory for keys, the same in all instances of sort().
__device__ uint32_t (&staged_keys())[kStagedKeys] {
    __shared__ alignas(16) uint32_t staged[kStagedKeys];
    return staged;
}

// Copies keys [start, start + kStagedKeys) to shared memory. Numbers larger than any key follow the last one.
__device__ void stage_keys(const uint32_t* keys, int num_keys, int start, uint32_t (&staged)[kStagedKeys]) {
    const int count = min(kStagedKeys, round_up(num_keys - start, kWarpSize * 4));
    __syncthreads();
#pragma unroll 16  // loads in flight
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        staged[i] = start + i < num_keys ? keys[start + i] : UINT_MAX;
    __syncthreads();
}

// Computes count -= key < bound as a borrow, which takes two instructions instead of four.
__device__ void subtract_if_smaller(int& count, uint32_t key, uint32_t bound) {
    asm("{\n"
        ".reg .u32 unused;\n"
        "sub.cc.u32 unused, %1, %2;\n"
        "subc.u32 %0, %0, 0;\n"
        "}\n"
        : "+r"(count)
        : "r"(key), "r"(bound));
}

// Subtracts from minus_before[t] the number of staged keys that come before key first + t: smaller ones, and equal ones
// in front of `first`.
__device__ void count_before(const uint32_t (&staged)[kStagedKeys], int start, int end, int first, int lane,
                             const uint32_t (&ranked)[kKeysPerWarp], int (&minus_before)[kKeysPerWarp]) {
#pragma unroll 4
    for (int i = start + lane * 4; i < end; i += kWarpSize * 4) {
        const uint4 keys = reinterpret_cast<const uint4*>(staged)[(i - start) / 4];
        const uint32_t tie = i < first;  // first and i are multiples of 4
        for (int t = 0; t < kKeysPerWarp; ++t) {
            const uint32_t bound = ranked[t] + tie;
            for (const uint32_t key : {keys.x, keys.y, keys.z, keys.w})
                subtract_if_smaller(minus_before[t], key, bound);
        }
    }
}

// Returns to lane t < kKeysPerWarp the rank of key first + t.
__device__ int rank_of_lane(const uint32_t (&ranked)[kKeysPerWarp], const int (&minus_before)[kKeysPerWarp],
                            int lane) {
    int rank = 0;
    for (int t = 0; t < kKeysPerWarp; ++t) {
        int total = -__reduce_add_sync(kAllLanes, minus_before[t]);
        for (int earlier = 0; earlier < t; ++earlier)
            total += ranked[earlier] == ranked[t];
        rank = lane == t ? total : rank;
    }
    return rank;
}

// Calls place(load(index), rank) for every key. All threads of the CTA take part.
template <typename Load, typename Place>
__device__ void sort(const uint32_t* keys, int num_keys, Threads threads, Load load, Place place) {
    static_assert(kKeysPerWarp == 4);  // count_before relies on it for ties
    uint32_t(&staged)[kStagedKeys] = staged_keys();
    const int stride = threads.num_warps() * kKeysPerWarp, lane = threads.lane();
    for (int base = 0; base < num_keys; base += stride) {
        const int first = base + threads.warp() * kKeysPerWarp;
        const auto element = load(min(first + lane % kKeysPerWarp, num_keys - 1));  // in flight while keys are counted
        uint32_t ranked[kKeysPerWarp];
        int minus_before[kKeysPerWarp] = {};
        for (int t = 0; t < kKeysPerWarp; ++t)
            ranked[t] = keys[min(first + t, num_keys - 1)];
        for (int start = 0; start < num_keys; start += kStagedKeys) {
            stage_keys(keys, num_keys, start, staged);
            count_before(staged, start, min(start + kStagedKeys, num_keys), first, lane, ranked, minus_before);
        }
        const int rank = rank_of_lane(ranked, minus_before, lane);
        if (lane < kKeysPerWarp and first + lane < num_keys)
            place(element, rank);
    }
}

__device__ void sort_bands(const TileScheduleParams& params, const MaskBuffers& mask, Threads threads) {
    const auto load = [&](int index) { return tight_band(params, mask, index); };
    sort(mask.band_keys, params.capacity, threads, load, [&](const Band& band, int rank) {
        mask.sorted[rank] = {band.q0, band.q1, band.k0, band.k1, band.lo, band.hi, 0, 0};
        int* const max_q1 = mask.max_q1 + rank / kBandGroup;
        if (*static_cast<volatile int*>(max_q1) < band.q1)  // spares most atomics, which share few addresses
            atomicMax(max_q1, band.q1);
    });
}

// Returns the first index of [range) where holds(index), or range.end.
template <typename Holds> __device__ int find_first(Range range, int lane, Holds holds) {
    for (int i = range.begin; i < range.end; i += kWarpSize) {
        const unsigned found = __ballot_sync(kAllLanes, i + lane < range.end and holds(i + lane));
        if (found != 0)
            return i + __ffs(found) - 1;
    }
    return range.end;
}

// Returns the first index of [range) where holds(index) is false, or range.end; it must stay false from there on.
template <typename Holds> __device__ int find_end(Range range, int lane, Holds holds) {
    while (not is_empty(range)) {
        const int step = ceil_div(range.end - range.begin, kWarpSize), probe = range.begin + lane * step;
        const int held = __popc(__ballot_sync(kAllLanes, probe < range.end and holds(probe)));
        range.end = min(range.end, range.begin + held * step);
        range.begin = held == 0 ? range.begin : range.begin + (held - 1) * step + 1;
    }
    return range.begin;
}

// Returns true if a sorted band is long and no band before it goes on where it begins.
__device__ bool begins_tile(const MaskBuffers& mask, int index) {
    const ScheduledBand& band = mask.sorted[index];
    if (band.q0 == 0 or band.q1 - band.q0 < kLongBandRows)
        return false;
    const int group = index / kBandGroup;
    for (int i = 0; i < group; ++i)
        if (mask.max_q1[i] > band.q0)
            return false;
    for (int i = group * kBandGroup; i < index; ++i)
        if (mask.sorted[i].q1 > band.q0)
            return false;
    return true;
}

__device__ void find_starts(const TileScheduleParams& params, const MaskBuffers& mask, Threads threads) {
    for (int i = threads.index; i < params.capacity; i += threads.count)
        mask.begins_tile[i] = begins_tile(mask, i);
}

// Lists the starts in order, as many as there is room for.
__device__ void list_starts(const TileScheduleParams& params, const MaskBuffers& mask, Threads threads) {
    for (int i = threads.index; i < params.capacity; i += threads.count) {
        if (mask.begins_tile[i] == 0)
            continue;
        int before = 0;
#pragma unroll 8  // loads in flight
        for (int other = 0; other < i; ++other)
            before += mask.begins_tile[other];
        if (before < num_starts(params))
            mask.starts[before] = mask.sorted[i].q0;
    }
}

// Returns the rows of a tile. The tiles from starts[i] on are numbered from starts[i] / tile_rows + i + 1 on. The rows
// before need at most as many numbers as are left for them, and numbers that are left over have no rows.
__device__ Range rows_of_tile(const TileScheduleParams& params, const MaskBuffers& mask, int tile, int lane) {
    const int size = params.tile_rows, count = num_starts(params);
    const auto first_tile = [&](int i) { return mask.starts[i] / size + i + 1; };
    const int before = find_end({0, count}, lane, [&](int i) { return first_tile(i) <= tile; });
    const int end = before == count ? INT_MAX : mask.starts[before];
    const int start = before == 0 ? 0 : mask.starts[before - 1];
    const int begin = start + (tile - (before == 0 ? 0 : first_tile(before - 1))) * size;
    const int behind = min(end, tiled_length(params));
    return {min(begin, behind), min(begin + size, behind)};
}

// Returns the range from the first band that ends behind the first row to the last one that begins before the end.
__device__ Range bands_of_rows(const TileScheduleParams& params, const MaskBuffers& mask, Range rows, int lane) {
    const Range groups{0, ceil_div(params.capacity, kBandGroup)}, all{0, params.capacity};
    const int group = find_first(groups, lane, [&](int i) { return mask.max_q1[i] > rows.begin; });
    const Range members{group * kBandGroup, params.capacity};
    const int first = find_first(members, lane, [&](int i) { return mask.sorted[i].q1 > rows.begin; });
    const int end = find_end(all, lane, [&](int i) { return mask.sorted[i].q1 > 0 and mask.sorted[i].q0 < rows.end; });
    return first < end ? Range{first, end} : Range{0, 0};
}

__device__ int64_t add_lanes(int64_t x) {
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(kAllLanes, x, distance);
    return x;
}

// Counts the blocks of a tile whose rows and bands are given.
__device__ ScheduledTile measure(const TileScheduleParams& params, const MaskBuffers& mask, int tile, Range rows,
                                 Range bands, int lane) {
    int64_t blocks = 0;
    bool sees_received = false;
#pragma unroll 4
    for (int i = bands.begin + lane; i < bands.end; i += kWarpSize) {
        const ScheduledBand band = mask.sorted[i];
        const Range keys = keys_of_rows({band.q0, band.q1, band.k0, band.k1, band.lo, band.hi}, rows);
        const unsigned size = max(keys.end - keys.begin, 0), block = params.block_keys;
        blocks += (size + block - 1) / block;
        sees_received |= size > 0 and keys.end > params.own_len and not params.by_keys;
    }
    const int num_blocks = static_cast<int>(min(add_lanes(blocks), int64_t{kMaxBlocks}));
    return {__any_sync(kAllLanes, sees_received) ? ~tile : tile, bands.begin, bands.end, num_blocks, rows, 0, 0};
}

__device__ void measure_tiles(const TileScheduleParams& params, const MaskBuffers& mask, Threads threads) {
    const int lane = threads.lane();
    for (int tile = threads.warp(); tile < params.num_tiles; tile += threads.num_warps()) {
        const Range rows = rows_of_tile(params, mask, tile, lane);
        const Range bands = bands_of_rows(params, mask, rows, lane);
        const ScheduledTile measured = measure(params, mask, tile, rows, bands, lane);
        if (lane == 0) {
            mask.unsorted_tiles[tile] = measured;
            mask.tile_keys[tile] = kMaxBlocks + (measured.sees_received() ? measured.num_blocks : -measured.num_blocks);
        }
    }
}

__device__ void sort_tiles(const TileScheduleParams& params, const MaskBuffers& mask, Threads threads) {
    const auto load = [&](int index) { return mask.unsorted_tiles[index]; };
    sort(mask.tile_keys, params.num_tiles, threads, load,
         [&](const ScheduledTile& tile, int rank) { mask.tiles[rank] = tile; });
}

using Phase = void(const TileScheduleParams&, const MaskBuffers&, Threads);

// Four CTAs per SM leave 64 registers to a thread. Without the bound ptxas takes 48 and spills.
template <Phase& kPhase>
__global__ void __launch_bounds__(kThreads, 4) run_phase(const __grid_constant__ TileScheduleParams params) {
    const int index = blockIdx.y * blockDim.x + threadIdx.x, count = gridDim.y * blockDim.x;
    kPhase(params, buffers_of(params, blockIdx.x), {index, count});
}

// Phases exchange their results in shared memory, since a small mask is little more than waiting for memory.
__global__ void __launch_bounds__(kOneCtaThreads) run_all_phases(const __grid_constant__ TileScheduleParams params) {
    __shared__ ScheduledBand sorted[kMaxInOneCta];
    __shared__ ScheduledTile unsorted_tiles[kMaxInOneCta];
    __shared__ uint32_t band_keys[kMaxInOneCta], tile_keys[kMaxInOneCta];
    __shared__ uint32_t begins_tile[kMaxInOneCta];
    __shared__ int max_q1[kMaxInOneCta / kBandGroup], starts[kMaxInOneCta];
    const MaskBuffers result = buffers_of(params, blockIdx.x);
    const MaskBuffers mask{.bands = result.bands,
                           .sorted = sorted,
                           .tiles = result.tiles,
                           .unsorted_tiles = unsorted_tiles,
                           .band_keys = band_keys,
                           .tile_keys = tile_keys,
                           .max_q1 = max_q1,
                           .begins_tile = begins_tile,
                           .starts = starts};
    const Threads threads{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
    compute_band_keys(params, mask, threads);
    __syncthreads();
    sort_bands(params, mask, threads);
    __syncthreads();
    for (int i = threads.index; i < params.capacity; i += threads.count)
        result.sorted[i] = sorted[i];
    if (num_starts(params) > 0) {
        find_starts(params, mask, threads);
        __syncthreads();
        list_starts(params, mask, threads);
        __syncthreads();
    }
    measure_tiles(params, mask, threads);
    __syncthreads();
    sort_tiles(params, mask, threads);
}

using Kernel = void (*)(TileScheduleParams);

cudaError_t launch(Kernel kernel, const TileScheduleParams& params, int ctas, int threads, cudaStream_t stream) {
    if (ctas == 0)
        return cudaSuccess;
    kernel<<<dim3(params.num_masks, std::min(ctas, kMaxCtas)), threads, 0, stream>>>(params);
    return cudaGetLastError();
}

}  // namespace

int64_t tile_schedule_workspace_words(int num_masks, int capacity, int num_tiles) {
    return num_masks * workspace_words(capacity, num_tiles);
}

cudaError_t make_tile_schedule(const TileScheduleParams& params, cudaStream_t stream) {
    if (std::max(params.capacity, params.num_tiles) <= kMaxInOneCta)
        return launch(run_all_phases, params, 1, kOneCtaThreads, stream);
    constexpr int kWarps = kThreads / kWarpSize, kRanked = kWarps * kKeysPerWarp;
    const int begin_ctas = num_starts(params) > 0 ? ceil_div(params.capacity, kThreads) : 0;
    const struct {
        Kernel kernel;
        int ctas;
    } phases[] = {{run_phase<compute_band_keys>, ceil_div(std::max(params.capacity, num_starts(params)), kThreads)},
                  {run_phase<sort_bands>, ceil_div(params.capacity, kRanked)},
                  {run_phase<find_starts>, begin_ctas},
                  {run_phase<list_starts>, begin_ctas},
                  {run_phase<measure_tiles>, ceil_div(params.num_tiles, kWarps)},
                  {run_phase<sort_tiles>, ceil_div(params.num_tiles, kRanked)}};
    for (const auto& [kernel, ctas] : phases)
        if (const cudaError_t error = launch(kernel, params, ctas, kThreads, stream); error != cudaSuccess)
            return error;
    return cudaSuccess;
}

cudaError_t preload_tile_schedule() {
    const Kernel kernels[] = {run_all_phases, run_phase<compute_band_keys>, run_phase<sort_bands>,
                              run_phase<find_starts>, run_phase<list_starts>, run_phase<measure_tiles>,
                              run_phase<sort_tiles>};
    for (const Kernel kernel : kernels) {
        cudaFuncAttributes attributes;
        if (const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess)
            return error;
    }
    return cudaSuccess;
}

}  // namespace jaxmagi::sm90
