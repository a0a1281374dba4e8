#pragma once

#include "csrc/attention/cpu/gemm.h"
#include "csrc/attention/cpu/rows.h"
#include "csrc/attention/cpu/scores.h"
#include "csrc/attention/cpu/workspace_allocator.h"

// A backward work item keeps a chunk of kChunkKeys keys of one key head, and streams query tiles of every query head
// of its group. Q and dO of a query tile are read, and transposed; then per band and key tile
//     Sᵀ = K Qᵀ, dPᵀ = V dOᵀ                              [keys, rows]
//     soft cap, mask, Pᵀ = exp(Sᵀ - lse), dSᵀ = Pᵀ (dPᵀ - δ)
//     dV += Pᵀ dO,  dK += dSᵀ Q                            [keys, D]
//     dQᵀ += Kᵀ dSᵀ                                        [D, rows]
// Q is read times the scale, so only dQ is left to be scaled when it is stored.
// Sums over keys and rows span exactly those of the band, so that 0 · NaN of a key or query outside never occurs.

namespace jaxmagi::cpu::JAXMAGI_ISA {

template <typename T> struct BackwardWorkspace {
    WorkspaceAllocator<T> allocator;
    int64_t dim, v_dim;
    int64_t padded_dim = round_up(dim, kLanes<T>), padded_v_dim = round_up(v_dim, kLanes<T>);
    T* k = allocator.allocate(dim * kChunkKeys);
    T* v = allocator.allocate(v_dim * kChunkKeys);
    T* dk = allocator.allocate(padded_dim * kChunkKeys);
    T* dv = allocator.allocate(padded_v_dim * kChunkKeys);
    T* q = allocator.allocate(padded_dim * kTileRows);
    T* q_t = allocator.allocate(dim * kTileRows);
    T* dout = allocator.allocate(padded_v_dim * kTileRows);
    T* dout_t = allocator.allocate(v_dim * kTileRows);
    T* lse = allocator.allocate(kTileRows);
    T* delta = allocator.allocate(kTileRows);
    T* p = allocator.allocate(kTileKeys * kTileRows);
    T* ds = allocator.allocate(kTileKeys * kTileRows);
    T* dq_t = allocator.allocate(dim * kTileRows);

    BackwardWorkspace(void* base, int64_t dim, int64_t v_dim) : allocator(base), dim(dim), v_dim(v_dim) {}
    static int64_t bytes(int64_t dim, int64_t v_dim) {
        return BackwardWorkspace(nullptr, dim, v_dim).allocator.bytes();
    }
};

template <typename T> class KeyChunkKernel {
public:
    KeyChunkKernel(const KeyChunk& chunk, void* workspace)
        : chunk_(chunk), params_(*chunk.params), count_(chunk.keys.end - chunk.keys.begin),
          ws_(workspace, params_.q.dim, params_.v.dim) {}

    void load() {
        const RowId first{chunk_.batch, chunk_.keys.begin, chunk_.kv_head};
        read_rows(params_.k, first, count_, ws_.k);
        read_rows(params_.v, first, count_, ws_.v);
        fill(ws_.dk, count_ * ws_.padded_dim, T(0));
        fill(ws_.dv, count_ * ws_.padded_v_dim, T(0));
        // The padding columns of Q and dO are multiplied too, and query tiles do not write them.
        fill(ws_.q, kTileRows * ws_.padded_dim, T(0));
        fill(ws_.dout, kTileRows * ws_.padded_v_dim, T(0));
    }

    void store() {
        for (int i = 0; i < count_; ++i) {
            const RowId id{chunk_.batch, chunk_.keys.begin + i, chunk_.kv_head};
            write_row(params_.dk, id, T(1), ws_.dk + i * ws_.padded_dim, 1);
            write_row(params_.dv, id, T(1), ws_.dv + i * ws_.padded_v_dim, 1);
        }
    }

private:
    const KeyChunk& chunk_;
    const BackwardParams& params_;
    const int count_;
    const BackwardWorkspace<T> ws_;
};

template <typename T> class BackwardTileKernel {
public:
    BackwardTileKernel(const BackwardTile& tile, void* workspace)
        : tile_(tile), params_(*tile.chunk.params), dim_(params_.q.dim), v_dim_(params_.v.dim),
          soft_cap_(static_cast<T>(params_.soft_cap)), ws_(workspace, dim_, v_dim_) {}

    void run() {
        load_rows();
        fill(ws_.dq_t, dim_ * kTileRows, T(0));
        for_each_key_tile(tile_.visible, tile_.rows, tile_.chunk.keys,
                          [&](const Band& band, Range keys) { add_keys(band, keys); });
    }

    void add_dq(DqAccumulator dq) {
        T* sum = static_cast<T*>(dq.sum);
        for (int64_t i = 0; i < dim_ * kTileRows; i += kLanes<T>) {
            const vec_t<T> step = load(ws_.dq_t + i);
            store(sum + i, dq.first ? step : load(sum + i) + step);
        }
        if (dq.last)
            store_dq(sum);
    }

private:
    void store_dq(const T* sum) {
        for (int i = 0; i < tile_.rows.end - tile_.rows.begin; ++i) {
            if (ws_.lse[i] == -kInfinity<T>)  // all scores are -inf, and the sum may hold 0 · inf of a key
                zero_row<T>(params_.dq, query_row(i));
            else
                write_row(params_.dq, query_row(i), static_cast<T>(params_.scale), sum + i, kTileRows);
        }
    }

    // Rows beyond the end get lse = -inf, as fully masked rows have it. Rows with lse = -inf have probability 0
    // everywhere, and zeros in place of Q and dO, which may hold NaN.
    void load_rows() {
        const int count = tile_.rows.end - tile_.rows.begin;
        for (int i = 0; i < kTileRows; ++i) {
            const RowId id = query_row(i);
            const int64_t at = row_index(params_.q, id);
            const bool visible = i < count and static_cast<const T*>(params_.lse)[at] != -kInfinity<T>;
            ws_.lse[i] = visible ? static_cast<const T*>(params_.lse)[at] : -kInfinity<T>;
            ws_.delta[i] = visible ? static_cast<const T*>(params_.delta)[at] : T(0);
            T *q = ws_.q + i * ws_.padded_dim, *dout = ws_.dout + i * ws_.padded_v_dim;
            if (visible) {
                read_row(params_.q, id, static_cast<T>(params_.scale), q, 1);
                read_row(params_.dout, id, T(1), dout, 1);
            } else {
                fill(q, dim_, T(0));
                fill(dout, v_dim_, T(0));
            }
        }
        transpose(ws_.q, ws_.padded_dim, dim_, ws_.q_t);
        transpose(ws_.dout, ws_.padded_v_dim, v_dim_, ws_.dout_t);
    }

    static void transpose(const T* from, int64_t stride, int64_t columns, T* into) {
        for (int64_t j = 0; j < columns; ++j)
            for (int i = 0; i < kTileRows; ++i)
                into[j * kTileRows + i] = from[i * stride + j];
    }

    void add_keys(const Band& band, Range keys) {
        const int count = keys.end - keys.begin, first = keys.begin - tile_.chunk.keys.begin;
        const T *k = ws_.k + first * dim_, *v = ws_.v + first * v_dim_;
        gemm<T>(count, kTileRows, dim_, {k, dim_, 1}, {ws_.q_t, kTileRows}, {ws_.p, kTileRows}, false);
        gemm<T>(count, kTileRows, v_dim_, {v, v_dim_, 1}, {ws_.dout_t, kTileRows}, {ws_.ds, kTileRows}, false);
        compute_p_and_ds(band, keys);
        // Rows outside the band have probability 0 for these keys but may hold NaN: sums span the band's rows.
        const Range rows = intersect(rows_of_keys(band, keys), tile_.rows);
        const int row = rows.begin - tile_.rows.begin, depth = rows.end - rows.begin;
        gemm<T>(count, ws_.padded_v_dim, depth, {ws_.p + row, kTileRows, 1},
                {ws_.dout + row * ws_.padded_v_dim, ws_.padded_v_dim},
                {ws_.dv + first * ws_.padded_v_dim, ws_.padded_v_dim}, true);
        gemm<T>(count, ws_.padded_dim, depth, {ws_.ds + row, kTileRows, 1},
                {ws_.q + row * ws_.padded_dim, ws_.padded_dim}, {ws_.dk + first * ws_.padded_dim, ws_.padded_dim},
                true);
        gemm<T>(dim_, kTileRows, count, {k, 1, dim_}, {ws_.ds, kTileRows}, {ws_.dq_t, kTileRows}, true);
    }

    // Turns the scores in `p` into P, and dP in `ds` into dS.
    void compute_p_and_ds(const Band& band, Range keys) {
        for (int key = keys.begin; key < keys.end; ++key) {
            const VisibleLanes<T> visible_lanes(band, key, tile_.rows);
            for (int column = 0; column < kTileRows; column += kLanes<T>) {
                T* p = ws_.p + (key - keys.begin) * kTileRows + column;
                T* ds = ws_.ds + (key - keys.begin) * kTileRows + column;
                vec_t<T> score = load(p), slope = broadcast(T(1));
                if (soft_cap_ > 0) {
                    score = apply_soft_cap<T>(score, soft_cap_);
                    slope -= (score / soft_cap_) * (score / soft_cap_);
                }
                const vec_t<T> lse = load(ws_.lse + column);
                const bits_t<T> visible = visible_lanes.at(column) & (lse != -kInfinity<T>);
                const vec_t<T> probability = visible ? exp<T>(score - lse) : vec_t<T>{};
                const vec_t<T> ds_visible = probability * (load(ds) - load(ws_.delta + column)) * slope;
                store(p, probability);
                store(ds, visible ? ds_visible : vec_t<T>{});
            }
        }
    }

    RowId query_row(int i) const { return {tile_.chunk.batch, tile_.rows.begin + i, tile_.head}; }

    const BackwardTile& tile_;
    const BackwardParams& params_;
    const int64_t dim_, v_dim_;
    const T soft_cap_;
    const BackwardWorkspace<T> ws_;
};

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
