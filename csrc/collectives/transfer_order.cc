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

void wait(cudaStream_t stream, cudaEvent_t event) {
    check_cuda(cudaStreamWaitEvent(stream, event), "waiting for an event");
}

}  // namespace

void TransferOrder::create() {
    int lowest, highest;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for the priorities of streams");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "making a stream");
    for (cudaEvent_t* const event : {&came_here_, &begun_})
        *event = make_event();
}

void TransferOrder::destroy() {
    for (const auto& [number, transfers] : numbers_)
        check_cuda(cudaEventDestroy(transfers.end), "giving back an event");
    for (const cudaEvent_t event : {came_here_, begun_})
        check_cuda(cudaEventDestroy(event), "giving back an event");
    check_cuda(cudaStreamDestroy(stream_), "giving back a stream");
}

int64_t TransferOrder::prepare(int64_t transfer, cudaStream_t program) {
    const std::lock_guard lock(mutex_);
    abandon_transfers(program);
    if (not numbers_.contains(transfer))
        numbers_[transfer] = {make_event(), {}};
    return ++execution_;
}

void TransferOrder::end(int64_t execution, cudaStream_t program) {
    const std::lock_guard lock(mutex_);
    if (execution == execution_)
        abandon_transfers(program);
}

void TransferOrder::abandon_transfers(cudaStream_t program) {
    if (is_idle())
        return;
    follow(program, stream_);
    for (auto& [number, transfers] : numbers_)
        transfers.under_way.clear();
}

cudaStream_t TransferOrder::enter(cudaStream_t program, bool is_apart) {
    const cudaStream_t stream = is_apart or not is_idle() ? stream_ : program;
    if (stream != program)
        follow(stream, program);
    if (behind_all_ != nullptr and behind_all_ != program and behind_all_ != stream)
        follow(stream, behind_all_);
    return stream;
}

void TransferOrder::finish(cudaStream_t stream, cudaStream_t program) {
    if (stream != program)
        follow(program, stream);
    last_apart_ = nullptr;
    behind_all_ = program;
}

void TransferOrder::record(int64_t transfer, Places results) {
    Transfers& transfers = numbers_.at(transfer);
    record_event(transfers.end, stream_);
    transfers.under_way.push_back(std::move(results));
    last_apart_ = &transfers;
    behind_all_ = stream_;
}

void TransferOrder::join(cudaStream_t program, int64_t transfer, const Places& results) {
    const std::lock_guard lock(mutex_);
    Transfers& transfers = numbers_.at(transfer);
    wait(program, transfers.end);
    if (last_apart_ == &transfers)
        behind_all_ = program;
    const auto found = std::ranges::find(transfers.under_way, results);
    if (found == transfers.under_way.end())
        throw std::runtime_error("a transfer ends with results that are not where it began with them: both calls must "
                                 "be in one program, and XLA must not copy between them");
    transfers.under_way.erase(found);
}

void TransferOrder::let_begin(cudaStream_t program) {
    wait(program, begun_);
}

void TransferOrder::let_end(cudaStream_t program, int64_t transfer) {
    wait(program, numbers_.at(transfer).end);
}

void TransferOrder::follow(cudaStream_t later, cudaStream_t earlier) {
    record_event(came_here_, earlier);
    wait(later, came_here_);
}

bool TransferOrder::is_idle() const {
    return std::ranges::all_of(numbers_, [](const auto& each) { return each.second.under_way.empty(); });
}

}  // namespace jaxmagi::collectives
