#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

namespace jaxmagi::collectives {

// Runs `enqueue`, which puts an exchange by NCCL into the stream, and ends the process with a message if that, once
// begun, takes longer than the time limit: NCCL itself waits for a failed rank forever, and XLA lends the communicator
// without a way to give up. `who` has waited until NCCL had done `what`, the message says.
void watch(cudaStream_t stream, uint64_t timeout_ms, std::string who, std::string what,
           const std::function<void()>& enqueue);

}  // namespace jaxmagi::collectives
