#pragma once

#include <exception>

#include "csrc/collectives/transfer_order.h"

namespace jaxmagi {

// The stream of what runs beside the rest of a transfer. The rest waits for it in `join`, or after a failure.
class SideStream {
public:
    SideStream(collectives::TransferOrder& order, cudaStream_t stream)
        : order_(order), stream_(stream), side_(order.fork(stream)) {}
    SideStream(const SideStream&) = delete;
    ~SideStream() {
        if (is_joined_)
            return;
        try {
            join();
        } catch (const std::exception&) {  // the error that has come before tells more
        }
    }

    cudaStream_t stream() const { return side_; }

    void join() {
        is_joined_ = true;
        order_.join(stream_);
    }

private:
    collectives::TransferOrder& order_;
    const cudaStream_t stream_, side_;
    bool is_joined_ = false;
};

}  // namespace jaxmagi
