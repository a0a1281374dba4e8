#include "csrc/collectives/transfer_order.h"

#include "csrc/common/check_cuda.h"

namespace jaxmagi::collectives {

void TransferOrder::create() {
    int lowest, highest;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for the priorities of streams");
    check_cuda(cudaStreamCreateWithPriority(&side_stream_, cudaStreamNonBlocking, highest), "making a stream");
    check_cuda(cudaEventCreateWithFlags(&order_event_, cudaEventDisableTiming), "making an event");
}

void TransferOrder::destroy() {
    check_cuda(cudaEventDestroy(order_event_), "giving back an event");
    check_cuda(cudaStreamDestroy(side_stream_), "giving back a stream");
}

void TransferOrder::begin(cudaStream_t program) {
    if (last_stream_ != nullptr and last_stream_ != program)
        follow(program, last_stream_);
}

cudaStream_t TransferOrder::fork(cudaStream_t stream) {
    follow(side_stream_, stream);
    return side_stream_;
}

void TransferOrder::join(cudaStream_t stream) {
    follow(stream, side_stream_);
}

void TransferOrder::follow(cudaStream_t later, cudaStream_t earlier) {
    check_cuda(cudaEventRecord(order_event_, earlier), "recording an event");
    check_cuda(cudaStreamWaitEvent(later, order_event_), "waiting for an event");
}

}  // namespace jaxmagi::collectives
