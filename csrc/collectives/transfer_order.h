#pragma once

#include <cuda_runtime_api.h>

// Runs the transfers of a group one after another, in the order of their calls, and a part of one beside the rest.

namespace jaxmagi::collectives {

// For one host thread at a time, with the device current that was so in `create`. Programs have streams that live as
// long, as XLA's do. Failures throw.
class TransferOrder {
public:
    // Creates a stream with the highest priority: SMs that become free go to transfers before computations.
    void create();

    // The device must be idle.
    void destroy();

    // Before the transfers of a call: makes `program` wait for all transfers so far.
    void begin(cudaStream_t program);

    // Behind them, when `program` waits for them.
    void end(cudaStream_t program) { last_stream_ = program; }

    // Lets a part of a transfer run beside the rest: `fork` returns another stream, which waits for what `stream` has
    // now, and `join` makes `stream` wait for what that has.
    cudaStream_t fork(cudaStream_t stream);
    void join(cudaStream_t stream);

private:
    // Makes `later` wait for all that `earlier` has now.
    void follow(cudaStream_t later, cudaStream_t earlier);

    cudaStream_t side_stream_ = nullptr;
    cudaEvent_t order_event_ = nullptr;
    cudaStream_t last_stream_ = nullptr;  // a stream that waits for all transfers so far, null before the first
};

}  // namespace jaxmagi::collectives
