#pragma once

#include "xla/ffi/api/c_api.h"

namespace jaxmagi {

XLA_FFI_Handler* attention_forward_cpu();
XLA_FFI_Handler* attention_backward_cpu();

}  // namespace jaxmagi
