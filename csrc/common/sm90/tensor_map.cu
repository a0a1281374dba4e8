#include "csrc/common/sm90/tensor_map.h"

#include "csrc/common/sm90/panel.h"

namespace jaxmagi::sm90 {
namespace {

// Gets the encoder through the CUDA runtime: a module that links to the driver's library would not load without one.
cudaError_t encoder(decltype(&cuTensorMapEncodeTiled)* function) {
    constexpr unsigned kFirstVersion = 12000;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, kFirstVersion, cudaEnableDefault, &status);
    *function = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    if (error == cudaSuccess and status != cudaDriverEntryPointSuccess)
        return cudaErrorInsufficientDriver;
    return error;
}

}  // namespace

cudaError_t encode_panel_map(const HeadsTensor& tensor, int box_heads, int box_positions, CUtensorMap* map) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    static const cudaError_t found = encoder(&encode);
    if (found != cudaSuccess)
        return found;
    const cuuint64_t dim = tensor.dim, heads = tensor.heads, length = tensor.length, batch = tensor.batch;
    const cuuint64_t sizes[] = {dim, heads, length, batch};
    const cuuint64_t row_bytes = tensor.row_heads * dim * kElementBytes;
    const cuuint64_t strides[] = {dim * kElementBytes, row_bytes, length * row_bytes};
    const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(box_heads),
                              static_cast<cuuint32_t>(box_positions), 1};
    const cuuint32_t steps[] = {1, 1, 1, 1};
    const CUresult result =
        encode(map, tensor.type, 4, const_cast<void*>(tensor.data), sizes, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jaxmagi::sm90
