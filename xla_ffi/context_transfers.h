#pragma once

#include <deque>

#include "csrc/collectives/part_rows.h"

#include "xla_ffi/collectives_launch.h"
#include "xla_ffi/context_parts.h"
#include "xla_ffi/context_streams.h"

// The transfers of a pass of context attention, part by part.

namespace jaxmagi {

// The tables of both steps, of which the second has no entries if there is one step.
struct ContextTables { ffi::AnyBuffer sends, receives, inside_sends, inside_receives; };

// Arrays of keys and values, or of their gradients, that rows pass through. Those that are not needed are empty.
struct CastArrays { KeysValues all, middle; };
struct ReturnArrays {
    KeysValues result;                   // gradients of the rank's own keys, [batch, tokens, all key heads, dim]
    KeysValues gradients, middle, sums;  // of all keys; sums of a host; sums of others' for the rank's own keys
    KeysValues wire, middle_wire;        // gradients, and sums of a host, in the type in which they travel
};

class ContextTransfers {
public:
    ContextTransfers(const ContextAttributes& attributes, const Parts& parts, const ContextTables& tables,
                     ContextFork& fork, Scratch& scratch)
        : attributes_(attributes), parts_(parts), tables_(tables), fork_(fork), scratch_(scratch) {}

    // Copies the rank's own keys and values, [batch, tokens, all key heads, dim], into the part's arrays, those that
    // are needed or, between hosts, sent there (`copied`: CopiedRowsParams). Returns the moment when they are there.
    cudaEvent_t copy_own(int64_t part, const KeysValues& own, const KeysValues& all, const uint8_t* copied);

    // Brings the keys and values that a part receives, and returns the moment when these and copied ones are there.
    cudaEvent_t bring(int64_t part, const KeysValues& own, const CastArrays& arrays, cudaEvent_t own_copied);

    // Puts those there that have been kept, [batch, received rows, all key heads, dim].
    cudaEvent_t put_back(int64_t part, const KeysValues& kept, const KeysValues& all, cudaEvent_t own_copied);

    // Keeps what a part has received, in [batch, received rows, all key heads, dim].
    void keep(int64_t part, const KeysValues& all, const KeysValues& kept);

    // Returns whether any of the casts so far has rows that go over NCCL.
    bool crosses_hosts() const;

    // Finds out which of the first `count` blocks of the rank's rows are sent.
    collectives::SentBlocks find_sent_blocks(int64_t count, int64_t rows, cudaStream_t stream);

    // Returns a flag for each block of own rows, whether it is copied in front of received ones: those from a row on,
    // which attention reads there, and those that are sent from there, if any are.
    const uint8_t* find_copied_blocks(int64_t first_row, bool are_sent, cudaStream_t stream);

    // Returns device memory that stays until the pass has ended.
    void* allocate(size_t bytes) { return scratch_.allocate(bytes); }

    // Returns the gradients of received keys and values to the ranks that have these.
    void give_back(int64_t part, const ReturnArrays& arrays);

    // Adds what others have returned to the gradients of the rank's own keys and values. Those of blocks that are not
    // sent are in the result before.
    void add_own(int64_t part, const ReturnArrays& arrays, const collectives::SentBlocks& blocks);

private:
    struct Step;

    // Returns whether own keys and values are sent from the part's arrays. Within a host kernels send them from where
    // the rank has them; for NCCL they have to lie behind each other.
    bool sends_copies() const { return not parts_.are_within_host; }

    Step across();
    Step inside();
    collectives::CopiedRowsParams received_rows(int64_t part, const KeysValues& kept, const KeysValues& all);
    collectives::CopiedRowsParams copied_rows(int64_t part, const KeysValues& from, const KeysValues& all,
                                              int64_t first, int64_t count);
    void cast(int64_t part, const KeysValues& own, const CastArrays& arrays);
    void launch(Kind kind, int64_t part, const Step& step, const std::vector<ffi::AnyBuffer>& from,
                const std::vector<ffi::AnyBuffer>& to, Placement placement);
    std::vector<ffi::AnyBuffer> rows(const KeysValues& arrays, int64_t part);
    // Returns rows in the type in which they travel; those from `first` on are wanted.
    std::vector<ffi::AnyBuffer> rounded(const KeysValues& arrays, const KeysValues& wire, int64_t part, int64_t first);

    const ContextAttributes& attributes_;
    const Parts& parts_;
    const ContextTables& tables_;
    ContextFork& fork_;
    Scratch& scratch_;
    Views views_;
    std::deque<Transfer> transfers_;
};

}  // namespace jaxmagi
