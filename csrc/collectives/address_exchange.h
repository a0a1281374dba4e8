#pragma once

#include <cuda_runtime_api.h>

#include "csrc/collectives/transfer_params.h"

namespace jaxmagi::collectives {

// Words in device memory: a failure, which tells which rank, counted from 1, was waited for too long, and flags behind
// it.
struct FailureAndFlags {
    uint32_t* first;
    int64_t count;
};

// Tells every rank of a call where it finds the array that each has published, on this device: `addresses` has one for
// each rank. All ranks are native peers, and their slots are their ranks. The words become zero before a peer
// can know the addresses. Counts as a call of the group. The kernel behind it may begin at once, as a programmatic
// dependent launch.
cudaError_t exchange_addresses(const TransferParams& params, FailureAndFlags words, uint64_t* addresses,
                               cudaStream_t stream);

// Loads the kernels, on each device before their first use.
cudaError_t preload_address_exchange();

// Ends a product with a collective: makes its counts zero for the next one, and ends the program if the word is not
// zero, which tells that it has failed. It may begin before the product has ended.
cudaError_t finish_product(const TransferParams& params, const uint32_t* failure, cudaStream_t stream);

}  // namespace jaxmagi::collectives
