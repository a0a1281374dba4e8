#include "csrc/collectives/transfer_stream.h"

#include "csrc/common/check_cuda.h"

namespace jaxmagi::collectives {
namespace {

cudaEvent_t make_event() {
    cudaEvent_t event;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return event;
}

}  // namespace

void TransferStream::create() {
    int lowest, highest;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for the priorities of streams");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "making a stream");
    program_came_here_ = make_event();
    begun_ = make_event();
}

void TransferStream::destroy() {
    for (const auto& [transfer, event] : ends_)
        check_cuda(cudaEventDestroy(event), "giving back an event");
    for (const cudaEvent_t event : {program_came_here_, begun_})
        check_cuda(cudaEventDestroy(event), "giving back an event");
    check_cuda(cudaStreamDestroy(stream_), "giving back a stream");
}

void TransferStream::prepare(int64_t transfer) {
    event(transfer);
}

void TransferStream::follow(cudaStream_t program) {
    check_cuda(cudaEventRecord(program_came_here_, program), "recording an event");
    check_cuda(cudaStreamWaitEvent(stream_, program_came_here_), "waiting for the program");
}

void TransferStream::record(int64_t transfer) {
    check_cuda(cudaEventRecord(event(transfer), stream_), "recording an event");
}

void TransferStream::join(cudaStream_t program, int64_t transfer) {
    check_cuda(cudaStreamWaitEvent(program, event(transfer)), "waiting for a transfer");
}

void TransferStream::let_begin(cudaStream_t program) {
    check_cuda(cudaStreamWaitEvent(program, begun_), "waiting for the start of a transfer");
}

cudaEvent_t TransferStream::event(int64_t transfer) {
    const auto [found, is_new] = ends_.try_emplace(transfer, nullptr);
    if (is_new)
        found->second = make_event();
    return found->second;
}

}  // namespace jaxmagi::collectives
