#pragma once

#include <cstdint>
#include <span>

#include "xla/ffi/api/ffi.h"

namespace jaxmagi {

struct CollectiveHandlers {
    XLA_FFI_Handler *prepare, *initialize, *execute;
};

// Each starts a transfer, and waits for it or leaves that to `group_done_cuda`.
CollectiveHandlers group_cast_cuda();
CollectiveHandlers group_reduce_cuda();
XLA_FFI_Handler* group_done_cuda();

// Of what Initialize leaves with XLA. To be registered before the handlers.
struct StateType {
    XLA_FFI_TypeId* id;
    XLA_FFI_TypeInfo* info;
};
StateType group_execution_cuda();

// Of the buffers of all pairs of a rank, in which rows of so many bytes travel: what the calls take as workspace.
int64_t pair_buffer_bytes(int64_t transfers, int64_t cp_size, int64_t pair_rows, std::span<const int64_t> row_bytes);

}  // namespace jaxmagi
