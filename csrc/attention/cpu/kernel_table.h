#pragma once

#include <cstdint>

#include "csrc/attention/cpu/params.h"
#include "csrc/mask/band.h"

namespace jaxmagi::cpu {

inline constexpr int kTileRows = 64;    // queries of a tile
inline constexpr int kTileKeys = 64;    // keys of a tile: its scores stay in the L1 cache
inline constexpr int kChunkKeys = 256;  // keys of a backward work item: their gradients stay in the L2 cache
inline constexpr int kWorkspaceAlignment = 64;

// The bands of a mask at the positions `ids`.
struct BandList {
    const Band* bands;
    const int* ids;
    int count;
};

// A forward work item: the output of `rows`, at most kTileRows, of one head.
struct ForwardTile {
    const ForwardParams* params;
    int64_t batch, head;
    Range rows;
    BandList visible;
};

// A backward work item: the gradients of `keys`, at most kChunkKeys, of one key head.
struct KeyChunk {
    const BackwardParams* params;
    int64_t batch, kv_head;
    Range keys;
};

// A step of a backward work item: a tile of queries of one query head.
struct BackwardTile {
    KeyChunk chunk;
    int64_t head;
    Range rows;
    BandList visible;
};

// The sum over key chunks of a query tile's dQ, transposed: [dim, kTileRows] in the accumulation type.
struct DqAccumulator {
    void* sum;
    bool first, last;  // the first chunk stores instead of adding, the last chunk writes dq
};

// The functions of one accumulation type and instruction set. Workspaces are aligned to kWorkspaceAlignment.
struct KernelTable {
    int64_t (*forward_workspace_bytes)(int64_t dim, int64_t v_dim);
    void (*forward_tile)(const ForwardTile& tile, void* workspace);

    int64_t (*backward_workspace_bytes)(int64_t dim, int64_t v_dim);
    void (*load_chunk)(const KeyChunk& chunk, void* workspace);       // reads K and V, zeroes dK and dV
    void (*backward_tile)(const BackwardTile& tile, void* workspace);  // adds to dK and dV, computes dQ of the step
    void (*add_dq)(const BackwardTile& tile, DqAccumulator dq, void* workspace);
    void (*store_chunk)(const KeyChunk& chunk, void* workspace);      // writes dK and dV
    void (*zero_dq)(const BackwardParams& params, int64_t batch, int64_t head, Range rows);
};

}  // namespace jaxmagi::cpu
