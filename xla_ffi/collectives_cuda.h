#pragma once

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

}  // namespace jaxmagi
