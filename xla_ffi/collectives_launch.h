#pragma once

#include <memory>
#include <vector>

#include "xla_ffi/collectives_params.h"

namespace jaxmagi {

// Where the arrays of a transfer are in larger ones.
struct Placement {
    int input_stride = 0;      // input rows from one transfer of the batch to the next; 0: that of dense arrays
    int input_pitch = 1;       // of a group cast by kernels alone: widths of a row from one input row to the next
    int first_output_row = 0;  // of a group cast: nothing is written to the output rows before it
    bool compares_tables = true;    // between hosts; false if an earlier transfer has done so with these tables
    bool keeps_empty_sums = false;  // of a group reduce: nothing is written to rows that nobody has sums for
};

// A transfer that is ready to be launched: what the host has to know is known.
class Transfer {
public:
    // `buffers` refer to arrays' descriptions that live as long as this. `scratch` has the memory that it needs.
    Transfer(Kind kind, const Buffers& buffers, const TransferAttributes& attributes, const Placement& placement,
             collectives::Peers& peers, cudaStream_t program, Scratch& scratch);
    Transfer(Transfer&&);
    ~Transfer();

    // Returns whether this rank exchanges rows over NCCL.
    bool has_remote_rows() const;

    // Puts kernels, messages by NCCL, and copies into a stream.
    void launch(cudaStream_t stream) const;

private:
    struct Parts;
    std::unique_ptr<Parts> parts_;
};

}  // namespace jaxmagi
