#pragma once

#include <algorithm>

#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/common/math.h"
#include "csrc/mask/band.h"

// How the work is cut into work items, and the order in which the CTAs claim them. A work item is a tile of keys of one
// key head, with a head set: as many query heads of the group as heads_of_item says, or all (WholeGroups). Where a
// group has several sets, dK and dV of a tile are added up in the workspace. In return few heads are under way at once,
// whose dQ stays in the L2 cache. If many CTAs would have no item in the last round, its items are split
// (split_last_round): several CTAs have some blocks of queries each.

namespace jaxmagi::sm90 {

// In which order the tiles of a section come: by position, from either end, or the longest tiles first.
enum class TileOrder { kFirstToLast, kLastToFirst, kLongestFirst };

// Work items of a mask are sorted by section, then by the order of their tiles, then by head set. A section is a number
// of head sets (of any example, where one mask serves all) whose queries stay in the L2 cache together. It has more
// where the balance of work needs them or, with a fixed order of sums, where tiles would often wait. The last section
// has an order of its own: the tiles at its end should be short, since CTAs have nothing to do behind it.
struct alignas(16) BackwardSchedule {
    int num_items, per_mask, per_section;  // numbers of work items
    int num_tiles, first_tile;             // of one mask; the position of the first one
    int head_sets, first_set, section;     // head sets of a mask, of which others come before, and of a section
    int heads_per_item, sets_per_key_head, group_size;  // query heads; head sets; query heads of a key head
    TileOrder order, last_order;           // of the tiles of all sections but the last, and of that one
    int last_section;                      // its first work item
    int first_split, num_splits, split_blocks;  // the first work item that is split; parts of one; blocks of a part
    int num_claims;                             // work items that are not split, and parts of those that are
    int chunk_blocks;  // blocks of queries of a tile after which its heads take turns

    // Returns true if dK and dV of a tile are added up in the workspace.
    JAXMAGI_HOST_DEVICE bool adds_gradients() const { return sets_per_key_head > 1; }
};

struct BackwardItem {
    int mask, rank, head_set;  // head_set counts those of the mask, example by example
    TileOrder order;           // in which the tile has the rank
    Range blocks;              // which of the tile's blocks of queries, in the order of the steps
};

// Returns true if the kernel has code that adds dK and dV up. In kernels of three consumer warpgroups, for head
// dimension 192, ptxas finds no registers for it.
constexpr bool can_add_gradients(int kernel_dim) {
    return kernel_dim != 192;
}

// Returns the query heads of a work item, unless it has whole groups. With groups of 8 heads of dimension 128, causal
// masks of 8k and 32k read and write up to 8 times as many bytes of DRAM if an item has all heads of a group, and take
// 19 and 9 % longer; with one head they take about as long as with two, but there are more sums of dK and dV.
inline int heads_of_item(const BackwardShape& shape, int kernel_dim) {
    const int group = shape.heads / shape.kv_heads;
    return not can_add_gradients(kernel_dim) ? group : group % 2 == 0 ? 2 : 1;
}

// Returns true if a key head has several head sets, so that dK and dV of a tile may be added up in the workspace.
inline bool may_add_gradients(const BackwardShape& shape, int kernel_dim) {
    return heads_of_item(shape, kernel_dim) < shape.heads / shape.kv_heads;
}

// Decides on the device whether work items have all query heads of a group although heads_of_item says fewer. There are
// then no sums of dK and dV to be added to, cleared and converted, which takes long in comparison with tiles of few
// blocks of queries. Items have whole groups if all tiles are short. They also have if at least half of the tiles are
// at most of medium length, and a quarter at least half as long as the longest, as with documents under a full mask: a
// few long items would end long after all others. Where most tiles are long it does not pay, since queries of all heads
// of a group leave the L2 cache before the next tile needs them, or the last round is far from full.
struct WholeGroups {
    const ScheduledTile* tiles;  // [num_masks, num_tiles], the longest of a mask first
    int num_masks, num_tiles;    // no masks: never
    int most_blocks;             // of queries of a tile

    __device__ __forceinline__ bool chosen() const;
};

// The most blocks of queries of a short tile, of one of medium length, and of the longest one, and the fewest work
// items that there have to be for a multiprocessor, unless others have work for it. All were chosen at D 128
// (docs/log/backward.md).
inline constexpr int kShortTileBlocks = 16, kMediumTileBlocks = 32, kWholeGroupBlocks = 128, kWholeGroupItems = 8;
// Queries of a tile after which its heads take turns; blocks of them, if work items have whole groups. Tiles of
// different lengths, which begin with the same block, then need the same queries of all heads at about the same time.
inline constexpr int kChunkQueries = 8192, kWholeGroupChunkBlocks = 16;
// The most masks that are looked at.
inline constexpr int kWholeGroupMasks = 64;

__device__ __forceinline__ bool WholeGroups::chosen() const {
    int longest = 0, quarter = INT32_MAX, median = 0;
#pragma unroll 8  // loads in flight
    for (int mask = 0; mask < num_masks; ++mask) {
        const ScheduledTile* const first = tiles + int64_t{mask} * num_tiles;
        longest = max(longest, first->num_blocks);
        quarter = min(quarter, first[num_tiles / 4].num_blocks);
        median = max(median, first[num_tiles / 2].num_blocks);
    }
    const bool few_are_long = median <= kMediumTileBlocks and longest - quarter <= quarter;
    return num_masks > 0 and (longest <= kShortTileBlocks or (longest <= most_blocks and few_are_long));
}

inline WholeGroups make_whole_groups(const BackwardParams& params, int kernel_dim) {
    const BackwardShape& shape = params.shape;
    const int num_tiles = shape.key_tiles;
    const int64_t items = int64_t{shape.batch} * shape.kv_heads * num_tiles;
    const bool are_enough = params.is_part or items >= int64_t{kWholeGroupItems} * params.num_sms;
    const bool possible =
        may_add_gradients(shape, kernel_dim) and params.num_masks <= kWholeGroupMasks and are_enough;
    // Long items of a last round that is not full would cost more than sums do.
    const int64_t rounds = ceil_div(items, int64_t{params.num_sms});
    const bool may_be_long = 25 * rounds * params.num_sms <= 26 * items;
    return {params.tiles, possible ? params.num_masks : 0, num_tiles,
            may_be_long ? kWholeGroupBlocks : kShortTileBlocks};
}

// How much of the L2 cache the queries, dO and dQ of a section may fill.
inline constexpr int64_t kBackwardSectionBytes = int64_t{32} << 20;

// Returns true if all tiles of a head set may be under way at a time with a fixed order of sums. Mirrored tiles then
// seldom wait for each other (tickets.cuh). With more tiles than run at a time, a mirrored tile would come to blocks of
// queries that have left the L2 cache.
inline bool has_few_tiles(int tiles, int num_sms) {
    return 4 * tiles <= num_sms;
}

// Returns how many CTAs work on one head set at a time with a fixed order of sums, if there are enough heads. Tiles of
// one head wait for each other, those behind a shared prefix for tiles that are many times as long: few CTAs seldom
// wait. Smaller tiles read more for each product, which more CTAs find in the L2 cache. Where all tiles are about as
// long, or long, each CTA is a step behind another and never waits again, so that a quarter of the tiles may be under
// way, and as many small ones as there are CTAs.
inline int ctas_per_head_set(TileShape tile, int tiles, int num_sms, bool even) {
    if (has_few_tiles(tiles, num_sms))
        return tiles;
    const bool small = tile.keys < 128;
    if (even)
        return small ? num_sms : std::max(32, tiles / 4);
    return small ? 32 : 8;
}

// Returns true if nearly all tiles of the first mask are about as long, or long enough to make up for a wait at their
// beginning. Tiles are those of a tile schedule.
__device__ __forceinline__ bool are_even(const ScheduledTile* tiles, int num_tiles) {
    constexpr int kLongBlocks = 128;
    const int short_one = tiles[num_tiles * 7 / 8].num_blocks;
    return 4 * short_one >= 3 * tiles[0].num_blocks or short_one >= kLongBlocks;
}

// The fewest steps of a part of a split item, and the most parts. Each part loads keys and adds dK and dV up, which
// takes as long as several steps (docs/log/backward.md).
inline constexpr int kSplitSteps = 16, kMostSplits = 16;

// Splits the work items of the last round if a quarter of the CTAs would have nothing to do. Parts add dK and dV up in
// any order, so nothing is split if the order of sums is fixed.
// items_before: work items of other stages, as if these came right before. more_tiles: of a head set, beside those that
// begin at multiples of their length. They are taken to have no rows, as if no document began a tile, which the device
// alone knows; then they come last where the longest come first.
inline void split_last_round(BackwardSchedule* schedule, const BackwardParams& params, bool is_followed,
                             int items_before, int last_sets, int more_tiles, int num_blocks) {
    const int without_steps = last_sets * more_tiles;
    const int num_items = schedule->num_items - params.num_masks * schedule->head_sets * more_tiles;
    const int last_round = std::min((items_before + num_items) % params.num_sms, num_items);
    const bool possible = schedule->adds_gradients() and not is_followed and not params.deterministic;
    const bool splits = possible and 0 < last_round and 4 * last_round <= 3 * params.num_sms;
    const int fewest_blocks = ceil_div(kSplitSteps, schedule->heads_per_item);
    schedule->first_split = schedule->num_items - (splits ? last_round + without_steps : 0);
    schedule->split_blocks = std::max(fewest_blocks, ceil_div(num_blocks, kMostSplits));
    schedule->num_splits = ceil_div(num_blocks, schedule->split_blocks);
    const int num_split = schedule->num_items - schedule->first_split;
    schedule->num_claims = schedule->first_split + num_split * schedule->num_splits;
}

// Returns the positions of tiles.
inline Range range_of(const BackwardParams& params, TileShape tile, KeyTiles tiles) {
    const int end = params.shape.key_tiles;
    const int own = params.own.length == params.shape.kv_len ? end : params.own.length / tile.keys;
    return {tiles == KeyTiles::kOthers ? own : 0, tiles == KeyTiles::kOwn ? own : end};
}

// heads: query heads of a work item. even: tiles are about as long, which matters if the order of sums is fixed.
// chunk_blocks: blocks of queries of a tile after which its heads take turns.
inline BackwardSchedule make_schedule(const BackwardParams& params, const BackwardStage& stage, TileShape tile,
                                      int heads, bool even, int chunk_blocks) {
    const BackwardShape& shape = params.shape;
    const int num_masks = params.num_masks, num_sms = params.num_sms;
    const bool deterministic = params.deterministic;
    const int group = shape.heads / shape.kv_heads, sets = group / heads;
    const Range positions = range_of(params, tile, stage.tiles);
    const int tiles = positions.end - positions.begin, first_set = stage.key_heads.begin * sets;
    const int head_sets = stage.key_heads.end * sets - first_set;
    if (tiles == 0 or head_sets == 0)  // warps that see this schedule may still work on the stage before
        return {.heads_per_item = heads, .sets_per_key_head = sets, .group_size = group, .chunk_blocks = chunk_blocks};
    const int64_t set_bytes = int64_t{shape.q_len} * heads * (6 * shape.dim + 2 * shape.v_dim);
    // In a smaller section, the longest tiles of the last section would end long after the others.
    const int64_t balanced = ceil_div(num_sms * 9 / 10, tiles);
    const int64_t seldom_waiting = deterministic ? num_sms / ctas_per_head_set(tile, tiles, num_sms, even) : 1;
    const int64_t wanted = std::max({int64_t{1}, seldom_waiting, balanced, kBackwardSectionBytes / set_bytes});
    const int sections = std::max(1, head_sets / static_cast<int>(std::min<int64_t>(wanted, head_sets)));
    const int section = ceil_div(head_sets, sections);
    const int num_items = num_masks * head_sets * tiles, last_sets = (head_sets - 1) % section + 1;
    BackwardSchedule schedule{.num_items = num_items,
                              .per_mask = head_sets * tiles,
                              .per_section = section * tiles,
                              .num_tiles = tiles,
                              .first_tile = positions.begin,
                              .head_sets = head_sets,
                              .first_set = first_set,
                              .section = section,
                              .heads_per_item = heads,
                              .sets_per_key_head = sets,
                              .group_size = group,
                              .order = TileOrder::kFirstToLast,
                              .last_order = TileOrder::kLongestFirst,
                              .last_section = num_items - last_sets * tiles,
                              .chunk_blocks = chunk_blocks};
    if (deterministic or stage.is_followed)
        schedule.last_order = TileOrder::kFirstToLast;
    if (deterministic and stage.tiles == KeyTiles::kAll and has_few_tiles(tiles, num_sms))
        schedule.order = TileOrder::kLastToFirst;
    const int items_before = num_masks * (first_set * positions.end + head_sets * positions.begin);
    const int more_tiles = shape.key_tiles - ceil_div(shape.kv_len, tile.keys);
    split_last_round(&schedule, params, stage.is_followed, items_before, last_sets, more_tiles,
                     ceil_div(shape.q_len, tile.rows));
    return schedule;
}

// Returns the blocks of a part of a split item. The last part has all that are left: a tile has more than a head has
// where several bands of the tile share a block.
JAXMAGI_HOST_DEVICE Range split_at(const BackwardSchedule& schedule, int part) {
    const bool last = part + 1 == schedule.num_splits;
    return {part * schedule.split_blocks, last ? INT32_MAX : (part + 1) * schedule.split_blocks};
}

JAXMAGI_HOST_DEVICE BackwardItem item_at(const BackwardSchedule& schedule, int claim) {
    int index = claim;
    Range blocks{0, INT32_MAX};
    if (const int split = claim - schedule.first_split; split >= 0) {
        index = schedule.first_split + split / schedule.num_splits;
        blocks = split_at(schedule, split % schedule.num_splits);
    }
    const int mask = index / schedule.per_mask;
    const TileOrder order = index < schedule.last_section ? schedule.order : schedule.last_order;
    index -= mask * schedule.per_mask;
    const int first = index / schedule.per_section * schedule.section;
    index -= first * schedule.num_tiles;
    const int rest = schedule.head_sets - first, width = rest < schedule.section ? rest : schedule.section;
    const int rank = index / width;
    return {mask, rank, schedule.first_set + first + index - rank * width, order, blocks};
}

}  // namespace jaxmagi::sm90
