// Functions around the products of the forward kernel, against the host: tanh, lazy rescale, visible columns.

#include "csrc/attention/sm90/forward/epilogue.cuh"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::sm90;

__global__ void apply_tanh(const float* x, float* y, int count) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        y[i] = fast_tanh(x[i]);
}

// Arguments from -20 to 20 are dense around 0; errors are relative to the result.
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
    verdict.compare("tanh", relative, std::vector<double>(x.size()), 7e-7);
}

// One step of a warp on 16 rows of logits. Of `rows`, the first 16 are row_max before the step; it writes row_max after
// the step behind them, and corrections last.
template <int kKeys>
__global__ void step_rows(const float* logits, float* rows, float to_log2, int* rescaled) {
    const int row = threadIdx.x / 4, first_column = threadIdx.x % 4 * 2;
    float own[kKeys / 2];
    for (int i = 0; i < kKeys / 2; ++i)
        own[i] = logits[(row + i / 2 % 2 * 8) * kKeys + first_column + i / 4 * 8 + i % 2];
    RowState state;
    for (int r = 0; r < 2; ++r) {
        state.row_max[r] = rows[row + 8 * r];
        state.correction[r] = 1;
    }
    *rescaled = rescale_if_needed(own, state, to_log2);
    for (int r = 0; r < 2; ++r) {
        rows[16 + row + 8 * r] = state.row_max[r];
        rows[32 + row + 8 * r] = state.correction[r];
    }
}

enum RowKind { kAnything, kNegative, kFarBelow, kMasked, kNan, kRowKinds };

std::vector<float> random_row(std::mt19937& generator, unsigned kind, int keys) {
    std::normal_distribution<float> normal(0, 20);
    std::vector<float> row(keys);
    for (float& x : row) {
        x = normal(generator);
        if (kind == kNegative or kind == kFarBelow)
            x = (kind == kFarBelow ? -1000 : 0) - std::abs(x);
        if (kind == kMasked or generator() % 4 == 0)
            x = -INFINITY;
    }
    if (kind == kNan)
        row[generator() % keys] = NAN;
    return row;
}

// Returns the largest number, or NaN if there is any.
float exact_maximum(const std::vector<float>& row) {
    float largest = -INFINITY;
    for (const float x : row)
        largest = std::isnan(x) or x > largest ? x : largest;
    return largest;
}

// Rows of a warp are rescaled together, and only if one of them really needs it, even if all its logits are negative.
void check_rescale(Verdict& verdict) {
    constexpr int kKeys = 80, kTrials = 600;
    constexpr float kToLog2 = 0.5f;  // exact
    std::mt19937 generator(1);
    std::vector<float> got, want;
    int num_rescaled = 0;
    for (int trial = 0; trial < kTrials; ++trial) {
        std::vector<float> logits, largest(16), rows(48);
        const bool mixed = generator() % 2 == 0, first_step = generator() % 4 == 0;
        const unsigned kind_of_all = generator() % kRowKinds;
        bool needed = false;
        for (int row = 0; row < 16; ++row) {
            const auto values = random_row(generator, mixed ? generator() % kRowKinds : kind_of_all, kKeys);
            logits.insert(logits.end(), values.begin(), values.end());
            largest[row] = exact_maximum(values) * kToLog2;
            const bool fresh = first_step or std::isinf(largest[row]);
            rows[row] = fresh ? -FLT_MAX : largest[row] - 0.25f * static_cast<float>(generator() % 42) + 2;
            if (std::isnan(largest[row]))  // its other logits may count or not: far below row_max, they do not matter
                rows[row] = 1e6f;
            needed = needed or largest[row] - rows[row] > 8;
        }
        const DeviceArray<float> device(logits), changed(rows);
        const DeviceArray<int> rescaled(std::vector{-1});
        step_rows<kKeys><<<1, 32>>>(device.data(), changed.data(), kToLog2, rescaled.data());
        got.push_back(static_cast<float>(rescaled.to_host()[0]));
        want.push_back(needed);
        num_rescaled += needed;
        const std::vector<float> result = changed.to_host();
        for (int row = 0; row < 16; ++row) {
            const float before = rows[row], after = needed and largest[row] > before ? largest[row] : before;
            got.insert(got.end(), {result[16 + row], result[32 + row]});
            want.insert(want.end(), {after, std::exp2(before - after)});
        }
    }
    verdict.compare("row_max and correction", got, want, 1e-6);
    verdict.expect("some trials rescale and some do not", 0 < num_rescaled and num_rescaled < kTrials);
}

// A block of keys from first_key on, of which columns [begin, end) count, and the 16 rows of a warp from first_row on
// of a tile whose positions, `1 << pack_shift` rows each, begin at `position`.
struct Block {
    Band band;
    int position, num_positions, first_key, begin, end, pack_shift, first_row;
};

// Writes 1 for each visible logit of the warp's rows and 0 for the other ones; the last number is whether the block is
// masked.
template <int kKeys> __global__ void mask_block(Block block, float* visible) {
    __shared__ BlockDescriptor descriptor;
    descriptor = TileBand::make(block.band, block.position, block.num_positions - 1)
                     .block(block.first_key, block.begin, block.end, kKeys);
    __syncthreads();
    const int row = threadIdx.x / 4, first_column = threadIdx.x % 4 * 2;
    float logits[kKeys / 2];
    for (float& x : logits)
        x = 1;
    apply_mask(logits, visible_bits<kKeys / 2>(descriptor, block.first_row + row, block.pack_shift, first_column));
    for (int i = 0; i < kKeys / 2; ++i)
        visible[(row + i / 2 % 2 * 8) * kKeys + first_column + i / 4 * 8 + i % 2] = logits[i] == 1;
    visible[16 * kKeys] = descriptor.masked;
}

bool is_visible(const Block& block, int row, int column) {
    const int64_t q = int64_t{block.position} + ((block.first_row + row) >> block.pack_shift);
    const int64_t distance = int64_t{block.first_key} + column - q;
    return block.band.q0 <= q and q < block.band.q1 and block.band.lo <= distance and distance <= block.band.hi and
           block.begin <= column and column < block.end;
}

// Returns a block that is often at the longest lengths, where nothing may overflow.
template <int kKeys> Block random_block(std::mt19937& generator) {
    const auto random = [&](int low, int high) { return std::uniform_int_distribution(low, high)(generator); };
    const auto anywhere = [&] { return random(0, 1) * (kUnbounded - 4096) + random(0, 3000); };
    Block block{.position = anywhere(), .first_key = anywhere(), .pack_shift = random(0, 4)};
    block.num_positions = 192 >> block.pack_shift;
    block.first_row = 16 * random(0, 11);
    block.begin = random(0, 1) * random(0, kKeys - 1);
    block.end = random(0, 1) ? kKeys : random(block.begin + 1, kKeys);
    const int near = block.first_key - block.position, reach = kKeys + 200;
    block.band = {};  // cudafe loses designators after a member that is left out in a template
    block.band.q0 = std::max(0, block.position + random(-200, 100));
    block.band.q1 = block.position + random(1, 400);
    block.band.lo = random(0, 1) ? -kUnbounded : std::max(-kUnbounded, near + random(-reach, reach));
    block.band.hi = random(0, 1) ? kUnbounded : std::min(kUnbounded, near + random(-reach, reach));
    return block;
}

template <int kKeys> void check_mask(Verdict& verdict) {
    std::mt19937 generator(kKeys);
    std::vector<float> got, want;
    int num_open = 0, num_wrongly_open = 0;
    for (int trial = 0; trial < 400; ++trial) {
        const Block block = random_block<kKeys>(generator);
        const DeviceArray<float> visible(std::vector<float>(16 * kKeys + 1, -1));
        mask_block<kKeys><<<1, 32>>>(block, visible.data());
        std::vector<float> result = visible.to_host();
        const bool open = result.back() == 0;
        num_open += open;
        result.pop_back();
        got.insert(got.end(), result.begin(), result.end());
        for (int row = 0; row < 16; ++row) {
            for (int column = 0; column < kKeys; ++column) {
                want.push_back(is_visible(block, row, column));
                num_wrongly_open += open and not is_visible(block, row, column);
            }
        }
    }
    verdict.compare("visible columns of " + std::to_string(kKeys), got, want, 0);
    verdict.expect("every cell of blocks that are not masked is visible", num_open > 0 and num_wrongly_open == 0);
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    return run_checks({check_tanh, check_rescale, check_mask<64>, check_mask<80>, check_mask<96>, check_mask<112>,
                       check_mask<128>});
}
