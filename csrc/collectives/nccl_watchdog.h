#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

namespace jaxmagi::collectives {

// Runs `enqueue`, which puts NCCL operations into the stream. A watchdog thread ends the process with a message if
// these, once started, take longer than the time limit: NCCL waits for a failed rank forever, and XLA lends the
// communicator without a way to abort. The message says that `who` has waited until NCCL had done `what`.
void enqueue_nccl(cudaStream_t stream, uint64_t timeout_ms, std::string who, std::string what,
                  const std::function<void()>& enqueue);

}  // namespace jaxmagi::collectives
