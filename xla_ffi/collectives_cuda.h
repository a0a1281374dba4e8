#pragma once

#include "xla/ffi/api/ffi.h"

namespace jaxmagi {

struct CollectiveHandlers {
    XLA_FFI_Handler *prepare, *initialize, *execute;
};

CollectiveHandlers group_cast_cuda();
CollectiveHandlers group_reduce_cuda();

}  // namespace jaxmagi
