#pragma once

#include "csrc/attention/sm90/forward/arguments.cuh"
#include "csrc/attention/sm90/forward/softmax.cuh"
#include "csrc/common/sm90/stmatrix.cuh"

// Turns the sums of a tile into the result: sinks, normalisation, merging with a previous result, stores.

namespace jaxmagi::sm90 {

// Stores under a condition without a branch: a branch between two stores would keep the transposes of the next from
// overlapping with this store.
__device__ __forceinline__ void store_if(bool wanted, void* to, const uint32_t (&words)[4]) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(static_cast<int>(wanted))
        : "memory");
}

template <typename Config> struct ForwardEpilogue {
    static constexpr int kCount = Config::kVDim / 2;
    using Element = typename Config::Element;

    const ForwardArguments& args;
    const ForwardWorkItem& work;
    int row, lane;  // this thread's first row in the tile; its lane

    // The factors of the output and of the previous result, for the two rows of a thread.
    struct Factors {
        float current[2], previous[2];
    };

    // Stores the log-sum-exp of the rows and returns their factors. It overlaps with the last product, which it does
    // not need.
    __device__ __forceinline__ Factors finish_rows(const RowState& rows) const {
        Factors factors;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const LogSum sum = log_sum(rows.row_max[r], quad_sum(rows.row_sum[r]), sink(r) * kLog2E);
            factors.current[r] = sum.factor * store_lse(r, sum.log2, factors.previous[r]);
        }
        return factors;
    }

    __device__ __forceinline__ void normalise(float (&out)[kCount], const Factors& factors) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i)  // a fully masked row may hold 0 · NaN
            out[i] = factors.current[i / 2 % 2] == 0.f ? 0.f : out[i] * factors.current[i / 2 % 2];
        if (args.previous_lse != nullptr)
            add_previous(out, factors.previous);
    }

    // Writes the output to shared memory in panels; `to` is the first row of the warp.
    __device__ __forceinline__ void stage(const float (&out)[kCount], SharedAddress to) const {
        const int matrix = lane / 8, inside = lane % 8;
        const SharedAddress first_row = to + (matrix % 2 * 8 + inside) * kPanelRowBytes;
        const int swizzle = (matrix / 2 ^ inside) * 16;
#pragma unroll
        for (int i = 0; i < kCount; i += 8) {
            uint32_t matrices[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                matrices[j] = Element::pack(out[i + 2 * j], out[i + 2 * j + 1]);
            const int panel = i / 32, chunk = i / 4 % 8;
            store_matrices(first_row + panel * 64 * kPanelRowBytes + (chunk * 16 ^ swizzle), matrices);
        }
    }

    __device__ __forceinline__ void store_f32(const float (&out)[kCount]) const {
        float2* const first = static_cast<float2*>(args.out) + row_index(0) * args.v_dim / 2;
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            const int r = i / 2 % 2;
            if (exists(r, i))
                first[r * row_stride() + column(i) / 2] = {out[i], out[i + 1]};
        }
    }

    // Each lane stores 16 bytes, each quad 64 bytes of a row.
    __device__ __forceinline__ void store_16bit(const float (&out)[kCount]) const {
        uint16_t* const first = static_cast<uint16_t*>(args.out) + row_index(0) * args.v_dim + lane % 4 * 8;
        const int64_t next_row = 2 * row_stride();
#pragma unroll
        for (int i = 0; i < kCount; i += 16) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                uint32_t words[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[j] = Element::pack(out[i + 4 * j + 2 * r], out[i + 4 * j + 2 * r + 1]);
                transpose_quad(words, lane);
                store_if(exists(r) and i * 2 + lane % 4 * 8 < args.v_dim, first + r * next_row + i * 2, words);
            }
        }
    }

    // Stores the result of a fully masked tile: the previous result, or zeros.
    __device__ __forceinline__ void store_empty() const {
        const int64_t row_bytes = args.v_dim * (args.out_f32 ? 4 : 2);
#pragma unroll 1
        for (int r = 0; r < 2; ++r) {
            float share;
            store_lse(r, -INFINITY, share);
            const auto* from = static_cast<const char*>(args.previous_out) + row_index(r) * row_bytes;
            auto* to = static_cast<char*>(args.out) + row_index(r) * row_bytes;
#pragma unroll 1
            for (int at = lane % 4 * 16; at < row_bytes and exists(r); at += 64) {
                const bool kept = args.previous_lse != nullptr and share != 0.f;
                *reinterpret_cast<uint4*>(to + at) = kept ? *reinterpret_cast<const uint4*>(from + at) : uint4{};
            }
        }
    }

private:
    struct LogSum {
        float log2, factor;  // logarithm of the sum of a row; factor that normalises its output
    };

    __device__ __forceinline__ static LogSum log_sum(float row_max, float row_sum, float sink) {
        if (row_sum == 0.f)
            return {-INFINITY, 0.f};
        const float top = fmaxf(row_max, sink), correction = exp2_approx(row_max - top);
        const float total = row_sum * correction + exp2_approx(sink - top);
        return {top + log2f(total), correction / total};
    }

    // Stores the log-sum-exp of this and the previous result; returns the share of this one. Called by the whole warp.
    __device__ __forceinline__ float store_lse(int r, float log2, float& previous_share) const {
        float lse = log2 * kLn2, share = 1.f;
        if (args.previous_lse != nullptr) {
            const float previous = exists(r) ? args.previous_lse[row_index(r)] : -INFINITY, top = fmaxf(previous, lse);
            const float a = exp2_approx((lse - top) * kLog2E), b = exp2_approx((previous - top) * kLog2E);
            const bool masked = lse == -INFINITY;
            previous_share = previous == -INFINITY ? 0.f : masked ? 1.f : b / (a + b);
            share = masked ? 0.f : a / (a + b);
            lse = masked ? previous : top + log2f(a + b) * kLn2;
        }
        __syncwarp();  // previous_lse may be lse: the whole quad reads before one lane writes
        if (lane % 4 == 0 and exists(r))
            args.lse[row_index(r)] = lse;
        return share;
    }

    __device__ __forceinline__ int position(int r) const {
        return work.row + ((row + 8 * r) >> args.first.schedule.pack_shift);
    }
    __device__ __forceinline__ int head(int r) const {
        return work.head + ((row + 8 * r) & (args.first.schedule.pack - 1));
    }
    __device__ __forceinline__ float sink(int r) const { return __ldg(args.sinks + head(r)); }
    __device__ __forceinline__ bool exists(int r) const { return position(r) < args.q_len; }
    __device__ __forceinline__ int64_t row_index(int r) const {
        return (static_cast<int64_t>(work.example) * args.q_len + position(r)) * args.row_heads + head(r);
    }
    // Returns the column of element i of the thread's output. Elements 2i and 2i + 1 are neighbours.
    __device__ __forceinline__ int column(int i) const { return i / 4 * 8 + lane % 4 * 2; }
    __device__ __forceinline__ bool exists(int r, int i) const { return exists(r) and i / 4 * 8 < args.v_dim; }

    // Distance from a thread's first row to its second, in pairs of elements.
    __device__ __forceinline__ int64_t row_stride() const { return (row_index(1) - row_index(0)) * args.v_dim / 2; }

    // Issues four loads at a time; otherwise each would wait for the one before.
    __device__ __forceinline__ void add_previous(float (&out)[kCount], const float (&share)[2]) const {
        const int64_t first = row_index(0) * args.v_dim / 2;
#pragma unroll
        for (int i = 0; i < kCount; i += 8) {
            float2 pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int r = j % 2, at = i + 2 * j;
                const bool wanted = exists(r, at) and share[r] != 0.f;
                pairs[j] = wanted ? previous_pair(first + r * row_stride() + column(at) / 2) : float2{};
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                out[i + 2 * j] += share[j % 2] * pairs[j].x;
                out[i + 2 * j + 1] += share[j % 2] * pairs[j].y;
            }
        }
    }

    __device__ __forceinline__ float2 previous_pair(int64_t at) const {
        return args.out_f32 ? static_cast<const float2*>(args.previous_out)[at]
                            : Element::unpack(static_cast<const uint32_t*>(args.previous_out)[at]);
    }
};

}  // namespace jaxmagi::sm90
