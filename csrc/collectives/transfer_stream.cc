#include "csrc/collectives/transfer_stream.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

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
    for (const auto& [number, transfers] : transfers_)
        check_cuda(cudaEventDestroy(transfers.end), "giving back an event");
    for (const cudaEvent_t event : {program_came_here_, begun_})
        check_cuda(cudaEventDestroy(event), "giving back an event");
    check_cuda(cudaStreamDestroy(stream_), "giving back a stream");
}

void TransferStream::prepare(int64_t transfer) {
    if (not transfers_.contains(transfer))
        transfers_[transfer] = {make_event(), {}};
}

void TransferStream::follow(cudaStream_t program) {
    check_cuda(cudaEventRecord(program_came_here_, program), "recording an event");
    check_cuda(cudaStreamWaitEvent(stream_, program_came_here_), "waiting for the program");
}

void TransferStream::record(int64_t transfer, Places results) {
    Transfers& transfers = transfers_.at(transfer);
    check_cuda(cudaEventRecord(transfers.end, stream_), "recording an event");
    transfers.under_way.push_back(std::move(results));
}

void TransferStream::join(cudaStream_t program, int64_t transfer, const Places& results) {
    Transfers& transfers = transfers_.at(transfer);
    check_cuda(cudaStreamWaitEvent(program, transfers.end), "waiting for a transfer");
    const auto found = std::ranges::find(transfers.under_way, results);
    if (found == transfers.under_way.end())
        throw std::runtime_error("a transfer ends with results that are not where it began with them: both calls must "
                                 "be in one program, and XLA must not copy between them");
    transfers.under_way.erase(found);
}

void TransferStream::let_begin(cudaStream_t program) {
    check_cuda(cudaStreamWaitEvent(program, begun_), "waiting for the start of a transfer");
}

}  // namespace jaxmagi::collectives
