#pragma once

#include "csrc/attention/cpu/carver.h"
#include "csrc/attention/cpu/gemm.h"
#include "csrc/attention/cpu/rows.h"
#include "csrc/attention/cpu/scores.h"

// Schedule of a backward item: a chunk of kChunkKeys keys of one key head stays, query tiles of every query head of
// its group stream past. Per query tile Q and dO are read, both ways round; then per band and key tile
//     Sᵀ = K Qᵀ, dPᵀ = V dOᵀ                              [keys, rows]
//     cap, mask, Pᵀ = exp(Sᵀ - lse), dSᵀ = Pᵀ (dPᵀ - δ)
//     dV += Pᵀ dO,  dK += dSᵀ Q                            [keys, D]
//     dQᵀ += Kᵀ dSᵀ                                        [D, rows]
// Q is read times the scale, so only dQ is still to be scaled when it leaves.
// Sums over keys and rows span exactly those that the band joins: 0 · NaN of a key or query outside never occurs.

namespace jaxmagi::cpu::JAXMAGI_ISA {

template <typename T> struct BackwardWorkspace {
    T *keys, *values, *key_grads, *value_grads;
    T *query, *query_t, *dout, *dout_t, *lse, *delta;
    T *probs, *score_grads, *query_grad_t;
    int64_t padded_dim, padded_value_dim, size;

    BackwardWorkspace(void* base, int64_t dim, int64_t value_dim)
        : padded_dim(round_up(dim, kLanes<T>)), padded_value_dim(round_up(value_dim, kLanes<T>)) {
        Carver<T> carver(base);
        keys = carver.take(dim * kChunkKeys);
        values = carver.take(value_dim * kChunkKeys);
        key_grads = carver.take(padded_dim * kChunkKeys);
        value_grads = carver.take(padded_value_dim * kChunkKeys);
        query = carver.take(padded_dim * kTileRows);
        query_t = carver.take(dim * kTileRows);
        dout = carver.take(padded_value_dim * kTileRows);
        dout_t = carver.take(value_dim * kTileRows);
        lse = carver.take(kTileRows);
        delta = carver.take(kTileRows);
        probs = carver.take(kTileKeys * kTileRows);
        score_grads = carver.take(kTileKeys * kTileRows);
        query_grad_t = carver.take(dim * kTileRows);
        size = carver.bytes();
    }
    static int64_t bytes(int64_t dim, int64_t value_dim) { return BackwardWorkspace(nullptr, dim, value_dim).size; }
};

template <typename T> class KeyChunkKernel {
public:
    KeyChunkKernel(const KeyChunk& chunk, void* workspace)
        : chunk_(chunk), params_(*chunk.params), ws_(workspace, params_.q.dim, params_.v.dim) {}

    void load_chunk() {
        const int count = chunk_.keys.end - chunk_.keys.begin;
        const RowId first{chunk_.batch, chunk_.keys.begin, chunk_.kv_head};
        read_rows(params_.k, first, count, T(1), ws_.keys, params_.k.dim);
        read_rows(params_.v, first, count, T(1), ws_.values, params_.v.dim);
        for (int64_t i = 0; i < count * ws_.padded_dim; ++i)
            ws_.key_grads[i] = T(0);
        for (int64_t i = 0; i < count * ws_.padded_value_dim; ++i)
            ws_.value_grads[i] = T(0);
        // The padding columns of Q and dO are multiplied too; visits leave them as they are.
        for (int64_t i = 0; i < kTileRows * ws_.padded_dim; ++i)
            ws_.query[i] = T(0);
        for (int64_t i = 0; i < kTileRows * ws_.padded_value_dim; ++i)
            ws_.dout[i] = T(0);
    }

    void store_chunk() {
        for (int i = 0; i < chunk_.keys.end - chunk_.keys.begin; ++i) {
            const RowId id{chunk_.batch, chunk_.keys.begin + i, chunk_.kv_head};
            write_row(params_.dk, id, T(1), ws_.key_grads + i * ws_.padded_dim, 1);
            write_row(params_.dv, id, T(1), ws_.value_grads + i * ws_.padded_value_dim, 1);
        }
    }

private:
    const KeyChunk& chunk_;
    const BackwardParams& params_;
    const BackwardWorkspace<T> ws_;
};

template <typename T> class BackwardTileKernel {
public:
    BackwardTileKernel(const BackwardTile& tile, void* workspace)
        : tile_(tile), params_(*tile.chunk.params), dim_(params_.q.dim), value_dim_(params_.v.dim),
          soft_cap_(static_cast<T>(params_.soft_cap)), ws_(workspace, dim_, value_dim_) {}

    void visit() {
        load_rows();
        for (int64_t i = 0; i < dim_ * kTileRows; ++i)
            ws_.query_grad_t[i] = T(0);
        for (int i = 0; i < tile_.visible.count; ++i) {
            const Band& whole = tile_.visible.bands[tile_.visible.ids[i]];
            const Band band = crop(whole, tile_.rows, tile_.chunk.keys);
            const Range seen = seen_keys(band, tile_.chunk.keys);
            for (int key = seen.begin; key < seen.end; key += kTileKeys)
                add_keys(band, intersect(seen, {key, key + kTileKeys}));
        }
    }

    void add_query_grad(QueryGrad grad) {
        T* sum = static_cast<T*>(grad.sum);
        for (int64_t i = 0; i < dim_ * kTileRows; i += kLanes<T>) {
            const vec_t<T> visit = load(ws_.query_grad_t + i);
            store(sum + i, grad.first ? visit : load(sum + i) + visit);
        }
        if (grad.last)
            write_query_grad(sum);
    }

private:
    void write_query_grad(const T* sum) {
        for (int i = 0; i < tile_.rows.end - tile_.rows.begin; ++i) {
            if (ws_.lse[i] == -kInfinity<T>)  // only scores of -inf: the sum may hold 0 · inf of a key
                clear_row<T>(params_.dq, query_row(i));
            else
                write_row(params_.dq, query_row(i), static_cast<T>(params_.scale), sum + i, kTileRows);
        }
    }

    // Rows beyond the end get lse = -inf like those without any finite score; such rows have probability 0 everywhere,
    // and zeros for Q and dO, which may hold NaN.
    void load_rows() {
        const int count = tile_.rows.end - tile_.rows.begin;
        for (int i = 0; i < kTileRows; ++i) {
            const RowId id = query_row(i);
            const int64_t at = row_index(params_.q, id);
            const bool sees = i < count and static_cast<const T*>(params_.lse)[at] != -kInfinity<T>;
            ws_.lse[i] = sees ? static_cast<const T*>(params_.lse)[at] : -kInfinity<T>;
            ws_.delta[i] = sees ? static_cast<const T*>(params_.delta)[at] : T(0);
            if (sees) {
                read_row(params_.q, id, static_cast<T>(params_.scale), ws_.query + i * ws_.padded_dim, 1);
                read_row(params_.dout, id, T(1), ws_.dout + i * ws_.padded_value_dim, 1);
            } else {
                for (int64_t j = 0; j < dim_; ++j)
                    ws_.query[i * ws_.padded_dim + j] = T(0);
                for (int64_t j = 0; j < value_dim_; ++j)
                    ws_.dout[i * ws_.padded_value_dim + j] = T(0);
            }
        }
        transpose(ws_.query, ws_.padded_dim, dim_, ws_.query_t);
        transpose(ws_.dout, ws_.padded_value_dim, value_dim_, ws_.dout_t);
    }

    static void transpose(const T* from, int64_t stride, int64_t columns, T* into) {
        for (int64_t j = 0; j < columns; ++j)
            for (int i = 0; i < kTileRows; ++i)
                into[j * kTileRows + i] = from[i * stride + j];
    }

    void add_keys(const Band& band, Range keys) {
        const int count = keys.end - keys.begin;
        const int at = keys.begin - tile_.chunk.keys.begin;
        const T* k = ws_.keys + at * dim_;
        const T* v = ws_.values + at * value_dim_;
        gemm<T>(count, kTileRows, dim_, {k, dim_, 1}, {ws_.query_t, kTileRows}, {ws_.probs, kTileRows}, false);
        gemm<T>(count, kTileRows, value_dim_, {v, value_dim_, 1}, {ws_.dout_t, kTileRows},
                {ws_.score_grads, kTileRows}, false);
        const bool masked = not covers(band, tile_.rows, keys);
        for (int i = 0; i < count; ++i) {
            const Range seeing = masked ? seeing_lanes(band, keys.begin + i, tile_.rows) : Range{0, kTileRows};
            differentiate_row(i, LaneInterval<T>(seeing));
        }
        // Keys outside a row's interval have probability 0 but their rows may be NaN: sums keep to the band's rows.
        const Range joined = rows_of_keys(band, keys);
        const int row = joined.begin - tile_.rows.begin, depth = joined.end - joined.begin;
        gemm<T>(count, ws_.padded_value_dim, depth, {ws_.probs + row, kTileRows, 1},
                {ws_.dout + row * ws_.padded_value_dim, ws_.padded_value_dim},
                {ws_.value_grads + at * ws_.padded_value_dim, ws_.padded_value_dim}, true);
        gemm<T>(count, ws_.padded_dim, depth, {ws_.score_grads + row, kTileRows, 1},
                {ws_.query + row * ws_.padded_dim, ws_.padded_dim},
                {ws_.key_grads + at * ws_.padded_dim, ws_.padded_dim}, true);
        gemm<T>(dim_, kTileRows, count, {k, 1, dim_}, {ws_.score_grads, kTileRows}, {ws_.query_grad_t, kTileRows},
                true);
    }

    // Scores and dP of one key become P and dS.
    void differentiate_row(int i, const LaneInterval<T>& seeing) {
        for (int column = 0; column < kTileRows; column += kLanes<T>) {
            T* prob = ws_.probs + i * kTileRows + column;
            T* grad = ws_.score_grads + i * kTileRows + column;
            vec_t<T> score = load(prob), slope = broadcast(T(1));
            if (soft_cap_ > 0) {
                score = cap_score<T>(score, soft_cap_);
                slope -= (score / soft_cap_) * (score / soft_cap_);
            }
            const vec_t<T> lse = load(ws_.lse + column);
            const bits_t<T> visible = seeing.contains(column) & (lse != -kInfinity<T>);
            const vec_t<T> p = visible ? exp<T>(score - lse) : vec_t<T>{};
            const vec_t<T> ds = p * (load(grad) - load(ws_.delta + column)) * slope;
            store(prob, p);
            store(grad, visible ? ds : vec_t<T>{});
        }
    }

    RowId query_row(int i) const { return {tile_.chunk.batch, tile_.rows.begin + i, tile_.head}; }

    const BackwardTile& tile_;
    const BackwardParams& params_;
    const int64_t dim_, value_dim_;
    const T soft_cap_;
    const BackwardWorkspace<T> ws_;
};

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
