#pragma once

#include "csrc/attention/sm90/backward/key_gradients.cuh"
#include "csrc/attention/sm90/tile_schedule.h"
#include "csrc/mask/band.h"

// Records that the warps of a backward kernel pass on in shared memory: work items, runs of blocks of queries, steps.

namespace jaxmagi::sm90 {

// One tile of keys with a head set of one key head, or some blocks of queries of it, for the consumers.
struct alignas(16) BackwardWorkItem {
    uint32_t visible[4];  // a bit for each key: set if some query sees the key, or if it is behind end_key
    int num_steps;  // blocks of queries of all heads of the item; 0: no query sees a key; -1: no more work items
    int key, end_key;  // the keys of the tile, at most kKeys
    int key_head, example;
    bool all_visible;
    bool is_final;  // where dk and dv go (key_gradients.cuh)
};

// One block of queries of one head, for the consumers and the reducer. Columns are queries. Columns [max(first_column,
// r + lower), min(end_column, r + upper)) see key r of the tile if key_begin <= r < key_end, and no column does
// otherwise. In a step that is not masked every column sees every key.
struct alignas(16) StepDescriptor {
    int key_begin, key_end, lower, upper;  // read together
    int first_column, end_column;          // read together
    bool masked, last, mirrored;  // last: of the work item; mirrored: of its tile (tickets.cuh)
    int head;  // query head of all examples; -1: no more steps
    int row;  // first row of the sums of dQ, panel by panel: 2^31 of them would take 512 GiB
    int mask, block, band, tile;  // fix the order of sums: block of queries in its head, index of the band in the mask
};

// Blocks of queries of one head that see keys of a tile in one band, for the producer.
struct alignas(16) BackwardBandRun {
    int key_begin, key_end;        // keys of the band in the tile, counted from the tile's first key
    int lower, upper;              // queries [lower, upper) see the first key, [lower + 1, upper + 1) the next one
    int first_query, end_query;    // queries of the band
    Range blocks, unmasked;        // those of the run; those of the band in which every query sees every key
    int band, head;
    int item;                      // number of work items that the CTA had before
    int key, key_head, example, mask, tile;  // first key of the tile; its index
    bool first, mirrored;          // first run of the work item; blocks come from the first to the last
    int origin;  // query at which block 0 begins, one of the first kRows. At another place here, ptxas would spill
};

// The tile of keys that the scheduler works on. It is in shared memory because the scheduler has few registers.
struct alignas(16) CurrentTile {
    int item, index;   // number of work items before; of the tile in its mask
    int key, end_key;  // its keys, at most kKeys
    int first_band, end_band, mask, key_head, example, first_head;
    const ScheduledBand* bands;  // of the mask
    int stage, variant;          // of the launch; of its schedules
    bool has_no_run, mirrored;   // no run of the tile was written yet; bands and blocks come from the first to the last
    Range blocks;                // of queries, over all bands: those of the work item
    // The chunk of blocks that runs are written of, of one head; the next band and the blocks of those before it.
    int chunk, head, band, blocks_before;
};

}  // namespace jaxmagi::sm90
