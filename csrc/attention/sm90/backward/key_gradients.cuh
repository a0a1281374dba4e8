#pragma once

#include <cstdint>

#include "csrc/attention/sm90/backward/schedule.cuh"

// Where gradients of keys and values are stored. In context attention, those of an own tile that no other rank adds to
// are final: they are stored where and as the program wants them. Those of other tiles are stored in fp32, to be added
// up. Outside of it none are final, and all are stored as the program wants them.

namespace jaxmagi::sm90 {

struct KeyGradients {
    void *dk, *dv;  // [batch, length, row_heads, dim or v_dim]
    int length, row_heads;
    bool f32;
};

struct AllKeyGradients {
    KeyGradients summed, final;
    const uint8_t* is_summed;  // FinalGradients
    int own_tiles;

    __device__ __forceinline__ bool is_final(int example, int tile) const {
        return is_summed != nullptr and tile < own_tiles and not is_summed[int64_t{example} * own_tiles + tile];
    }
    __device__ __forceinline__ const KeyGradients& of(bool is_final) const { return is_final ? final : summed; }
};

inline AllKeyGradients make_key_gradients(const BackwardParams& params, TileShape tile) {
    const BackwardShape& shape = params.shape;
    return {.summed = {params.dk, params.dv, shape.kv_len, shape.kv_heads, params.key_gradients_f32},
            .final = {params.final.dk, params.final.dv, params.own.length, params.own.row_heads, false},
            .is_summed = params.final.is_summed,
            .own_tiles = range_of(params, tile, KeyTiles::kOwn).end};
}

}  // namespace jaxmagi::sm90
