// TMA loads and stores of panels at all kinds of coordinates, against boxes that the host cuts out or puts in.

#include "csrc/common/sm90/bulk.cuh"
#include "csrc/common/sm90/mbarrier.cuh"
#include "csrc/common/sm90/panel.h"
#include "csrc/common/sm90/tensor_map.h"
#include "csrc/common/sm90/tma.cuh"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::sm90;

constexpr int kMaxRows = 256;
constexpr int kBatch = 3, kLength = 37, kHeads = 17, kDim = 72;

// Loads one box over memory that holds other numbers, and undoes the swizzle.
__global__ void load_box(const __grid_constant__ CUtensorMap map, Coordinates at, int rows, uint16_t* box) {
    __shared__ alignas(1024) uint16_t panel[kMaxRows * kPanelColumns];
    __shared__ uint64_t barrier;
    const Mbarrier arrived{shared_address(&barrier)};
    for (int i = threadIdx.x; i < kMaxRows * kPanelColumns; i += blockDim.x)
        panel[i] = 0xffff;
    fence_shared_for_async();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(map);
        arrived.init(1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived.arrive_and_expect(rows * kPanelRowBytes);
        tma_load(shared_address(panel), map, at, arrived);
    }
    arrived.wait(0);
    for (int i = threadIdx.x; i < kMaxRows * kPanelColumns; i += blockDim.x) {
        const int row = i / kPanelColumns, column = i % kPanelColumns, unit = column / 8 ^ row % 8;
        box[i] = panel[row * kPanelColumns + unit * 8 + column % 8];
    }
}

// Swizzles and stores one box.
__global__ void store_box(const __grid_constant__ CUtensorMap map, Coordinates at, const uint16_t* box) {
    __shared__ alignas(1024) uint16_t panel[kMaxRows * kPanelColumns];
    for (int i = threadIdx.x; i < kMaxRows * kPanelColumns; i += blockDim.x) {
        const int row = i / kPanelColumns, column = i % kPanelColumns, unit = column / 8 ^ row % 8;
        panel[row * kPanelColumns + unit * 8 + column % 8] = box[i];
    }
    fence_shared_for_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store(map, at, shared_address(panel));
        bulk_commit();
        bulk_wait_read<0>();
    }
}

bool inside(int x, int length) {
    return 0 <= x and x < length;
}

// Returns the place in the tensor of element i of a box of which each position has `heads` rows, or -1 outside.
int place_of(int i, Coordinates at, int heads) {
    const int row = i / kPanelColumns;
    const int x = at.x + i % kPanelColumns, y = at.y + row % heads, z = at.z + row / heads;
    const bool exists = inside(x, kDim) and inside(y, kHeads) and inside(z, kLength) and inside(at.w, kBatch);
    return exists ? ((at.w * kLength + z) * kHeads + y) * kDim + x : -1;
}

CUtensorMap make_map(const DeviceArray<uint16_t>& tensor, int rows, int heads) {
    CUtensorMap map;
    const HeadsTensor described{tensor.data(), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kBatch, kLength, kHeads, kHeads, kDim};
    must(encode_panel_map(described, heads, rows / heads, &map), "encode_panel_map");
    return map;
}

void check_load(Verdict& verdict, const char* name, Coordinates at, int rows, int heads = 1) {
    const auto tensor = random_numbers<BFloat16>(kBatch * kLength * kHeads * kDim, 3);
    std::vector<uint16_t> want(kMaxRows * kPanelColumns, 0xffff);
    for (int i = 0; i < rows * kPanelColumns; ++i) {
        const int place = place_of(i, at, heads);
        want[i] = place < 0 ? uint16_t{0} : tensor[place];
    }
    const DeviceArray<uint16_t> device(tensor), box(std::vector<uint16_t>(kMaxRows * kPanelColumns));
    load_box<<<1, 128>>>(make_map(device, rows, heads), at, rows, box.data());
    verdict.compare(std::string("TMA load ") + name, box.to_host(), want, 0);
}

// Checks that a store writes what lies inside the tensor and nothing else.
void check_store(Verdict& verdict, const char* name, Coordinates at, int rows, int heads) {
    auto tensor = random_numbers<BFloat16>(kBatch * kLength * kHeads * kDim, 3);
    const auto numbers = random_numbers<BFloat16>(kMaxRows * kPanelColumns, 5);
    const DeviceArray<uint16_t> device(tensor), box(numbers);
    store_box<<<1, 128>>>(make_map(device, rows, heads), at, box.data());
    for (int i = 0; i < rows * kPanelColumns; ++i)
        if (const int place = place_of(i, at, heads); place >= 0)
            tensor[place] = numbers[i];
    verdict.compare(std::string("TMA store ") + name, device.to_host(), tensor, 0);
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    Verdict verdict;
    check_load(verdict, "inside", {0, 1, 5, 1}, 16);
    check_load(verdict, "of the largest box", {0, 0, 0, 0}, 256);
    check_load(verdict, "of a number of rows that is no multiple of 16", {0, 2, 3, 2}, 21);
    check_load(verdict, "beyond the head dimension", {64, 1, 5, 1}, 16);
    check_load(verdict, "beyond the length, not into the next example", {0, 1, 30, 1}, 64);
    check_load(verdict, "before the beginning, not into the example before", {0, 1, -7, 1}, 64);
    check_load(verdict, "entirely before the beginning", {0, 1, -64, 1}, 64);
    check_load(verdict, "entirely beyond the length", {0, 1, 1000, 1}, 64);
    check_load(verdict, "beyond length and head dimension", {64, 2, 36, 2}, 80);
    check_load(verdict, "of 4 heads at 48 positions, beyond the length", {0, 8, 5, 1}, 192, 4);
    check_load(verdict, "of 8 heads at 24 positions", {0, 8, 5, 1}, 192, 8);
    check_load(verdict, "of 16 heads at 12 positions, beyond the head dimension", {64, 0, 20, 2}, 192, 16);
    check_store(verdict, "inside", {0, 1, 5, 1}, 64, 1);
    check_store(verdict, "of 8 heads at 8 positions, beyond the length", {0, 8, 33, 1}, 64, 8);
    check_store(verdict, "of 16 heads at 4 positions, beyond the head dimension", {64, 0, 20, 2}, 64, 16);
    check_store(verdict, "entirely beyond the length", {0, 4, 37, 0}, 64, 4);
    return verdict.exit_code();
}
