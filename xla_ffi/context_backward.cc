#include <iterator>
#include <ranges>

#include "csrc/attention/sm90/backward/backward.h"

#include "xla_ffi/attention_cuda_handler.h"
#include "xla_ffi/context_handler.h"

namespace jaxmagi {
namespace {

struct Backward {
    static constexpr const char* kTarget = "jaxmagi_context_backward";

    // The flags of a part: those that its launches set (BackwardParams::drained), and whether its keys have arrived.
    static constexpr int64_t kArrived = sm90::kMostBackwardStages, kFlags = kArrived + 1;

    struct Operands {
        ffi::AnyBuffer q;
        KeysValues own;
        ffi::AnyBuffer sorted, tiles, dout, lse, delta;
        KeysValues kept;  // received rows, [batch, rows, all key heads, dim]; none where they are to come again
        ContextTables tables;
    };
    struct Results {
        ffi::AnyBuffer dq;
        ReturnArrays returns;
        CastArrays keys;
        ffi::AnyBuffer workspaces, flags;  // of parts, each with kFlags
    };

    static sm90::BackwardParams to_params(const ContextAttributes& attributes, const Parts& parts,
                                          const Operands& operands, const Results& results, int64_t part) {
        Views views;
        const struct { ffi::AnyBuffer q, k, v, sorted, tiles, dout, lse, delta; } inputs{
            parts.of_queries(views, operands.q, part), parts.of_keys(views, results.keys.all.k, part),
            parts.of_keys(views, results.keys.all.v, part), operands.sorted, operands.tiles,
            parts.of_queries(views, operands.dout, part), parts.of_queries(views, operands.lse, part),
            parts.of_queries(views, operands.delta, part)};
        const ffi::AnyBuffer dq = parts.of_queries(views, results.dq, part);
        const ffi::AnyBuffer dk = parts.of_keys(views, results.returns.gradients.k, part);
        const ffi::AnyBuffer dv = parts.of_keys(views, results.returns.gradients.v, part);
        sm90::BackwardParams params{};
        set_tensors(params, params.shape, inputs, KernelAttributes::of(attributes));
        params.row_heads = static_cast<int>(parts.heads * parts.count);
        params.own = {parts.own_keys("k", operands.own.k, results.keys.all.k, part),
                      parts.own_keys("v", operands.own.v, results.keys.all.v, part), static_cast<int>(parts.tokens),
                      static_cast<int>(parts.key_heads * parts.count)};
        params.is_part = parts.count > 1;
        const sm90::TileShape tile = find_tile(sm90::backward_tile, params.shape.dim, params.shape.v_dim);
        check_num_tiles("keys", inputs.k, tile.keys);
        check_num_tiles("q", inputs.q, 64);  // no kernel has shorter blocks of queries
        set_tile_schedule(params, inputs, params.shape.batch, ceil_div(params.shape.kv_len, tile.keys));
        check_buffer("dout", inputs.dout, out_shape(inputs.q, inputs.v), inputs.q.element_type());
        check_buffer("lse", inputs.lse, row_shape(inputs.q), ffi::F32);
        check_buffer("delta", inputs.delta, row_shape(inputs.q), ffi::F32);
        check_buffer("dq", dq, shape_of(inputs.q), inputs.q.element_type());
        check_buffer("dk", dk, shape_of(inputs.k), ffi::F32);
        check_buffer("dv", dv, shape_of(inputs.v), ffi::F32);
        params.key_gradients_f32 = true;
        params.dout = data_of<const void>("dout", inputs.dout, kTensorAlignment);
        params.lse = data_of<const float>("lse", inputs.lse);
        params.delta = data_of<const float>("delta", inputs.delta);
        params.dq = data_of<void>("dq", dq, kTensorAlignment);
        params.dk = data_of<void>("dk", dk, kTensorAlignment);
        params.dv = data_of<void>("dv", dv, kTensorAlignment);
        params.deterministic = attributes.deterministic;
        const int64_t bytes = sm90::backward_workspace_bytes(params.shape, params.num_masks, params.deterministic);
        const int64_t size = results.workspaces.size_bytes();
        check(parts.count * bytes <= size, "workspaces must have ", parts.count, " times ", bytes, " bytes, got ",
              size);
        params.workspace = data_of<char>("workspaces", results.workspaces, kTensorAlignment) + part * bytes;
        check_buffer("flags", results.flags, {attributes.num_parts * kFlags}, ffi::S32);
        params.drained = reinterpret_cast<uint32_t*>(data_of<int>("flags", results.flags)) + part * kFlags;
        return params;
    }

    static const KeysValues& keys(const Results& results) { return results.keys.all; }
    static size_t shared_bytes(const Results& results) {
        return std::max(size_bytes(results.keys.all), size_bytes(results.returns.gradients));
    }

    static cudaError_t preload(const sm90::BackwardParams& params) {
        return sm90::preload_backward(params.dtype, params.shape.dim, params.shape.v_dim, params.soft_cap > 0);
    }

    static void launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                       const Results& results, ContextFork& fork, ContextTransfers& transfers);
};

// How many multiprocessors attention leaves to NCCL. Rows travel between hosts all the while that it computes: with 16
// free ones a causal backward pass took 1.18 to 1.27 times as long as attention or transfer alone, with 4 0.96 to 1.11
// times (docs/log/context.md). NCCL has a few CTAs for a peer, of which a multiprocessor holds several. Those that find
// none wait for a launch of attention to end, and no CTA of attention waits for them.
constexpr int kMostNetworkSms = 4;

// Within a host, own tiles of one in so many key heads are computed while keys come.
constexpr int kFirstKeyHeads = 4;

// Between hosts own tiles and the others have counters of their own.
int counter_of(sm90::KeyTiles tiles) {
    return tiles == sm90::KeyTiles::kOthers;
}

// Launches the pass: tiles of own keys, which need no transfer, and the others, whose gradients return behind them.
//
// Within a host there is a launch of three stages:
//   own tiles of some key heads         while keys come
//   their other tiles
//   all tiles of the other key heads    as attention on one GPU does it: queries stay in the L2 cache for all tiles
// CTAs go on with the second stage if its keys have come by then. Where they have not, another launch does what is
// left.
//
// Between hosts this order has something to compute beside most transfers:
//   own tiles of the first part         while keys come
//   received tiles of part after part   while keys of later parts come, and gradients of earlier ones return
//   own tiles of the other parts        while gradients return
// With a fixed order of sums, the own tiles of a part come right before its received ones.
class BackwardCall {
public:
    BackwardCall(const ContextAttributes& attributes, const Parts& parts, const Backward::Operands& operands,
                 const Backward::Results& results, ContextFork& fork, ContextTransfers& transfers)
        : operands_(operands),
          results_(results),
          fork_(fork),
          transfers_(transfers),
          count_(parts.count),
          is_within_host_(parts.are_within_host),
          reserved_(parts.have_native_peers ? reserved_sms(attributes)
                                            : std::min(reserved_sms(attributes), kMostNetworkSms)) {
        for (int64_t part = 0; part < count_; ++part)
            parts_.push_back({Backward::to_params(attributes, parts, operands, results, part)});
        needed_ = find_needed_keys();
        sent_ = transfers.find_sent_blocks(num_own_tiles(parts_[0].params), tile_keys());
        for (int64_t part = 0; part < count_; ++part)
            parts_[part].params.final = final_gradients(parts, part);
    }

    void launch() {
        clear(results_.flags, fork_.program());
        fork_.begin();
        bring_next();
        if (is_within_host_)
            launch_within_host();
        else
            launch_between_hosts();
    }

private:
    struct Part {
        sm90::BackwardParams params;
        cudaEvent_t prepared = nullptr;
        int num_finished = 0;  // kinds of tiles
    };
    struct Launch {
        int64_t part;
        sm90::KeyTiles tiles;
        bool is_followed = true;
        cudaEvent_t done = nullptr;
    };
    using enum sm90::KeyTiles;

    void launch_within_host() {
        Part& part = parts_[0];
        const cudaStream_t program = fork_.program(), rest = fork_.of_launch(1), helpers = fork_.helpers();
        uint32_t* const arrived = part.params.drained + Backward::kArrived;
        fork_.set(fork_.transfers(), arrived);
        const cudaEvent_t brought = fork_.record(fork_.transfers());
        fork_.wait(program, arrivals_[0].own);  // to prepare beside the copy of own keys would delay the transfer
        prepare(part, program);
        const int num_sms = part.params.num_sms;
        check_launch(run_attention_backward(part.params, within_host(0, num_sms - reserved_, arrived), program));
        for (const cudaStream_t stream : {rest, helpers}) {
            fork_.wait(stream, part.prepared);
            fork_.wait(stream, brought);
        }
        check_launch(run_attention_backward(part.params, within_host(0, reserved_, arrived), helpers));
        fork_.wait_until_set(rest, part.params.drained);
        check_launch(run_attention_backward(part.params, within_host(1, num_sms, nullptr), rest));
        for (const cudaStream_t stream : {program, rest})
            fork_.wait(helpers, fork_.record(stream));
        for (const sm90::KeyTiles tiles : {kOthers, kOwn})
            finish(0, tiles);
    }

    // Returns a launch of the stages from `first` on.
    sm90::BackwardLaunch within_host(int first, int num_sms, const uint32_t* arrived) const {
        const sm90::BackwardParams& params = parts_[0].params;
        const int heads = num_key_heads(params), first_heads = ceil_div(heads, kFirstKeyHeads);
        const bool has_more_heads = first_heads < heads;
        const sm90::BackwardStage stages[] = {{kOwn, {0, first_heads}, has_more_heads or has_tiles(params, kOthers)},
                                              {kOthers, {0, first_heads}, has_more_heads},
                                              {kAll, {first_heads, heads}, false}};
        sm90::BackwardLaunch launch{.stages = {},
                                    .num_stages = static_cast<int>(std::size(stages)) - first,
                                    .first_counter = first,
                                    .num_sms = num_sms,
                                    .arrived = arrived};
        std::copy(stages + first, std::end(stages), launch.stages);
        return launch;
    }

    void launch_between_hosts() {
        std::vector<Launch> launches = ordered_launches();
        for (Launch& one : launches) {
            launch(one);
            // The host may wait for the cast of each other part, and the device has two launches to go on with.
            if (&one == &launches.front())
                continue;
            while (std::ssize(arrivals_) < count_)
                bring_next();
            for (; num_finished_ <= &one - launches.data(); ++num_finished_)
                help_and_finish(launches[num_finished_]);
        }
    }

    std::vector<Launch> ordered_launches() const {
        std::vector<Launch> launches;
        const bool deterministic = parts_[0].params.deterministic;
        for (int64_t part = 0; part < count_; ++part) {
            if (part == 0 or deterministic)
                launches.push_back({part, kOwn});
            launches.push_back({part, kOthers});
        }
        for (int64_t part = 1; part < count_ and not deterministic; ++part)
            launches.push_back({part, kOwn});
        for (Launch& one : std::views::reverse(launches)) {
            one.is_followed = false;
            if (has_tiles(parts_[one.part].params, one.tiles))
                break;
        }
        return launches;
    }

    // Brings the keys of the next part, or puts those there that have been kept.
    void bring_next() {
        const auto part = static_cast<int64_t>(arrivals_.size());
        arrivals_.push_back(
            operands_.kept.k.element_count() > 0
                ? transfers_.put_back(part, operands_.own, operands_.kept, results_.keys.all, needed_)
                : transfers_.bring(part, operands_.own, results_.keys, needed_));
    }

    void prepare(Part& part, cudaStream_t stream) {
        if (part.prepared == nullptr) {
            check_launch(sm90::prepare_attention_backward(part.params, stream));
            part.prepared = fork_.record(stream);
        }
        fork_.wait(stream, part.prepared);
    }

    void launch(Launch& one) {
        Part& part = parts_[one.part];
        const cudaStream_t stream = fork_.of_launch(num_launches_++);
        prepare(part, stream);
        if (one.tiles == kOthers)
            fork_.wait(stream, arrivals_[one.part].all);
        if (before_ != nullptr)
            fork_.wait_until_set(stream, before_);
        run(one, part.params.num_sms - reserved_, stream);
        if (has_tiles(part.params, one.tiles))
            before_ = part.params.drained + counter_of(one.tiles);
        one.done = fork_.record(stream);
    }

    void run(const Launch& one, int num_sms, cudaStream_t stream) const {
        const sm90::BackwardParams& params = parts_[one.part].params;
        const sm90::BackwardLaunch launch{.stages = {{one.tiles, {0, num_key_heads(params)}, one.is_followed}},
                                          .num_stages = 1,
                                          .first_counter = counter_of(one.tiles),
                                          .num_sms = num_sms};
        if (has_tiles(params, one.tiles))
            check_launch(run_attention_backward(params, launch, stream));
    }

    // Lets the multiprocessors that were left to transfers help a launch, and finishes behind it.
    void help_and_finish(const Launch& one) {
        const cudaStream_t helpers = fork_.helpers();
        fork_.wait(helpers, parts_[one.part].prepared);
        fork_.wait(helpers, fork_.record(fork_.transfers()));  // until nothing travels
        run(one, reserved_, helpers);
        fork_.wait(helpers, one.done);
        finish(one.part, one.tiles);
    }

    // Finishes gradients, behind what is in the stream of helpers.
    void finish(int64_t number, sm90::KeyTiles tiles) {
        Part& part = parts_[number];
        const cudaStream_t helpers = fork_.helpers();
        check_launch(sm90::finish_key_gradients(part.params, tiles, helpers));
        fork_.wait(fork_.transfers(), fork_.record(helpers));
        if (tiles == kOthers)
            transfers_.give_back(number, results_.returns);
        if (++part.num_finished < 2)
            return;
        transfers_.add_own(number, results_.returns, sent_);
        check_launch(sm90::finish_query_gradients(part.params, helpers));
    }

    // Returns which own keys are to be copied in front of received ones: those of a tile that has both.
    const uint8_t* find_needed_keys() {
        using collectives::kNeededRows;
        const int length = parts_[0].params.own.length, blocks = ceil_div(length, kNeededRows);
        const int first = length / tile_keys() * tile_keys() / kNeededRows;
        auto* const needed = static_cast<uint8_t*>(transfers_.allocate(blocks));
        check_cuda(cudaMemsetAsync(needed, 0, blocks, fork_.program()), "clearing flags");
        check_cuda(cudaMemsetAsync(needed + first, 1, blocks - first, fork_.program()), "setting flags");
        return needed;
    }

    int tile_keys() const {
        const sm90::BackwardShape& shape = parts_[0].params.shape;
        return find_tile(sm90::backward_tile, shape.dim, shape.v_dim).keys;
    }

    // Returns where gradients of own tiles go that are not sent.
    sm90::FinalGradients final_gradients(const Parts& parts, int64_t part) const {
        const KeysValues& result = results_.returns.result;
        const auto place = [&](const char* name, const ffi::AnyBuffer& gradients) {
            return data_of<uint16_t>(name, gradients, 16) + part * parts.key_heads * gradients.dimensions()[3];
        };
        return {place("dk", result.k), place("dv", result.v), sent_.is_sent};
    }

    const Backward::Operands& operands_;
    const Backward::Results& results_;
    ContextFork& fork_;
    ContextTransfers& transfers_;
    const int64_t count_;
    const bool is_within_host_;
    const int reserved_;
    std::vector<Part> parts_;
    const uint8_t* needed_;          // own keys in front of received ones
    collectives::SentBlocks sent_;   // which own tiles are sent
    std::vector<Arrival> arrivals_;  // of keys, of parts
    int num_launches_ = 0;
    int64_t num_finished_ = 0;          // launches
    const uint32_t* before_ = nullptr;  // the flag of the launch before
};

void Backward::launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                      const Results& results, ContextFork& fork, ContextTransfers& transfers) {
    BackwardCall(attributes, parts, operands, results, fork, transfers).launch();
}

}  // namespace

CollectiveHandlers context_backward_cuda() {
    return context_handlers<Backward>();
}

}  // namespace jaxmagi
