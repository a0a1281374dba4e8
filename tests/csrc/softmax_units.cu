// The arithmetic around the products of the forward kernel: tanh, visible columns, transposes within a quad.

#include "csrc/attention/sm90/forward_epilogue.cuh"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::sm90;

__global__ void apply_tanh(const float* x, float* y, int count) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        y[i] = fast_tanh(x[i]);
}

// From -20 to 20, dense around 0; errors relative to the result.
void check_tanh(Verdict& verdict) {
    std::vector<float> x;
    for (int i = -100'000; i <= 100'000; ++i)
        x.push_back(static_cast<float>(20 * std::pow(i / 1e5, 3)));
    const DeviceArray<float> device(x), result(std::vector<float>(x.size()));
    apply_tanh<<<100, 256>>>(device.data(), result.data(), static_cast<int>(x.size()));
    std::vector<double> relative;
    const std::vector<float> y = result.to_host();
    for (size_t i = 0; i < x.size(); ++i)
        relative.push_back(x[i] == 0 ? y[i] : y[i] / std::tanh(static_cast<double>(x[i])) - 1);
    verdict.compare("tanh", relative, std::vector<double>(x.size()), 1e-6);
}

__global__ void transpose(uint32_t* words) {
    uint32_t own[4];
    for (int i = 0; i < 4; ++i)
        own[i] = threadIdx.x * 4 + i;
    transpose_quad(own, threadIdx.x);
    for (int i = 0; i < 4; ++i)
        words[threadIdx.x * 4 + i] = own[i];
}

void check_transpose(Verdict& verdict) {
    const DeviceArray<uint32_t> words(std::vector<uint32_t>(128));
    transpose<<<1, 32>>>(words.data());
    std::vector<uint32_t> want;
    for (uint32_t lane = 0; lane < 32; ++lane)
        for (uint32_t i = 0; i < 4; ++i)
            want.push_back((lane / 4 * 4 + i) * 4 + lane % 4);
    verdict.compare("transpose", words.to_host(), want, 0);
}

// One warp: what its threads see of a block whose rows are those of the tile from 16 on, some to a position.
template <int kKeys> __global__ void hide_block(BlockMessage message, int pack_shift, float* seen) {
    __shared__ BlockMessage shared;
    shared = message;
    __syncthreads();
    const int row = 16 + threadIdx.x / 4, first_column = threadIdx.x % 4 * 2;
    float logits[kKeys / 2];
    for (float& x : logits)
        x = 1;
    hide(logits, visible_bits<kKeys / 2>(shared, row, pack_shift, first_column));
    for (int i = 0; i < kKeys / 2; ++i) {
        const int column = first_column + i / 4 * 8 + i % 2, at = row - 16 + i / 2 % 2 * 8;
        seen[at * kKeys + column] = logits[i] == 1;
    }
}

template <int kKeys> void check_hide(Verdict& verdict) {
    std::mt19937 generator(kKeys);
    const auto random = [&](int low, int high) { return std::uniform_int_distribution(low, high)(generator); };
    std::vector<float> got, want;
    for (int trial = 0; trial < 200; ++trial) {
        const int pack_shift = trial % 5;
        const BlockMessage message{.row_begin = random(-40, 40),
                                   .row_end = random(0, 60),
                                   .lower = random(-60, kKeys + 20),
                                   .upper = random(-60, kKeys + 60),
                                   .num_columns = random(1, kKeys),
                                   .masked = true};
        const DeviceArray<float> seen(std::vector<float>(16 * kKeys, -1));
        hide_block<kKeys><<<1, 32>>>(message, pack_shift, seen.data());
        for (const float x : seen.to_host())
            got.push_back(x);
        for (int row = 16; row < 32; ++row) {
            const int at = row >> pack_shift;
            for (int column = 0; column < kKeys; ++column)
                want.push_back(message.row_begin <= at and at < message.row_end and at + message.lower <= column and
                               column < at + message.upper and column < message.num_columns);
        }
    }
    verdict.compare("visible columns of " + std::to_string(kKeys), got, want, 0);
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    Verdict verdict;
    check_tanh(verdict);
    check_transpose(verdict);
    check_hide<64>(verdict);
    check_hide<80>(verdict);
    check_hide<112>(verdict);
    check_hide<128>(verdict);
    check_hide<144>(verdict);
    check_hide<176>(verdict);
    return verdict.exit_code();
}
