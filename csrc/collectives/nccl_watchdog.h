#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>

namespace jaxmagi::collectives {

// A message about operations of NCCL's that take too long says that `who` has waited until NCCL had done `what`. Unless
// it is empty, `find_reason` is asked then, in a thread of its own and for a second at most, and returns what is known
// of the reason, or an empty text.
struct NcclText {
    std::string who, what;
    std::function<std::string()> find_reason = {};
};

// Runs `enqueue`, which puts NCCL operations into the stream. A watchdog thread prints a message if these, once
// started, take longer than the time limit, and two seconds later ends the process: NCCL waits for a failed rank
// forever, and XLA lends the communicator without a way to abort.
void enqueue_nccl(cudaStream_t stream, uint64_t timeout_ms, NcclText text, const std::function<void()>& enqueue);

}  // namespace jaxmagi::collectives
