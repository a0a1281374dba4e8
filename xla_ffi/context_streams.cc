#include "xla_ffi/context_streams.h"

#include <exception>
#include <map>
#include <mutex>

#include "csrc/collectives/driver_function.h"
#include "csrc/common/check_cuda.h"
#include "xla_ffi/cuda_checks.h"

namespace jaxmagi {

ContextStreams& ContextStreams::of_current_device() {
    static std::mutex mutex;
    static auto* const devices = new std::map<int, ContextStreams>;  // never destroyed: handlers may outlive main
    const int ordinal = current_ordinal();
    const std::lock_guard lock(mutex);
    const auto known = devices->find(ordinal);
    return known != devices->end() ? known->second : devices->emplace(ordinal, ContextStreams()).first->second;
}

ContextStreams::ContextStreams() {
    int lowest, highest;
    check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for the priorities of streams");
    // SMs that become free go to transfers and copies before computations, and the host does not wait behind these.
    for (cudaStream_t* const stream : {&transfers_, &copies_, &setup_})
        check_cuda(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest), "making a stream");
    for (cudaStream_t* const stream : {&side_, &helpers_})
        check_cuda(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "making a stream");
}

cudaEvent_t ContextStreams::event(size_t index) {
    while (events_.size() <= index) {
        cudaEvent_t event;
        check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
        events_.push_back(event);
    }
    return events_[index];
}

ContextFork::ContextFork(std::span<collectives::TransferOrder* const> orders, cudaStream_t program)
    : streams_(ContextStreams::of_current_device()), orders_(orders.begin(), orders.end()), program_(program) {
    for (collectives::TransferOrder* const order : orders)
        order->begin(program);
}

void ContextFork::begin() {
    const cudaEvent_t begin = record(program_);
    for (const cudaStream_t stream : {transfers(), copies(), streams_.side(), helpers(), setup()})
        wait(stream, begin);
}

ContextFork::~ContextFork() {
    if (is_joined_)
        return;
    try {
        join();
    } catch (const std::exception&) {  // the error that has come before tells more
    }
}

void ContextFork::join() {
    is_joined_ = true;
    // The program's stream waits for one event: each costs a microsecond before its next kernel can begin.
    for (const cudaStream_t stream : {transfers(), copies(), helpers()})
        wait(streams_.side(), record(stream));
    wait(program_, record(streams_.side()));
    for (collectives::TransferOrder* const order : orders_)
        order->end(program_);
}

cudaEvent_t ContextFork::record(cudaStream_t stream) {
    const cudaEvent_t event = streams_.event(num_events_++);
    check_cuda(cudaEventRecord(event, stream), "recording an event");
    return event;
}

void ContextFork::wait(cudaStream_t stream, cudaEvent_t event) {
    check_cuda(cudaStreamWaitEvent(stream, event), "waiting for an event");
}

void ContextFork::wait_until_set(cudaStream_t stream, const uint32_t* flag) {
    static auto* const wait_value = JAXMAGI_DRIVER(cuStreamWaitValue32);
    if (wait_value(stream, reinterpret_cast<CUdeviceptr>(flag), 1, CU_STREAM_WAIT_VALUE_GEQ) != CUDA_SUCCESS)
        throw std::runtime_error("waiting for a flag in a stream failed");
}

void ContextFork::set(cudaStream_t stream, uint32_t* flag, uint32_t value) {
    static auto* const write_value = JAXMAGI_DRIVER(cuStreamWriteValue32);
    constexpr unsigned kBehindWrites = CU_STREAM_WRITE_VALUE_DEFAULT;  // what the stream has written is visible before
    if (write_value(stream, reinterpret_cast<CUdeviceptr>(flag), value, kBehindWrites) != CUDA_SUCCESS)
        throw std::runtime_error("setting a flag in a stream failed");
}

}  // namespace jaxmagi
