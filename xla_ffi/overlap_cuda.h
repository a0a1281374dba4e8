#pragma once

#include "xla_ffi/collectives_cuda.h"

namespace jaxmagi {

CollectiveHandlers matmul_reduce_scatter_cuda();
CollectiveHandlers all_gather_matmul_cuda();

}  // namespace jaxmagi
