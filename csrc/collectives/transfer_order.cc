#include "csrc/collectives/transfer_order.h"

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

void record_event(cudaEvent_t event, cudaStream_t stream) {
    check_cuda(cudaEventRecord(event, stream), "recording an event");
}

void wait_for(cudaStream_t stream, cudaEvent_t event) {
    check_cuda(cudaStreamWaitEvent(stream, event), "waiting for an event");
}

}  // namespace

void TransferOrder::create() {
    int lowest, highest;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for the priorities of streams");
    for (cudaStream_t* const stream : {&stream_, &side_stream_})
        check_cuda(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest), "making a stream");
    for (cudaEvent_t* const event : {&order_event_, &started_, &pushing_})
        *event = make_event();
}

void TransferOrder::destroy() {
    for (const auto& [transfer_id, transfers] : transfers_)
        check_cuda(cudaEventDestroy(transfers.end), "giving back an event");
    for (const cudaEvent_t event : {order_event_, started_, pushing_})
        check_cuda(cudaEventDestroy(event), "giving back an event");
    for (const cudaStream_t stream : {stream_, side_stream_})
        check_cuda(cudaStreamDestroy(stream), "giving back a stream");
}

int64_t TransferOrder::prepare(int64_t transfer_id, cudaStream_t program) {
    const std::lock_guard lock(mutex_);
    abandon_transfers(program);
    if (not transfers_.contains(transfer_id))
        transfers_[transfer_id] = {make_event(), {}};
    return ++execution_;
}

void TransferOrder::end_execution(int64_t execution, cudaStream_t program) {
    const std::lock_guard lock(mutex_);
    if (execution == execution_)
        abandon_transfers(program);
}

void TransferOrder::abandon_transfers(cudaStream_t program) {
    if (is_idle())
        return;
    follow(program, stream_);
    for (auto& [transfer_id, transfers] : transfers_)
        transfers.in_flight.clear();
}

cudaStream_t TransferOrder::begin(cudaStream_t program, bool is_async) {
    const cudaStream_t stream = is_async or not is_idle() ? stream_ : program;
    if (stream != program)
        follow(stream, program);
    if (last_stream_ != nullptr and last_stream_ != program and last_stream_ != stream)
        follow(stream, last_stream_);
    return stream;
}

void TransferOrder::end_sync(cudaStream_t stream, cudaStream_t program) {
    if (stream != program)
        follow(program, stream);
    last_async_ = nullptr;
    last_stream_ = program;
}

void TransferOrder::end_async(int64_t transfer_id, Addresses results) {
    Transfers& transfers = transfers_.at(transfer_id);
    record_event(transfers.end, stream_);
    transfers.in_flight.push_back(std::move(results));
    last_async_ = &transfers;
    last_stream_ = stream_;
}

void TransferOrder::wait(cudaStream_t program, int64_t transfer_id, const Addresses& results) {
    const std::lock_guard lock(mutex_);
    Transfers& transfers = transfers_.at(transfer_id);
    wait_for(program, transfers.end);
    if (last_async_ == &transfers)
        last_stream_ = program;
    const auto found = std::ranges::find(transfers.in_flight, results);
    if (found == transfers.in_flight.end())
        throw std::runtime_error("a transfer ends with results that are not where it began with them: both calls must "
                                 "be in one program, and XLA must not copy between them");
    transfers.in_flight.erase(found);
}

void TransferOrder::wait_until_started(cudaStream_t program) {
    wait_for(program, started_);
}

cudaStream_t TransferOrder::fork(cudaStream_t stream) {
    follow(side_stream_, stream);
    return side_stream_;
}

void TransferOrder::join(cudaStream_t stream) {
    follow(stream, side_stream_);
}

void TransferOrder::follow(cudaStream_t later, cudaStream_t earlier) {
    record_event(order_event_, earlier);
    wait_for(later, order_event_);
}

bool TransferOrder::is_idle() const {
    return std::ranges::all_of(transfers_, [](const auto& each) { return each.second.in_flight.empty(); });
}

}  // namespace jaxmagi::collectives
