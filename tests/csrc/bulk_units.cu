// Bulk loads and additions, 8 x 8 matrices over the lanes of a warp, and transposes in quads, against the host.

#include "csrc/common/sm90/bulk.cuh"
#include "csrc/common/sm90/stmatrix.cuh"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::sm90;

constexpr int kNumbers = 132, kCtas = 300;

// Every CTA adds the same numbers, and those of the second half twice.
__global__ void load_and_add(const float* from, float* to) {
    __shared__ alignas(16) float numbers[kNumbers];
    __shared__ uint64_t barrier;
    const Mbarrier arrived{shared_address(&barrier)};
    if (threadIdx.x == 0) {
        arrived.init(1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived.arrive_and_expect(sizeof(numbers));
        bulk_load(shared_address(numbers), from, sizeof(numbers), arrived);
    }
    arrived.wait(0);
    for (int i = threadIdx.x; i < kNumbers; i += blockDim.x)
        numbers[i] += 1;
    fence_shared_for_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        constexpr int kHalf = kNumbers / 2 / 4 * 4;
        bulk_add(to, shared_address(numbers), sizeof(numbers));
        bulk_commit();
        bulk_wait_read<0>();
        bulk_add(to + kHalf, shared_address(numbers + kHalf), sizeof(numbers) - kHalf * sizeof(float));
        bulk_commit();
        bulk_wait();
    }
}

void check_bulk(Verdict& verdict) {
    std::vector<float> numbers(kNumbers), want(kNumbers);
    for (int i = 0; i < kNumbers; ++i) {
        numbers[i] = static_cast<float>(i);
        want[i] = (i + 1.f) * kCtas * (i < kNumbers / 2 / 4 * 4 ? 1 : 2) + 5;
    }
    const DeviceArray<float> from(numbers), to(std::vector<float>(kNumbers, 5));
    load_and_add<<<kCtas, 64>>>(from.data(), to.data());
    verdict.compare("bulk load and addition", to.to_host(), want, 0);
}

// Stores four matrices of a warp, one below the other.
template <bool kTransposed> __global__ void store_four(const uint32_t* words, uint16_t* to) {
    __shared__ alignas(16) uint16_t rows[32][8];
    const int lane = threadIdx.x;
    const uint32_t matrices[4] = {words[lane], words[32 + lane], words[64 + lane], words[96 + lane]};
    if constexpr (kTransposed)
        store_transposed(shared_address(rows[lane]), matrices);
    else
        store_matrices(shared_address(rows[lane]), matrices);
    __syncwarp();
    for (int i = 0; i < 8; ++i)
        to[lane * 8 + i] = rows[lane][i];
}

__global__ void transpose_one(const uint32_t* words, uint32_t* to) {
    to[threadIdx.x] = transpose_matrix(words[threadIdx.x]);
}

void check_matrices(Verdict& verdict) {
    std::vector<uint32_t> numbered(128);  // numbers 0 .. 255 of four matrices, 2 a word, as lanes hold them
    for (uint32_t i = 0; i < 128; ++i)
        numbered[i] = 2 * i | (2 * i + 1) << 16;
    const DeviceArray<uint32_t> words(numbered), word(std::vector<uint32_t>(32));
    const DeviceArray<uint16_t> rows(std::vector<uint16_t>(256));
    std::vector<uint16_t> plain(256), transposed(256);
    std::vector<uint32_t> swapped(32);
    for (int i = 0; i < 256; ++i) {
        plain[i] = i;
        transposed[i] = i / 64 * 64 + i % 8 * 8 + i / 8 % 8;
    }
    for (int lane = 0; lane < 32; ++lane)
        swapped[lane] = transposed[2 * lane] | static_cast<uint32_t>(transposed[2 * lane + 1]) << 16;
    store_four<false><<<1, 32>>>(words.data(), rows.data());
    verdict.compare("matrices stored", rows.to_host(), plain, 0);
    store_four<true><<<1, 32>>>(words.data(), rows.data());
    verdict.compare("matrices stored transposed", rows.to_host(), transposed, 0);
    transpose_one<<<1, 32>>>(words.data(), word.data());
    verdict.compare("matrix transposed", word.to_host(), swapped, 0);
}

__global__ void exchange(uint32_t* words) {
    const int lane = threadIdx.x;
    uint32_t own[4] = {words[lane * 4], words[lane * 4 + 1], words[lane * 4 + 2], words[lane * 4 + 3]};
    transpose_quad(own, lane);
    for (int i = 0; i < 4; ++i)
        words[lane * 4 + i] = own[i];
}

void check_quads(Verdict& verdict) {
    std::vector<uint32_t> words(128), want(128);
    for (int i = 0; i < 128; ++i) {
        words[i] = i;
        want[i] = i / 16 * 16 + i % 4 * 4 + i / 4 % 4;
    }
    const DeviceArray<uint32_t> device(words);
    exchange<<<1, 32>>>(device.data());
    verdict.compare("words exchanged in quads", device.to_host(), want, 0);
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    return run_checks({check_bulk, check_matrices, check_quads});
}
