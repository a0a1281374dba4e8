#include "csrc/collectives/address_exchange.h"

#include "csrc/collectives/barrier.cuh"
#include "csrc/collectives/launch.cuh"
#include "csrc/common/sm90/dependent_launch.cuh"

namespace jaxmagi::collectives {
namespace {

constexpr int kThreads = 256;

// Peers overwrite a rank's signals only in their next call, which begins when this rank has taken part in the present
// one. So there is no barrier at the end.
__global__ void exchange_addresses_kernel(const __grid_constant__ TransferParams params, FailureAndFlags words,
                                          uint64_t* addresses) {
    __shared__ CallState call;
    sm90::launch_dependent_grids();
    for (int64_t i = threadIdx.x; i < words.count; i += kThreads)
        words.first[i] = 0;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x >= kWarp)
        return;
    wait_until_ready(params, call);
    __syncwarp();
    for (int slot = threadIdx.x; slot < params.num_slots; slot += kWarp)
        addresses[slot] = call.addresses[slot][0];
    if (threadIdx.x == 0)
        params.controls[params.slot]->epoch = call.epoch;
}

__global__ void finish_product_kernel(const __grid_constant__ TransferParams params, const uint32_t* failure) {
    sm90::wait_for_prior_grids();
    params.controls[params.slot]->product = {};
    if (__ldcg(failure) == 0)
        return;
    const auto [name, place] = native_text(params);
    abort_kernel("jaxmagi: rank %d of %d waited for %d ms until rank %d did its part (%s%s)\n", params.rank,
                 params.size, static_cast<int>(params.timeout_ns / 1000000), static_cast<int>(*failure) - 1, name,
                 place);
}

}  // namespace

cudaError_t exchange_addresses(const TransferParams& params, FailureAndFlags words, uint64_t* addresses,
                               cudaStream_t stream) {
    exchange_addresses_kernel<<<1, kThreads, 0, stream>>>(params, words, addresses);
    return cudaGetLastError();
}

cudaError_t preload_address_exchange() {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, exchange_addresses_kernel);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, finish_product_kernel) : error;
}

cudaError_t finish_product(const TransferParams& params, const uint32_t* failure, cudaStream_t stream) {
    return launch(finish_product_kernel, 1, 1, 0, stream, {.overlaps = true}, params, failure);
}

}  // namespace jaxmagi::collectives
