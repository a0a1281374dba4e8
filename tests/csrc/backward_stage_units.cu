// Tests launches of several stages of the backward pass: own tiles of the first key heads, their other tiles, and all
// tiles of the other key heads. Before received keys have arrived, a launch ends behind its first stage and another one
// does the rest; after that, a launch does it all. Gradients are those of one call with all keys in one array: bit for
// bit with a fixed order of sums, and about the same without. Own tiles are read from an array of their own, and where
// no other rank adds to their gradients, these have a place of their own. Nothing is written elsewhere.
// Numbers that may not be read are NaN, and places that may not be written have a number that no gradient has.

#include <algorithm>
#include <cmath>
#include <limits>

#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/common/math.h"
#include "csrc/mask/band.h"
#include "tests/csrc/check.h"
#include "tests/csrc/tile_schedule.h"

namespace jaxmagi::test {
namespace {

using namespace sm90;
using enum KeyTiles;

// There are more tiles of keys than has_few_tiles() allows. With fewer, one call for all tiles might add to dQ from the
// last tile to the first, and stages do not.
constexpr int kQueries = 1000, kKeys = 2000, kBands = 20, kDim = 128, kNumSms = 50;
constexpr int kArrived = kMostBackwardStages, kFlags = kArrived + 1;
constexpr float kPoison = 1 << 30;  // is the same in 16 bits
// Without a fixed order, sums in fp32 may differ a little, and then be rounded to the next number of 16 bits.
constexpr double kTolerance = 0.01, kRoundedTolerance = 0.125;
const cudaStream_t kStream = cudaStreamPerThread;

using Numbers = std::vector<uint16_t>;
using Floats = std::vector<float>;
using Element = Host<BFloat16>;

// A group is the number of query heads of a key head.
struct Shape {
    int batch, key_heads, group;

    int heads() const { return key_heads * group; }
    size_t query_rows() const { return size_t{kQueries} * batch * heads(); }
    size_t key_rows(int length) const { return static_cast<size_t>(length) * batch * key_heads; }
    // Work items have two heads of an even group. Gradients of keys are added up in the workspace if a group has more,
    // and finish_key_gradients() then writes zeros where nothing has been added.
    bool adds_key_gradients() const { return group > 2; }
};

// Keys and values lie in one array, [2, batch, length, key_heads, dim], and so do their gradients. The summed ones have
// all keys and are in fp32. The final ones have the own keys and are in 16 bits on the device.
struct Gradients {
    Floats dq, summed, final;
};

TileShape tile() {
    return *backward_tile(kDim, kDim);
}

int num_tiles() {
    return ceil_div(kKeys, tile().keys);
}

Floats to_floats(const Numbers& numbers) {
    Floats floats(numbers.size());
    std::ranges::transform(numbers, floats.begin(), Element::to_float);
    return floats;
}

// Returns numbers between 5 and about 10, with which probabilities are moderate.
Floats random_lse(size_t count, unsigned seed) {
    Floats lse = to_floats(random_numbers<BFloat16>(count, seed));
    for (float& x : lse)
        x = 5 + std::abs(x);
    return lse;
}

// Bands have different queries. Those of every fifth band see nothing, and a diagonal limits every second band.
std::vector<int32_t> random_bands(std::mt19937& random) {
    const auto draw = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
    std::vector<int32_t> bands;
    for (int i = 0; i < kBands; ++i) {
        const int q0 = kQueries * i / kBands, q1 = kQueries * (i + 1) / kBands;
        const int k0 = draw(0, kKeys / 2), k1 = draw(k0 + 1, kKeys), last = draw(k0, k1);
        const bool sees = i % 5 != 0;
        for (const int x : {q0, q1, k0, sees ? k1 : k0, -kUnbounded, i % 2 == 0 ? last - q0 : kUnbounded})
            bands.push_back(x);
    }
    return bands;
}

// Returns the rows [0, length) of each example, with NaN for keys outside of `wanted`.
Numbers keys_in(const Numbers& keys, Shape shape, Range wanted, int length) {
    const size_t row = size_t{kDim} * shape.key_heads;
    Numbers some(2 * shape.key_rows(length) * kDim, Element::from_float(std::numeric_limits<float>::quiet_NaN()));
    for (int example = 0; example < 2 * shape.batch; ++example)
        for (int key = wanted.begin; key < wanted.end; ++key)
            std::copy_n(keys.begin() + (size_t{kKeys} * example + key) * row, row,
                        some.begin() + (static_cast<size_t>(length) * example + key) * row);
    return some;
}

// Holds what a pass writes.
class Outputs {
public:
    explicit Outputs(const BackwardParams& params)
        : dq_(Floats(size_t{kQueries} * params.shape.batch * params.shape.heads * kDim, kPoison)),
          summed_(Floats(2 * num_key_numbers(params), kPoison)),
          workspace_(std::vector<char>(
              backward_workspace_bytes(params.shape, params.num_masks, params.deterministic), 0x7f)) {}

    void set(BackwardParams* params) const {
        params->dq = dq_.data();
        params->dk = summed_.data();
        params->dv = summed_.data() + num_key_numbers(*params);
        params->workspace = workspace_.data();
    }
    Gradients to_host() const { return {dq_.to_host(), summed_.to_host(), {}}; }

private:
    static size_t num_key_numbers(const BackwardParams& params) {
        return size_t{kKeys} * params.shape.batch * params.shape.kv_heads * kDim;
    }

    DeviceArray<float> dq_, summed_;
    DeviceArray<char> workspace_;
};

class Problem {
public:
    Problem(std::mt19937& random, Shape shape)
        : shape_(shape),
          keys_(random_numbers<BFloat16>(2 * shape.key_rows(kKeys) * kDim, random())),
          q_(random_numbers<BFloat16>(shape.query_rows() * kDim, random())),
          dout_(random_numbers<BFloat16>(shape.query_rows() * kDim, random())),
          lse_(random_lse(shape.query_rows(), random())),
          delta_(to_floats(random_numbers<BFloat16>(shape.query_rows(), random()))),
          schedule_(random_bands(random),
                    {.num_masks = 1,
                     .capacity = kBands,
                     .q_len = kQueries,
                     .kv_len = kKeys,
                     .own_len = kKeys,
                     .by_keys = true,
                     .tile_rows = tile().keys,
                     .block_keys = tile().rows},
                    kStream) {}

    Shape shape() const { return shape_; }
    const Numbers& keys() const { return keys_; }

    // Returns the parameters without keys and without outputs.
    BackwardParams to_params(bool deterministic) const {
        BackwardParams params{};
        params.dtype = DType::kBF16;
        params.dq_f32 = params.key_gradients_f32 = true;
        params.shape = {shape_.batch, kQueries, kKeys, shape_.heads(), shape_.key_heads, kDim, kDim, num_tiles()};
        params.row_heads = shape_.heads();
        params.q = q_.data();
        params.num_masks = 1;
        params.capacity = kBands;
        params.bands = schedule_.sorted();
        params.tiles = schedule_.tiles();
        params.dout = dout_.data();
        params.lse = lse_.data();
        params.delta = delta_.data();
        params.scale = 0.1f;
        params.deterministic = deterministic;
        params.num_sms = kNumSms;
        return params;
    }

    // Computes all with all keys in one array.
    Gradients attend(bool deterministic) const {
        const DeviceArray<uint16_t> keys(keys_);
        BackwardParams params = to_params(deterministic);
        const Outputs outputs(params);
        outputs.set(&params);
        params.k = keys.data();
        params.v = keys.data() + shape_.key_rows(kKeys) * kDim;
        must(attention_backward(params, kStream), "attending");
        return outputs.to_host();
    }

private:
    Shape shape_;
    Numbers keys_;
    DeviceArray<uint16_t> q_, dout_;
    DeviceArray<float> lse_, delta_;
    TileSchedule schedule_;
};

struct Case {
    int own_len;
    bool deterministic, arrived;
};

std::vector<uint8_t> random_flags(std::mt19937& random, size_t count) {
    std::vector<uint8_t> flags(count);
    for (uint8_t& flag : flags)
        flag = random() % 2;
    return flags;
}

// A pass that is launched as context attention within a host launches it.
class StagedPass {
public:
    StagedPass(std::mt19937& random, const Problem& problem, Case which)
        : shape_(problem.shape()),
          own_len_(which.own_len),
          own_end_(which.own_len == kKeys ? kKeys : which.own_len / tile().keys * tile().keys),
          keys_(keys_in(problem.keys(), shape_, {own_end_, kKeys}, kKeys)),
          own_keys_(keys_in(problem.keys(), shape_, {0, own_end_}, own_len_)),
          final_(Numbers(2 * num_own_numbers(), Element::from_float(kPoison))),
          is_summed_(random_flags(random, static_cast<size_t>(shape_.batch) * num_tiles())),
          is_summed_on_device_(is_summed_),
          flags_(flags_before(which.arrived)),
          params_(problem.to_params(which.deterministic)),
          outputs_(params_) {
        outputs_.set(&params_);
        params_.k = keys_.data();
        params_.v = keys_.data() + shape_.key_rows(kKeys) * kDim;
        params_.own = {own_keys_.data(), own_keys_.data() + num_own_numbers(), own_len_, shape_.key_heads};
        params_.final = {final_.data(), final_.data() + num_own_numbers(), is_summed_on_device_.data()};
        params_.drained = flags_.data();
        must(prepare_attention_backward(params_, kStream), "preparing");
    }

    // Launches all stages, of which the second has to wait until keys have arrived.
    void launch() {
        run_stages(0, flags_.data() + kArrived, "launching stages");
    }
    // Launches the stages behind the first one, whose keys have arrived.
    void launch_rest() {
        run_stages(1, nullptr, "launching what is left");
    }

    // Returns what is written when all sums so far are converted, which may be done again later.
    Gradients finish() {
        for (const KeyTiles tiles : {kOthers, kOwn})
            must(finish_key_gradients(params_, tiles, kStream), "finishing gradients of keys");
        must(finish_query_gradients(params_, kStream), "finishing gradients of queries");
        Gradients gradients = outputs_.to_host();
        gradients.final = to_floats(final_.to_host());
        return gradients;
    }

    // Returns whether a launch has set the flag of the first stage, and none that of another one.
    bool has_drained_first_stage() const {
        const std::vector<uint32_t> flags = flags_.to_host();
        return flags[0] == 1 and std::all_of(flags.begin() + 1, flags.begin() + kMostBackwardStages,
                                             [](uint32_t flag) { return flag == 0; });
    }

    // Returns what is to be written when all stages are done, or the first one alone.
    Gradients expected(const Gradients& reference, bool first_stage_alone) const {
        Gradients want{reference.dq, Floats(reference.summed.size(), kPoison), Floats(2 * num_own_numbers(), kPoison)};
        const Floats absent(kDim, shape_.adds_key_gradients() ? 0 : kPoison);
        for (int example = 0; example < 2 * shape_.batch; ++example)  // of keys, then of values
            for (int key = 0; key < kKeys; ++key)
                for (int head = 0; head < shape_.key_heads; ++head) {
                    const bool done = not first_stage_alone or is_of_first_stage(example % shape_.batch, key, head);
                    const auto from = reference.summed.begin() + index(example, kKeys, key, head);
                    place(done ? from : absent.begin(), example, key, head, &want);
                }
        return want;
    }

private:
    size_t num_own_numbers() const { return shape_.key_rows(own_len_) * kDim; }
    int num_first_heads() const { return ceil_div(num_key_heads(params_), 4); }

    static std::vector<uint32_t> flags_before(bool arrived) {
        std::vector<uint32_t> flags(kFlags, 0);
        flags[kArrived] = arrived;
        return flags;
    }

    // Launches the stages from `first` on.
    void run_stages(int first, const uint32_t* arrived, const char* what) const {
        const BackwardLaunch launch = staged_launch(params_, num_first_heads(), first, kNumSms, arrived);
        must(run_attention_backward(params_, launch, kStream), what);
    }

    // Returns where the numbers of a key begin in an array with so many keys.
    size_t index(int example, int length, int key, int head) const {
        return ((static_cast<size_t>(example) * length + key) * shape_.key_heads + head) * kDim;
    }

    bool is_of_first_stage(int example, int key, int head) const {
        return key < own_end_ and example * shape_.key_heads + head < num_first_heads();
    }

    bool is_final(int example, int key) const {
        return key < own_end_ and not is_summed_[example * num_own_tiles(params_) + key / tile().keys];
    }

    // Writes the numbers of a key where the pass is to write them.
    void place(Floats::const_iterator from, int example, int key, int head, Gradients* to) const {
        if (is_final(example % shape_.batch, key))
            std::transform(from, from + kDim, to->final.begin() + index(example, own_len_, key, head),
                           [](float x) { return Element::to_float(Element::from_float(x)); });
        else
            std::copy_n(from, kDim, to->summed.begin() + index(example, kKeys, key, head));
    }

    Shape shape_;
    int own_len_, own_end_;  // own keys, and those of own tiles
    DeviceArray<uint16_t> keys_, own_keys_, final_;
    std::vector<uint8_t> is_summed_;
    DeviceArray<uint8_t> is_summed_on_device_;
    DeviceArray<uint32_t> flags_;
    BackwardParams params_;
    Outputs outputs_;
};

std::string name_of(Shape shape, Case which) {
    return "batch " + std::to_string(shape.batch) + ", " + std::to_string(shape.key_heads) + " key heads of " +
           std::to_string(shape.group) + ", " + std::to_string(which.own_len) + " own keys, " +
           (which.deterministic ? "fixed order, " : "any order, ") + (which.arrived ? "arrived" : "not arrived");
}

void compare_keys(Verdict& verdict, const std::string& name, bool deterministic, const Gradients& got,
                  const Gradients& want) {
    verdict.compare(name + " summed dk dv", got.summed, want.summed, deterministic ? 0 : kTolerance);
    verdict.compare(name + " final dk dv", got.final, want.final, deterministic ? 0 : kRoundedTolerance);
}

void compare_all(Verdict& verdict, const std::string& name, bool deterministic, const Gradients& got,
                 const Gradients& want) {
    verdict.compare(name + " dq", got.dq, want.dq, deterministic ? 0 : kTolerance);
    compare_keys(verdict, name, deterministic, got, want);
}

void check_stages(Verdict& verdict, std::mt19937& random, const Problem& problem, const Gradients& reference,
                  Case which) {
    const std::string name = name_of(problem.shape(), which);
    StagedPass pass(random, problem, which);
    const Gradients all = pass.expected(reference, false);
    pass.launch();
    verdict.expect(name + ": the first stage is drained", pass.has_drained_first_stage());
    if (which.arrived)
        compare_all(verdict, name + ": all in one launch,", which.deterministic, pass.finish(), all);
    else
        compare_keys(verdict, name + ": first stage alone,", which.deterministic, pass.finish(),
                     pass.expected(reference, true));
    pass.launch_rest();
    compare_all(verdict, name + ": two launches,", which.deterministic, pass.finish(), all);
}

// The other checks would see little if the reference had poison, or gradients of few keys.
void check_reference(Verdict& verdict, const Gradients& reference) {
    const auto zeros = std::ranges::count(reference.dq, 0.f);
    verdict.expect("reference: all is written", std::ranges::count(reference.dq, kPoison) == 0 and
                                                    std::ranges::count(reference.summed, kPoison) == 0);
    verdict.expect("reference: some queries see nothing", 0 < zeros and 2 * zeros < std::ssize(reference.dq));
    verdict.expect("reference: most keys are seen",
                   2 * std::ranges::count(reference.summed, 0.f) < std::ssize(reference.summed));
}

int run() {
    std::mt19937 random(0);
    Verdict verdict;
    must(preload_tile_schedule(), "loading the kernels of the tile schedule");
    must(preload_backward(DType::kBF16, kDim, kDim, false), "loading the kernels");
    // No tile is an own one, some and half of one are, or all are.
    const int keys = tile().keys, own_lens[] = {keys / 2, 7 * keys + keys / 2, kKeys};
    for (const Shape shape : {Shape{1, 1, 2}, Shape{2, 1, 2}, Shape{2, 1, 4}, Shape{2, 5, 2}, Shape{2, 5, 4}}) {
        const Problem problem(random, shape);
        for (const bool deterministic : {false, true}) {
            const Gradients reference = problem.attend(deterministic);
            check_reference(verdict, reference);
            for (const int own_len : own_lens)
                for (const bool arrived : {false, true})
                    check_stages(verdict, random, problem, reference, {own_len, deterministic, arrived});
        }
    }
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    return jaxmagi::test::run();
}
