#pragma once

#include "csrc/overlap/products.h"

namespace jaxmagi::overlap {

struct PushArguments {
    ProductShape shape;
    const void* x;
    char* received;
    ReceivedLayout layout;
};

// Stores the rank's rows to all others, beginning with the next rank, and counts what has arrived in their flags.
cudaError_t push_rows(const PushArguments& arguments, int num_sms, cudaStream_t stream);

// Loads the kernel.
cudaError_t preload_push();

}  // namespace jaxmagi::overlap
