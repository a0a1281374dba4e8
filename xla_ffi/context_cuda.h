#pragma once

#include "xla_ffi/collectives_cuda.h"

namespace jaxmagi {

CollectiveHandlers context_forward_cuda();
CollectiveHandlers context_backward_cuda();

}  // namespace jaxmagi
