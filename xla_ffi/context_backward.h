#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "csrc/attention/sm90/backward/backward.h"

#include "xla_ffi/context_handler.h"

// This is the backward pass of context attention. Launches within a host have an order
// (context_backward_within_host.cc), and those between hosts, or of parts that share workspaces, go from part to part
// (context_backward_by_part.cc). What both share is in context_backward.cc.

namespace jaxmagi {

struct Backward {
    static constexpr const char* kTarget = "jaxmagi_context_backward";

    // The flags of a part: those that its launches set (BackwardParams::drained), and whether its keys have arrived.
    static constexpr int64_t kArrived = sm90::kMostBackwardStages, kFlags = kArrived + 1;

    struct Operands {
        ffi::AnyBuffer q;
        KeysValues own;
        ffi::AnyBuffer sorted, tiles, dout, lse, delta;
        KeysValues kept;  // received rows, [batch, rows, all key heads, dim]; none where they are to come again
        ContextTables tables;
    };
    struct Results {
        ffi::AnyBuffer dq;
        ReturnArrays returns;
        CastArrays keys;
        ffi::AnyBuffer workspaces;  // num_workspaces, with which parts take turns
        ffi::AnyBuffer flags;       // of parts, each with kFlags
    };

    static sm90::BackwardParams to_params(const ContextAttributes& attributes, const Parts& parts,
                                          const Operands& operands, const Results& results, int64_t part);

    static const KeysValues& keys(const Results& results) { return results.keys.all; }
    static size_t shared_bytes(const Results& results) {
        return std::max(size_bytes(results.keys.all), size_bytes(results.returns.gradients));
    }

    static cudaError_t preload(const sm90::BackwardParams& params) {
        return sm90::preload_backward(params.dtype, params.shape.dim, params.shape.v_dim, params.soft_cap > 0);
    }

    static void launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                       const Results& results, ContextFork& fork, ContextTransfers& transfers);
};

// A call of the pass: its parts, and the steps before and behind launches of attention. It is made before the fork
// begins, since it launches in the program's stream what all others need.
class BackwardCall {
public:
    BackwardCall(const ContextAttributes& attributes, const Parts& parts, const Backward::Operands& operands,
                 const Backward::Results& results, ContextFork& fork, ContextTransfers& transfers);

    ContextFork& fork() const { return fork_; }
    int64_t num_parts() const { return std::ssize(parts_); }
    bool shares_workspaces() const { return num_workspaces_ < num_parts(); }
    const sm90::BackwardParams& params(int64_t part) const { return parts_[part].params; }
    int64_t num_brought() const { return std::ssize(arrivals_); }
    // Returns the moment at which a part has all keys that its launches read there.
    cudaEvent_t all_arrived(int64_t part) const { return arrivals_[part]; }

    // Brings the keys of the next part, or puts those there that have been kept.
    void bring_next();

    // Lets a stream go on when a part is prepared, which the first such stream does. A part whose workspace another one
    // has had before waits until that is finished.
    void prepare(int64_t part, cudaStream_t stream);

    // Finishes gradients, behind what is in the stream of helpers.
    void finish(int64_t part, sm90::KeyTiles tiles);

private:
    struct Part {
        sm90::BackwardParams params;
        cudaEvent_t prepared = nullptr, finished = nullptr;
        int num_finished = 0;  // kinds of tiles
    };

    bool has_kept_keys() const { return operands_.kept.k.element_count() > 0; }
    int tile_keys() const;
    sm90::FinalGradients final_gradients(const Parts& parts, int64_t part) const;

    const Backward::Operands& operands_;
    const Backward::Results& results_;
    ContextFork& fork_;
    ContextTransfers& transfers_;
    const int64_t num_workspaces_;
    std::vector<Part> parts_;
    const uint8_t* copied_;              // own keys that are copied in front of received ones (CopiedRowsParams)
    collectives::SentBlocks sent_;       // which own tiles are sent
    std::vector<cudaEvent_t> arrivals_;  // when parts have all keys
};

// Launch the pass: tiles of own keys, which need no transfer, and the others, whose gradients return behind them. The
// transfer of the first part's keys has been launched. `reserved` multiprocessors are left free while there is
// something to transfer, and then help.
void launch_within_host(BackwardCall& call, int reserved);
void launch_by_part(BackwardCall& call, int reserved);

}  // namespace jaxmagi
