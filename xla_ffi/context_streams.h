#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/collectives/transfer_order.h"

// The streams in which a pass of context attention runs: transfers in one, copies of own keys in another, consecutive
// launches of attention in two more, so that one begins on multiprocessors that have nothing left to do for the one
// before, and launches that help these in another.

namespace jaxmagi {

// Holds the streams and events of one device. One host thread uses it at a time.
class ContextStreams {
public:
    static ContextStreams& of_current_device();

    cudaStream_t transfers() const { return transfers_; }
    cudaStream_t side() const { return side_; }
    cudaStream_t helpers() const { return helpers_; }
    cudaStream_t copies() const { return copies_; }
    cudaStream_t setup() const { return setup_; }
    cudaEvent_t event(size_t index);

private:
    ContextStreams();

    cudaStream_t transfers_, side_, helpers_, copies_, setup_;
    std::vector<cudaEvent_t> events_;
};

// A pass's streams. The program's stream waits for them in `join`, or after a failure.
class ContextFork {
public:
    // orders: of the groups in which the pass transfers.
    ContextFork(std::span<collectives::TransferOrder* const> orders, cudaStream_t program);
    ContextFork(const ContextFork&) = delete;
    ~ContextFork();

    // Lets all streams begin behind what the program has now.
    void begin();

    void join();

    cudaStream_t program() const { return program_; }
    cudaStream_t transfers() const { return streams_.transfers(); }
    // Returns the stream of copies of own keys, so that those of a part run beside the transfer of the part before.
    cudaStream_t copies() const { return streams_.copies(); }
    // Returns the stream of what the host does before a transfer. Nothing else is in it, so that the host waits for
    // nothing else.
    cudaStream_t setup() const { return streams_.setup(); }
    cudaStream_t helpers() const { return streams_.helpers(); }
    cudaStream_t of_launch(int number) const { return number % 2 == 0 ? program_ : streams_.side(); }

    // A moment in a stream, for which others can wait.
    cudaEvent_t record(cudaStream_t stream);
    static void wait(cudaStream_t stream, cudaEvent_t event);

    // Lets a stream wait until a kernel that was launched before has set a flag, which no multiprocessor does.
    static void wait_until_set(cudaStream_t stream, const uint32_t* flag);

    // Lets a stream set a flag. Who reads it by an acquiring load sees what the stream has written or waited for before.
    static void set(cudaStream_t stream, uint32_t* flag, uint32_t value = 1);

private:
    ContextStreams& streams_;
    const std::vector<collectives::TransferOrder*> orders_;
    const cudaStream_t program_;
    size_t num_events_ = 0;
    bool is_joined_ = false;
};

}  // namespace jaxmagi
