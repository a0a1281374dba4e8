#pragma once

#include "csrc/attention/cpu/carver.h"
#include "csrc/attention/cpu/gemm.h"
#include "csrc/attention/cpu/rows.h"
#include "csrc/attention/cpu/scores.h"

// Schedule of a forward tile: kTileRows queries of one head stay, keys stream past in tiles of kTileKeys.
//   Qᵀ [D, rows] is packed once, times the scale; then per band and key tile
//     K, V [keys, D] are read to the accumulation type
//     Sᵀ = K Qᵀ                        [keys, rows]
//     cap, mask, running maximum and sum, Pᵀ = exp(Sᵀ - m)
//     Oᵀ = exp(m_old - m) Oᵀ + Vᵀ Pᵀ   [Dv, rows]
//   and at the end O = Oᵀ / l leaves with lse = m + log(l).
// Bands follow one another in the same running softmax, so a cell of two bands counts twice.

namespace jaxmagi::cpu::JAXMAGI_ISA {

template <typename T> struct ForwardWorkspace {
    T *query, *keys, *values, *scores, *out, *maximum, *sum, *rescale;
    int64_t size;

    ForwardWorkspace(void* base, int64_t dim, int64_t value_dim) {
        Carver<T> carver(base);
        query = carver.take(dim * kTileRows);
        keys = carver.take(dim * kTileKeys);
        values = carver.take(value_dim * kTileKeys);
        scores = carver.take(kTileKeys * kTileRows);
        out = carver.take(value_dim * kTileRows);
        maximum = carver.take(kTileRows);
        sum = carver.take(kTileRows);
        rescale = carver.take(kTileRows);
        size = carver.bytes();
    }
    static int64_t bytes(int64_t dim, int64_t value_dim) { return ForwardWorkspace(nullptr, dim, value_dim).size; }
};

template <typename T> class ForwardTileKernel {
public:
    ForwardTileKernel(const ForwardTile& tile, void* workspace)
        : tile_(tile), params_(*tile.params), dim_(params_.q.dim), value_dim_(params_.v.dim),
          kv_head_(tile.head / (params_.q.heads / params_.k.heads)), soft_cap_(static_cast<T>(params_.soft_cap)),
          ws_(workspace, dim_, value_dim_) {}

    void run() {
        start();
        for (int i = 0; i < tile_.visible.count; ++i) {
            const Band& band = tile_.visible.bands[tile_.visible.ids[i]];
            const Range seen = keys_of_rows(band, tile_.rows);
            for (int key = seen.begin; key < seen.end; key += kTileKeys)
                add_keys(band, intersect(seen, {key, key + kTileKeys}));
        }
        finish();
    }

private:
    void start() {
        const int count = tile_.rows.end - tile_.rows.begin;
        for (int64_t i = 0; i < dim_ * kTileRows; ++i)
            ws_.query[i] = T(0);
        for (int i = 0; i < count; ++i)
            read_row(params_.q, query_row(i), static_cast<T>(params_.scale), ws_.query + i, kTileRows);
        for (int i = 0; i < kTileRows; ++i) {
            ws_.maximum[i] = -kInfinity<T>;
            ws_.sum[i] = T(0);
        }
        for (int64_t i = 0; i < value_dim_ * kTileRows; ++i)
            ws_.out[i] = T(0);
    }

    void add_keys(const Band& band, Range keys) {
        const int count = keys.end - keys.begin;
        const RowId first{tile_.batch, keys.begin, kv_head_};
        read_rows(params_.k, first, count, T(1), ws_.keys, dim_);
        read_rows(params_.v, first, count, T(1), ws_.values, value_dim_);
        gemm<T>(count, kTileRows, dim_, {ws_.keys, dim_, 1}, {ws_.query, kTileRows}, {ws_.scores, kTileRows}, false);
        if (soft_cap_ > 0)
            cap(count);
        if (not covers(band, tile_.rows, keys))
            mask(band, keys);
        update_softmax(count);
        rescale_out();
        gemm<T>(value_dim_, kTileRows, count, {ws_.values, 1, value_dim_}, {ws_.scores, kTileRows},
                {ws_.out, kTileRows}, true);
    }

    void cap(int count) {
        for (int i = 0; i < count * kTileRows; i += kLanes<T>)
            store(ws_.scores + i, cap_score<T>(load(ws_.scores + i), soft_cap_));
    }

    // Selects, never adds: a score of an invisible cell may be NaN.
    void mask(const Band& band, Range keys) {
        for (int key = keys.begin; key < keys.end; ++key) {
            T* row = ws_.scores + (key - keys.begin) * kTileRows;
            const LaneInterval<T> seeing(seeing_lanes(band, key, tile_.rows));
            for (int column = 0; column < kTileRows; column += kLanes<T>)
                store(row + column, seeing.contains(column) ? load(row + column) : broadcast(-kInfinity<T>));
        }
    }

    // Turns scores into probabilities relative to the new maximum, some vectors of queries at a time.
    void update_softmax(int count) {
        constexpr int kGroup = kTileRows / kLanes<T> < 4 ? kTileRows / kLanes<T> : 4;
        for (int column = 0; column < kTileRows; column += kGroup * kLanes<T>)
            update_columns<kGroup>(count, column);
    }

    template <int kGroup> void update_columns(int count, int column) {
        vec_t<T> maximum[kGroup], shift[kGroup], sum[kGroup];
        for (int j = 0; j < kGroup; ++j)
            maximum[j] = load(ws_.maximum + column + j * kLanes<T>);
        for (int i = 0; i < count; ++i)
            for (int j = 0; j < kGroup; ++j) {
                const vec_t<T> score = load(ws_.scores + i * kTileRows + column + j * kLanes<T>);
                maximum[j] = score > maximum[j] ? score : maximum[j];
            }
        for (int j = 0; j < kGroup; ++j) {
            const int at = column + j * kLanes<T>;
            // -inf - -inf would be NaN for a row that has seen nothing yet.
            shift[j] = maximum[j] == -kInfinity<T> ? vec_t<T>{} : maximum[j];
            const vec_t<T> rescale = exp<T>(load(ws_.maximum + at) - shift[j]);
            sum[j] = load(ws_.sum + at) * rescale;
            store(ws_.rescale + at, rescale);
            store(ws_.maximum + at, maximum[j]);
        }
        for (int i = 0; i < count; ++i)
            for (int j = 0; j < kGroup; ++j) {
                T* score = ws_.scores + i * kTileRows + column + j * kLanes<T>;
                const vec_t<T> p = exp<T>(load(score) - shift[j]);
                store(score, p);
                sum[j] += p;
            }
        for (int j = 0; j < kGroup; ++j)
            store(ws_.sum + column + j * kLanes<T>, sum[j]);
    }

    void rescale_out() {
        for (int column = 0; column < kTileRows; column += kLanes<T>) {
            const vec_t<T> factor = load(ws_.rescale + column);
            for (int64_t i = 0; i < value_dim_; ++i) {
                T* out = ws_.out + i * kTileRows + column;
                store(out, load(out) * factor);
            }
        }
    }

    void finish() {
        const T sink = static_cast<const T*>(params_.sinks)[tile_.head];
        T* lse = static_cast<T*>(params_.lse);
        for (int i = 0; i < tile_.rows.end - tile_.rows.begin; ++i) {
            const RowId id = query_row(i);
            T& row_lse = lse[row_index(params_.q, id)];
            if (ws_.sum[i] == T(0)) {  // it sees nothing, or only scores of -inf
                row_lse = -kInfinity<T>;
                clear_row<T>(params_.out, id);
                continue;
            }
            const T maximum = sink > ws_.maximum[i] ? sink : ws_.maximum[i];
            const T weight = __builtin_exp(ws_.maximum[i] - maximum);
            const T sum = ws_.sum[i] * weight + static_cast<T>(__builtin_exp(sink - maximum));
            row_lse = maximum + static_cast<T>(__builtin_log(sum));
            write_row(params_.out, id, weight / sum, ws_.out + i, kTileRows);
        }
    }

    RowId query_row(int i) const { return {tile_.batch, tile_.rows.begin + i, tile_.head}; }

    const ForwardTile& tile_;
    const ForwardParams& params_;
    const int64_t dim_, value_dim_, kv_head_;
    const T soft_cap_;
    const ForwardWorkspace<T> ws_;
};

}  // namespace jaxmagi::cpu::JAXMAGI_ISA
