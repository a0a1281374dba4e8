#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "csrc/attention/cpu/kernel_table.h"
#include "csrc/common/math.h"

namespace jaxmagi::cpu {

// Equal aligned pieces of one allocation, which is not initialised: pages that no worker touches are never committed.
class Workspace {
public:
    Workspace(int64_t pieces, int64_t piece_bytes)
        : piece_bytes_(round_up(piece_bytes, kWorkspaceAlignment)),
          data_(static_cast<std::byte*>(::operator new(pieces * piece_bytes_, kAlignment))) {}

    void* piece(int64_t index) const { return data_.get() + index * piece_bytes_; }

private:
    static constexpr std::align_val_t kAlignment{kWorkspaceAlignment};
    struct Delete {
        void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
    };

    int64_t piece_bytes_;
    std::unique_ptr<std::byte, Delete> data_;
};

}  // namespace jaxmagi::cpu
