// What surrounds the products of the forward kernel: tanh, references of the softmax, visible columns, transposes.

#include "csrc/attention/sm90/forward/epilogue.cuh"
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
    verdict.compare("tanh", relative, std::vector<double>(x.size()), 7e-7);
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

// One step of a warp: 16 rows of logits, and the references of the rows before (16) and after (16), scales behind them.
template <int kKeys>
__global__ void step_references(const float* logits, float* references, float to_log2, int* moved) {
    const int row = threadIdx.x / 4, first_column = threadIdx.x % 4 * 2;
    float own[kKeys / 2];
    for (int i = 0; i < kKeys / 2; ++i)
        own[i] = logits[(row + i / 2 % 2 * 8) * kKeys + first_column + i / 4 * 8 + i % 2];
    RowState rows;
    for (int r = 0; r < 2; ++r) {
        rows.reference[r] = references[row + 8 * r];
        rows.scale[r] = 1;
    }
    *moved = move_references(own, rows, to_log2);
    for (int r = 0; r < 2; ++r) {
        references[16 + row + 8 * r] = rows.reference[r];
        references[32 + row + 8 * r] = rows.scale[r];
    }
}

// What a row of logits is like.
enum class RowKind { kAnything, kNegative, kFarBelow, kUnseen, kNan, kCount };

RowKind random_kind(std::mt19937& generator) {
    return static_cast<RowKind>(generator() % static_cast<int>(RowKind::kCount));
}

std::vector<float> random_row(std::mt19937& generator, RowKind kind, int keys) {
    std::normal_distribution<float> normal(0, 20);
    std::vector<float> row(keys);
    for (float& x : row) {
        x = normal(generator);
        if (kind == RowKind::kNegative)
            x = -std::abs(x);
        if (kind == RowKind::kFarBelow)
            x = -1000 - std::abs(x);
        if (kind == RowKind::kUnseen or generator() % 4 == 0)
            x = -INFINITY;
    }
    if (kind == RowKind::kNan)
        row[generator() % keys] = NAN;
    return row;
}

// The largest number, NaN if there is any.
float exact_maximum(const float* row, int keys) {
    float largest = -INFINITY;
    for (int i = 0; i < keys; ++i)
        largest = std::isnan(row[i]) or row[i] > largest ? row[i] : largest;
    return largest;
}

// Rows of a warp move together, and only if one of them is really behind: whether all its logits are negative or not.
void check_references(Verdict& verdict) {
    constexpr int kKeys = 80;
    constexpr float kToLog2 = 0.5f;  // exact
    std::mt19937 generator(1);
    std::vector<float> got, want;
    int num_moved = 0;
    constexpr int kTrials = 600;
    for (int trial = 0; trial < kTrials; ++trial) {
        std::vector<float> logits, references(48);
        const bool mixed = generator() % 2 == 0, first_step = generator() % 4 == 0;
        const RowKind kind_of_all = random_kind(generator);
        bool behind = false;
        for (int row = 0; row < 16; ++row) {
            const RowKind kind = mixed ? random_kind(generator) : kind_of_all;
            const std::vector<float> values = random_row(generator, kind, kKeys);
            logits.insert(logits.end(), values.begin(), values.end());
            const float largest = exact_maximum(values.data(), kKeys) * kToLog2;
            const bool fresh = first_step or std::isinf(largest);
            references[row] = fresh ? -FLT_MAX : largest - 0.25f * static_cast<float>(generator() % 42) + 2;
            if (std::isnan(largest))  // its other logits may count or not: far below the reference, they do not matter
                references[row] = 1e6f;
            behind = behind or largest - references[row] > 8;
        }
        const DeviceArray<float> device(logits), changed(references);
        const DeviceArray<int> moved(std::vector{-1});
        step_references<kKeys><<<1, 32>>>(device.data(), changed.data(), kToLog2, moved.data());
        got.push_back(static_cast<float>(moved.to_host()[0]));
        want.push_back(behind);
        num_moved += behind;
        const std::vector<float> result = changed.to_host();
        for (int row = 0; row < 16; ++row) {
            const float largest = exact_maximum(&logits[row * kKeys], kKeys) * kToLog2, before = references[row];
            const float after = behind and largest > before ? largest : before;
            got.insert(got.end(), {result[16 + row], result[32 + row]});
            want.insert(want.end(), {after, std::exp2(before - after)});
        }
    }
    verdict.compare("references", got, want, 1e-6);
    verdict.compare("whether some moved and some did not", std::vector{int(0 < num_moved and num_moved < kTrials)},
                    std::vector{1}, 0);
}

// A block of keys from first_key on, of which columns [begin, end) count, before a warp: 16 rows from first_row on of a
// tile whose positions, `1 << pack_shift` rows each, begin at `position`.
struct Block {
    Band band;
    int position, num_positions, first_key, begin, end, pack_shift, first_row;
};

// What the threads of the warp see; behind it whether the block counts as masked.
template <int kKeys> __global__ void hide_block(Block block, float* seen) {
    __shared__ BlockMessage message;
    message = TileBand::make(block.band, block.position, block.num_positions - 1)
                  .block(block.first_key, block.begin, block.end, kKeys);
    __syncthreads();
    const int row = threadIdx.x / 4, first_column = threadIdx.x % 4 * 2;
    float logits[kKeys / 2];
    for (float& x : logits)
        x = 1;
    hide(logits, visible_bits<kKeys / 2>(message, block.first_row + row, block.pack_shift, first_column));
    for (int i = 0; i < kKeys / 2; ++i)
        seen[(row + i / 2 % 2 * 8) * kKeys + first_column + i / 4 * 8 + i % 2] = logits[i] == 1;
    seen[16 * kKeys] = message.masked;
}

bool is_seen(const Block& block, int row, int column) {
    const int64_t q = int64_t{block.position} + ((block.first_row + row) >> block.pack_shift);
    const int64_t distance = int64_t{block.first_key} + column - q;
    return block.band.q0 <= q and q < block.band.q1 and block.band.lo <= distance and distance <= block.band.hi and
           block.begin <= column and column < block.end;
}

// Also at the longest lengths, where nothing may overflow.
template <int kKeys> Block random_block(std::mt19937& generator) {
    const auto random = [&](int low, int high) { return std::uniform_int_distribution(low, high)(generator); };
    const auto anywhere = [&] { return random(0, 1) * (kUnbounded - 4096) + random(0, 3000); };
    Block block{.position = anywhere(), .first_key = anywhere(), .pack_shift = random(0, 4)};
    block.num_positions = 192 >> block.pack_shift;
    block.first_row = 16 * random(0, 11);
    block.begin = random(0, 1) * random(0, kKeys - 1);
    block.end = random(0, 1) ? kKeys : random(block.begin + 1, kKeys);
    const int near = block.first_key - block.position, reach = kKeys + 200;
    block.band = {};  // of designators that a template assigns, cudafe loses those behind a member that is left out
    block.band.q0 = std::max(0, block.position + random(-200, 100));
    block.band.q1 = block.position + random(1, 400);
    block.band.lo = random(0, 1) ? -kUnbounded : std::max(-kUnbounded, near + random(-reach, reach));
    block.band.hi = random(0, 1) ? kUnbounded : std::min(kUnbounded, near + random(-reach, reach));
    return block;
}

template <int kKeys> void check_hide(Verdict& verdict) {
    std::mt19937 generator(kKeys);
    std::vector<float> got, want;
    int num_open = 0, num_wrongly_open = 0;
    for (int trial = 0; trial < 400; ++trial) {
        const Block block = random_block<kKeys>(generator);
        const DeviceArray<float> seen(std::vector<float>(16 * kKeys + 1, -1));
        hide_block<kKeys><<<1, 32>>>(block, seen.data());
        std::vector<float> result = seen.to_host();
        const bool open = result.back() == 0;
        num_open += open;
        result.pop_back();
        got.insert(got.end(), result.begin(), result.end());
        for (int row = 0; row < 16; ++row) {
            for (int column = 0; column < kKeys; ++column) {
                want.push_back(is_seen(block, row, column));
                num_wrongly_open += open and not is_seen(block, row, column);
            }
        }
    }
    verdict.compare("visible columns of " + std::to_string(kKeys), got, want, 0);
    verdict.compare("cells of open blocks that are not seen", std::vector{num_wrongly_open}, std::vector{0}, 0);
    verdict.compare("whether there are open blocks", std::vector{int(num_open > 0)}, std::vector{1}, 0);
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    using namespace jaxmagi::test;
    Verdict verdict;
    check_tanh(verdict);
    check_transpose(verdict);
    check_references(verdict);
    check_hide<64>(verdict);
    check_hide<80>(verdict);
    check_hide<96>(verdict);
    check_hide<112>(verdict);
    check_hide<128>(verdict);
    return verdict.exit_code();
}
