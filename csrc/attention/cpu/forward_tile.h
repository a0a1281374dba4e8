#pragma once

#include "csrc/attention/cpu/gemm.h"
#include "csrc/attention/cpu/rows.h"
#include "csrc/attention/cpu/scores.h"
#include "csrc/attention/cpu/workspace_allocator.h"

// A forward tile keeps kTileRows queries of one head, and streams keys in tiles of kTileKeys.
//   Qᵀ [D, rows] is packed once, times the scale; then per band and key tile
//     K, V [keys, D] are read to the accumulation type
//     Sᵀ = K Qᵀ                                           [keys, rows]
//     soft cap, mask, row_max and row_sum, Pᵀ = exp(Sᵀ - row_max)
//     Oᵀ = exp(previous row_max - row_max) Oᵀ + Vᵀ Pᵀ     [Dv, rows]
//   and at the end O = Oᵀ / row_sum is stored with lse = row_max + log(row_sum).
// Bands follow one another in the same online softmax, so a cell of two bands counts twice.

namespace jaxmagi::cpu::JAXMAGI_ISA {

template <typename T> struct ForwardWorkspace {
    WorkspaceAllocator<T> allocator;
    int64_t dim, v_dim;
    T* q = allocator.allocate(dim * kTileRows);
    T* k = allocator.allocate(dim * kTileKeys);
    T* v = allocator.allocate(v_dim * kTileKeys);
    T* scores = allocator.allocate(kTileKeys * kTileRows);
    T* out = allocator.allocate(v_dim * kTileRows);
    T* row_max = allocator.allocate(kTileRows);
    T* row_sum = allocator.allocate(kTileRows);
    T* correction = allocator.allocate(kTileRows);

    ForwardWorkspace(void* base, int64_t dim, int64_t v_dim) : allocator(base), dim(dim), v_dim(v_dim) {}
    static int64_t bytes(int64_t dim, int64_t v_dim) {
        return ForwardWorkspace(nullptr, dim, v_dim).allocator.bytes();
    }
};

template <typename T> class ForwardTileKernel {
public:
    ForwardTileKernel(const ForwardTile& tile, void* workspace)
        : tile_(tile), params_(*tile.params), dim_(params_.q.dim), v_dim_(params_.v.dim),
          kv_head_(tile.head / (params_.q.heads / params_.k.heads)), soft_cap_(static_cast<T>(params_.soft_cap)),
          ws_(workspace, dim_, v_dim_) {}

    void run() {
        load_q();
        fill(ws_.row_max, kTileRows, -kInfinity<T>);
        fill(ws_.row_sum, kTileRows, T(0));
        fill(ws_.out, v_dim_ * kTileRows, T(0));
        for_each_key_tile(tile_.visible, tile_.rows, {0, static_cast<int>(params_.k.length)},
                          [&](const Band& band, Range keys) { add_keys(band, keys); });
        store_out();
    }

private:
    void load_q() {
        fill(ws_.q, dim_ * kTileRows, T(0));
        for (int i = 0; i < tile_.rows.end - tile_.rows.begin; ++i)
            read_row(params_.q, query_row(i), static_cast<T>(params_.scale), ws_.q + i, kTileRows);
    }

    void add_keys(const Band& band, Range keys) {
        const int count = keys.end - keys.begin;
        const RowId first{tile_.batch, keys.begin, kv_head_};
        read_rows(params_.k, first, count, ws_.k);
        read_rows(params_.v, first, count, ws_.v);
        gemm<T>(count, kTileRows, dim_, {ws_.k, dim_, 1}, {ws_.q, kTileRows}, {ws_.scores, kTileRows}, false);
        if (soft_cap_ > 0)
            cap_scores(count);
        if (not covers(band, tile_.rows, keys))
            apply_mask(band, keys);
        update_softmax(count);
        rescale_out();
        gemm<T>(v_dim_, kTileRows, count, {ws_.v, 1, v_dim_}, {ws_.scores, kTileRows}, {ws_.out, kTileRows}, true);
    }

    void cap_scores(int count) {
        for (int i = 0; i < count * kTileRows; i += kLanes<T>)
            store(ws_.scores + i, apply_soft_cap<T>(load(ws_.scores + i), soft_cap_));
    }

    // Masking selects and never adds: the score of a masked cell may be NaN.
    void apply_mask(const Band& band, Range keys) {
        for (int key = keys.begin; key < keys.end; ++key) {
            T* row = ws_.scores + (key - keys.begin) * kTileRows;
            const VisibleLanes<T> visible(band, key, tile_.rows);
            for (int column = 0; column < kTileRows; column += kLanes<T>)
                store(row + column, visible.at(column) ? load(row + column) : broadcast(-kInfinity<T>));
        }
    }

    // Turns scores into probabilities relative to the new row_max, a group of vectors of queries at a time.
    void update_softmax(int count) {
        constexpr int kGroup = kTileRows / kLanes<T> < 4 ? kTileRows / kLanes<T> : 4;
        for (int column = 0; column < kTileRows; column += kGroup * kLanes<T>)
            update_columns<kGroup>(count, column);
    }

    template <int kGroup> void update_columns(int count, int column) {
        vec_t<T> row_max[kGroup], shift[kGroup], row_sum[kGroup];
        for (int j = 0; j < kGroup; ++j)
            row_max[j] = load(ws_.row_max + column + j * kLanes<T>);
        for (int i = 0; i < count; ++i)
            for (int j = 0; j < kGroup; ++j) {
                const vec_t<T> score = load(ws_.scores + i * kTileRows + column + j * kLanes<T>);
                row_max[j] = score > row_max[j] ? score : row_max[j];
            }
        for (int j = 0; j < kGroup; ++j) {
            const int at = column + j * kLanes<T>;
            // A row that has been fully masked so far has row_max = -inf, and -inf - -inf would be NaN.
            shift[j] = row_max[j] == -kInfinity<T> ? vec_t<T>{} : row_max[j];
            const vec_t<T> correction = exp<T>(load(ws_.row_max + at) - shift[j]);
            row_sum[j] = load(ws_.row_sum + at) * correction;
            store(ws_.correction + at, correction);
            store(ws_.row_max + at, row_max[j]);
        }
        for (int i = 0; i < count; ++i)
            for (int j = 0; j < kGroup; ++j) {
                T* score = ws_.scores + i * kTileRows + column + j * kLanes<T>;
                const vec_t<T> p = exp<T>(load(score) - shift[j]);
                store(score, p);
                row_sum[j] += p;
            }
        for (int j = 0; j < kGroup; ++j)
            store(ws_.row_sum + column + j * kLanes<T>, row_sum[j]);
    }

    void rescale_out() {
        for (int column = 0; column < kTileRows; column += kLanes<T>) {
            const vec_t<T> correction = load(ws_.correction + column);
            for (int64_t i = 0; i < v_dim_; ++i) {
                T* out = ws_.out + i * kTileRows + column;
                store(out, load(out) * correction);
            }
        }
    }

    void store_out() {
        const T sink = static_cast<const T*>(params_.sinks)[tile_.head];
        T* lse = static_cast<T*>(params_.lse);
        for (int i = 0; i < tile_.rows.end - tile_.rows.begin; ++i) {
            const RowId id = query_row(i);
            T& row_lse = lse[row_index(params_.q, id)];
            if (ws_.row_sum[i] == T(0)) {  // the row is fully masked, or all its scores are -inf
                row_lse = -kInfinity<T>;
                zero_row<T>(params_.out, id);
                continue;
            }
            const T row_max = sink > ws_.row_max[i] ? sink : ws_.row_max[i];
            const T correction = __builtin_exp(ws_.row_max[i] - row_max);
            const T row_sum = ws_.row_sum[i] * correction + static_cast<T>(__builtin_exp(sink - row_max));
            row_lse = row_max + static_cast<T>(__builtin_log(row_sum));
            write_row(params_.out, id, correction / row_sum, ws_.out + i, kTileRows);
        }
    }

    RowId query_row(int i) const { return {tile_.batch, tile_.rows.begin + i, tile_.head}; }

    const ForwardTile& tile_;
    const ForwardParams& params_;
    const int64_t dim_, v_dim_, kv_head_;
    const T soft_cap_;
    const ForwardWorkspace<T> ws_;
};

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
