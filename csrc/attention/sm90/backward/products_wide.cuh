#pragma once

#include "csrc/attention/sm90/backward/config.cuh"
#include "csrc/common/sm90/wgmma.cuh"

// The products of a warpgroup for head dimensions above 128. As in products.cuh, the caller, `step` in
// consumer_wide.cuh, commits and waits.
//
// Each warpgroup has S and dP, queries by keys, of 32 keys. It has dK and dV, transposed, of all keys of the tile, and
// dQ, each for some panels of the head dimension.

namespace jaxmagi::sm90 {

template <typename Config> struct BackwardProductsWide {
    using Element = typename Config::Element;
    static constexpr int kLogitsKeys = 32;  // keys of S and dP
    static_assert(Config::kKeys == kLogitsKeys * Config::kConsumers and Config::kRows == 64);
    // Panels of the head dimension of a warpgroup. The last warpgroup may have no panel of values.
    static constexpr int kPanels = panels(Config::kDim) / Config::kConsumers,
                         kVPanels = (panels(Config::kVDim) + Config::kConsumers - 1) / Config::kConsumers;
    static_assert(kPanels * Config::kConsumers == panels(Config::kDim) and kPanels == Config::kDqPasses);
    using Logits = float[kLogitsKeys / 2];
    using KeyGradient = float[kPanels][Config::kKeys / 2];
    using ValueGradient = float[kVPanels][Config::kKeys / 2];
    using QueryGradient = float[kPanels][32];
    static constexpr int kNoStride = 16;  // stride of panels, for operands within one panel

    BackwardMemory<Config> memory;
    int warpgroup;

    __device__ __forceinline__ int panel(int i) const { return warpgroup * kPanels + i; }
    __device__ __forceinline__ int v_panel(int i) const { return warpgroup * kVPanels + i; }

    // S = Q · K
    __device__ __forceinline__ void issue_qk(Logits& s, unsigned step) const {
        issue_over_head_dim<Config::kDim>(s, memory.q(step), memory.k());
    }

    // dP = dO · V
    __device__ __forceinline__ void issue_dov(Logits& dp, unsigned step) const {
        issue_over_head_dim<Config::kVDim>(dp, memory.dout(step), memory.v());
    }

    template <int kColumns>
    __device__ __forceinline__ void issue_over_head_dim(Logits& logits, SharedAddress query_panels,
                                                        SharedAddress key_panels) const {
        const SwizzledOperand queries(query_panels, kNoStride);
        const SwizzledOperand keys(key_panels + warpgroup * kLogitsKeys * kPanelRowBytes, kNoStride);
        fence_operand(logits);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kColumns / 16; ++i) {
            const int panel = i / 4, inside = i % 4 * 32;
            Wgmma<Element, kLogitsKeys>::template mma<0, 0>(
                logits, queries.at(panel * Config::kRows * kPanelRowBytes + inside),
                keys.at(panel * Config::kKeys * kPanelRowBytes + inside), i != 0);
        }
    }

    // The next three leave the fence to the caller, one for all.

    // dV += P · dO
    __device__ __forceinline__ void issue_dv(ValueGradient& dv, unsigned step) const {
        if (kVPanels * Config::kConsumers == panels(Config::kVDim) or v_panel(0) < panels(Config::kVDim)) {
#pragma unroll
            for (int i = 0; i < kVPanels; ++i)
                issue_over_queries(dv[i], memory.dout(step), v_panel(i), memory.p());
        }
    }

    // dK += dS · Q
    __device__ __forceinline__ void issue_dk(KeyGradient& dk, unsigned step) const {
#pragma unroll
        for (int i = 0; i < kPanels; ++i)
            issue_over_queries(dk[i], memory.q(step), panel(i), memory.ds(step));
    }

    // Multiplies a panel of Q or dO, transposed, with dS or P.
    __device__ __forceinline__ static void issue_over_queries(float (&gradient)[Config::kKeys / 2],
                                                              SharedAddress query_panels, int panel,
                                                              SharedAddress logits) {
        const SwizzledOperand rows(query_panels + panel * Config::kRows * kPanelRowBytes, kNoStride);
        const SwizzledOperand keys(logits, Config::kRows * kPanelRowBytes);
#pragma unroll
        for (int i = 0; i < Config::kRows / 16; ++i)
            Wgmma<Element, Config::kKeys>::template mma<1, 1>(gradient, rows.at(i * 16 * kPanelRowBytes),
                                                              keys.at(i * 16 * kPanelRowBytes), true);
    }

    // dQ = dS · K
    __device__ __forceinline__ void issue_dq(QueryGradient& dq, unsigned step) const {
#pragma unroll
        for (int i = 0; i < kPanels; ++i) {
            const SwizzledOperand ds(memory.ds(step), kNoStride);
            const SwizzledOperand k(memory.k() + panel(i) * Config::kKeys * kPanelRowBytes, kNoStride);
#pragma unroll
            for (int j = 0; j < Config::kKeys / 16; ++j)
                Wgmma<Element, 64>::template mma<0, 1>(dq[i],
                                                       ds.at(j / 4 * Config::kRows * kPanelRowBytes + j % 4 * 32),
                                                       k.at(j * 16 * kPanelRowBytes), j != 0);
        }
    }
};

}  // namespace jaxmagi::sm90
