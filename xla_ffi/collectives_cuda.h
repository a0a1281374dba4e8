#pragma once

#include <cstdint>
#include <span>

#include "xla/ffi/api/ffi.h"

namespace jaxmagi {

struct CollectiveHandlers {
    XLA_FFI_Handler *prepare, *initialize, *execute;
};

// Each starts a transfer, and waits for it unless it is asynchronous: then `group_done_cuda` does.
CollectiveHandlers group_cast_cuda();
CollectiveHandlers group_reduce_cuda();
XLA_FFI_Handler* group_done_cuda();

// The type of the state that Initialize leaves with XLA, to be registered before the handlers.
struct StateType {
    XLA_FFI_TypeId* id;
    XLA_FFI_TypeInfo* info;
};
StateType group_execution_cuda();

// Returns the bytes of both pair buffers of a rank, for arrays with rows of these sizes. Calls take them as workspace.
int64_t pair_buffer_bytes(int64_t batch, int64_t cp_size, int64_t pair_rows, std::span<const int64_t> row_bytes);

}  // namespace jaxmagi
