#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxmagi {

// The handlers of a target by stage.
struct CudaHandlers {
    XLA_FFI_Handler *initialize, *execute;
};

CudaHandlers attention_tile_schedule_cuda();
CudaHandlers attention_forward_cuda();
CudaHandlers attention_backward_cuda();

}  // namespace jaxmagi
