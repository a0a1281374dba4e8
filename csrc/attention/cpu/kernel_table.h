#pragma once

#include <cstdint>

#include "csrc/attention/cpu/params.h"
#include "csrc/mask/band.h"

namespace jaxmagi::cpu {

inline constexpr int kTileRows = 64;    // queries of a tile
inline constexpr int kTileKeys = 64;    // keys of a tile: its scores stay in the L1 cache
inline constexpr int kChunkKeys = 256;  // keys whose gradients a backward item accumulates, in the L2 cache

// Bands of a mask chosen by their position in `bands`.
struct BandList {
    const Band* bands;
    const int* ids;
    int count;
};

// The output of `rows` (at most kTileRows) of one head.
struct ForwardTile {
    const ForwardParams* params;
    int64_t batch, head;
    Range rows;
    BandList visible;
};

// The keys (at most kChunkKeys) of one key head, whose gradients a backward item owns.
struct KeyChunk {
    const BackwardParams* params;
    int64_t batch, kv_head;
    Range keys;
};

// One visit of a key chunk to a tile of queries of one query head.
struct BackwardTile {
    KeyChunk chunk;
    int64_t head;
    Range rows;
    BandList visible;
};

// The sum of a query tile's dQ over key chunks, transposed: [dim, kTileRows] in the accumulation type.
struct QueryGrad {
    void* sum;
    bool first, last;  // the first visit stores instead of adding, the last one writes dq
};

// The functions of one accumulation type and instruction set. Workspaces are aligned to kWorkspaceAlignment.
struct KernelTable {
    int64_t (*forward_workspace_bytes)(int64_t dim, int64_t value_dim);
    void (*forward_tile)(const ForwardTile& tile, void* workspace);

    int64_t (*backward_workspace_bytes)(int64_t dim, int64_t value_dim);
    void (*load_chunk)(const KeyChunk& chunk, void* workspace);           // reads K, V; clears dK, dV
    void (*visit_tile)(const BackwardTile& tile, void* workspace);        // adds to dK, dV; leaves the visit's dQ
    void (*add_query_grad)(const BackwardTile& tile, QueryGrad grad, void* workspace);
    void (*store_chunk)(const KeyChunk& chunk, void* workspace);          // writes dK, dV
    void (*clear_query_grad)(const BackwardParams& params, int64_t batch, int64_t head, Range rows);
};

inline constexpr int kWorkspaceAlignment = 64;

}  // namespace jaxmagi::cpu
