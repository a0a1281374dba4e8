#pragma once

#include <iterator>
#include <vector>

#include "csrc/attention/sm90/forward/forward.h"

#include "xla_ffi/context_handler.h"

// This is the forward pass of context attention. Launches within a host have an order (context_forward_within_host.cc),
// and those between hosts have another one (context_forward_between_hosts.cc). What both share is in
// context_forward.cc.

namespace jaxmagi {

struct Forward {
    static constexpr const char* kTarget = "jaxmagi_context_forward";

    struct Operands {
        ffi::AnyBuffer q;
        KeysValues own;
        ffi::AnyBuffer sorted, tiles, sinks;  // sinks: [2, all heads], of which the second row has none
        ContextTables tables;
    };
    struct Results {
        ffi::AnyBuffer out, lse;
        CastArrays keys;
        KeysValues kept;          // received rows, [batch, rows, all key heads, dim]; none unless they are kept
        ffi::AnyBuffer counters;  // of work items, and behind them flags of launches
    };

    // Counters beside those of the parts: between hosts of the own tiles and the own half; within a host of the own
    // tiles, and the number of parts that have arrived. There are as many flags.
    static constexpr int64_t kMoreCounters = 2;

    static sm90::ForwardParams to_params(const ContextAttributes& attributes, const Parts& parts,
                                         const Operands& operands, const Results& results, int64_t part);

    static const KeysValues& keys(const Results& results) { return results.keys.all; }
    static size_t shared_bytes(const Results& results) { return size_bytes(results.keys.all); }

    static cudaError_t preload(const sm90::ForwardParams& params);

    static void launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                       const Results& results, ContextFork& fork, ContextTransfers& transfers);
};

// Holds a call of the pass: it makes parameters of launches, and takes the steps beside these. It is made when the fork
// has begun, since it launches in the stream of copies.
class ForwardCall {
public:
    ForwardCall(const ContextAttributes& attributes, const Parts& parts, const Forward::Operands& operands,
                const Forward::Results& results, ContextFork& fork, ContextTransfers& transfers);

    const Parts& parts() const { return parts_; }
    ContextFork& fork() const { return fork_; }
    ContextTransfers& transfers() const { return transfers_; }
    int* counters() const { return counters_; }
    uint32_t* flags() const { return flags_; }
    int64_t num_brought() const { return std::ssize(arrivals_); }
    // Return the moments at which a part has copied keys of the rank, and all keys.
    cudaEvent_t own_copied(int64_t part) const { return copies_[part]; }
    cudaEvent_t all_arrived(int64_t part) const { return arrivals_[part]; }

    // Returns the parameters for all tiles of a part, without a counter.
    sm90::ForwardParams to_params(int64_t part) const;

    // Returns the parameters for the tiles of all heads that see no received keys, without a counter.
    sm90::ForwardParams to_own_tiles() const;

    static sm90::TileShape tile(const sm90::ForwardParams& params);

    // Finds out for each tile whether it sees received keys. There is one mask.
    const uint8_t* find_received_tiles(const sm90::ForwardParams& params, cudaStream_t stream);

    // Copies own keys for the next part.
    void copy_next();

    // Brings the keys of the next part, and copies its own keys unless that has been done.
    void bring_next();

    // Keeps what all parts have received, if it is to be kept.
    void keep_received();

    // Lets so many multiprocessors help a launch, behind what is in the stream of helpers.
    void help(const sm90::ForwardParams& params, int num_sms) const;

private:
    const ContextAttributes& attributes_;
    const Parts& parts_;
    const Forward::Operands& operands_;
    const Forward::Results& results_;
    ContextFork& fork_;
    ContextTransfers& transfers_;
    int* const counters_;
    uint32_t* const flags_;
    const uint8_t* copied_;                       // own keys that are copied in front of received ones (CopiedRowsParams)
    std::vector<cudaEvent_t> copies_, arrivals_;  // of parts: when they have copied keys, and all keys
};

// Launch the pass: tiles that see own keys only, which need no transfer, and the others of part after part. Counters
// and flags are cleared, and no transfer has been launched. `reserved` multiprocessors are left free while there is
// something to transfer, and then help.
void launch_within_host(ForwardCall& call, int reserved);
void launch_between_hosts(ForwardCall& call, int reserved);

}  // namespace jaxmagi
