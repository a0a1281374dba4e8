#include <optional>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/attention/sm90/needed_keys.h"
#include "csrc/collectives/part_rows.h"

#include "xla_ffi/attention_cuda_handler.h"
#include "xla_ffi/context_handler.h"

namespace jaxmagi {
namespace {

// Launches attention one call behind the other, in two streams in turn: a call begins when the one before has no work
// left to begin with. Each has a counter of work items and a flag, for which there is room in `counters`.
class Chain {
public:
    Chain(ContextFork& fork, int* counters, int64_t most) : fork_(fork), counters_(counters), flags_(counters + most) {}

    // Returns the stream of the next call, and gives the call its counter and flag.
    cudaStream_t next(sm90::ForwardParams& params) {
        const cudaStream_t stream = fork_.of_launch(count_);
        if (count_ > 0)
            fork_.wait_until_set(stream, reinterpret_cast<const uint32_t*>(flags_ + count_ - 1));
        params.counter = counters_ + count_;
        params.counter_is_zero = true;
        params.drained = reinterpret_cast<uint32_t*>(flags_ + count_);
        ++count_;
        return stream;
    }

private:
    ContextFork& fork_;
    int* const counters_;
    int* const flags_;
    int count_ = 0;
};

struct Forward {
    static constexpr const char* kTarget = "jaxmagi_context_forward";

    struct Operands {
        ffi::AnyBuffer q;
        KeysValues own;
        ffi::AnyBuffer sorted, tiles, sinks;  // sinks: [2, all heads], of which the second row has none
        ContextTables tables;
    };
    struct Results {
        ffi::AnyBuffer out, lse;
        CastArrays keys;
        KeysValues kept;          // received rows, [batch, rows, all key heads, dim]; none unless they are kept
        ffi::AnyBuffer counters;  // of launches, and behind them their flags
    };

    // Beside those of the parts: the own half, and the own tiles.
    static constexpr int64_t kMoreLaunches = 2;

    static sm90::ForwardParams to_params(const ContextAttributes& attributes, const Parts& parts,
                                         const Operands& operands, const Results& results, int64_t part) {
        Views views;
        const struct { ffi::AnyBuffer q, k, v, sorted, tiles, sinks; } inputs{
            parts.of_queries(views, operands.q, part), parts.of_keys(views, results.keys.all.k, part),
            parts.of_keys(views, results.keys.all.v, part), operands.sorted, operands.tiles,
            views.add(operands.sinks, part * parts.heads, {parts.heads})};
        const struct { ffi::AnyBuffer out, lse; } outputs{parts.of_queries(views, results.out, part),
                                                          parts.of_queries(views, results.lse, part)};
        sm90::ForwardParams params{};
        set_tensors(params, params, inputs, KernelAttributes::of(attributes));
        params.q_row_heads = params.row_heads = static_cast<int>(parts.heads * parts.count);
        params.kv_row_heads = params.kv_heads;
        params.key_end = params.kv_len;
        const sm90::TileShape tile = find_tile(sm90::forward_tile, params.dim, params.v_dim);
        check_num_tiles("q", inputs.q, tile.rows);
        set_tile_schedule(params, inputs, params.batch, ceil_div(params.q_len, tile.rows));
        params.from_last_tile = params.num_masks == 1;
        check_forward(inputs, outputs, ffi::F32);
        check_buffer("sinks", operands.sinks, {2, parts.heads * parts.count}, ffi::F32);
        check_buffer("counters", results.counters, {2 * (attributes.num_parts + kMoreLaunches)}, ffi::S32);
        params.out_f32 = outputs.out.element_type() == ffi::F32;
        params.sinks = data_of<const float>("sinks", inputs.sinks);
        params.out = data_of<void>("out", outputs.out, kTensorAlignment);
        params.lse = data_of<float>("lse", outputs.lse);
        return params;
    }

    static const KeysValues& keys(const Results& results) { return results.keys.all; }
    static size_t shared_bytes(const Results& results) { return size_bytes(results.keys.all); }

    static cudaError_t preload(const sm90::ForwardParams& params) {
        cudaError_t error = sm90::preload_forward(params.dtype, params.dim, params.v_dim, params.soft_cap > 0);
        for (const auto preload : {sm90::preload_finish, sm90::preload_needed_keys})
            error = error == cudaSuccess ? preload() : error;
        return error;
    }

    static void launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                       const Results& results, ContextFork& fork, ContextTransfers& transfers);
};

// A call of the pass. Within a host CTAs compute own tiles, which see no received keys, from where the rank has its
// keys, and then go on with the others, if all keys have come by then. Otherwise a launch behind the transfer does
// these. With several masks there are no own tiles, and attention begins when all keys have come.
//
// Between hosts attention has this order:
//   own half       only where keys come from other hosts and the output is not fp32: the first part over the rank's own
//                  keys. Nothing else would hide the transfer of this part where most tiles see received keys
//   own tiles      for all heads, or for those of the other parts if there is an own half
//   first part     the tiles that are left; with an own half, all tiles over received keys, merged with that half
//   other parts    the tiles that are left
// The transfer of the first part is launched before its attention, and those of the others behind it, since between
// hosts the host waits for each.
class ForwardCall {
public:
    ForwardCall(const ContextAttributes& attributes, const Parts& parts, const Forward::Operands& operands,
                const Forward::Results& results, ContextFork& fork, ContextTransfers& transfers)
        : attributes_(attributes),
          parts_(parts),
          operands_(operands),
          results_(results),
          fork_(fork),
          transfers_(transfers),
          chain_(fork, data_of<int>("counters", results.counters), attributes.num_parts + Forward::kMoreLaunches),
          reserved_(reserved_sms(attributes)) {}

    void launch() {
        clear(results_.counters, fork_.program());
        fork_.begin();
        if (parts_.are_within_host)
            launch_within_host();
        else
            launch_between_hosts();
    }

private:
    struct Half {
        sm90::ForwardParams params;
        cudaEvent_t done;
    };

    void launch_within_host() {
        const cudaStream_t rest = fork_.of_launch(1), helpers = fork_.helpers();
        sm90::ForwardParams others = to_params(0);
        const bool has_own_tiles = others.num_masks == 1;
        if (has_own_tiles)
            needed_ = find_needed_keys(others);
        auto* const counters = data_of<int>("counters", results_.counters);
        auto* const flags = reinterpret_cast<uint32_t*>(counters) + 2;
        uint32_t *const drained = flags, *const arrived = flags + 1;
        others.counter = counters + 1;
        others.counter_is_zero = true;
        others.claims_all = true;
        others.subset = has_own_tiles ? sm90::Tiles::kSeeReceived : sm90::Tiles::kAll;
        sm90::ForwardParams own = to_own_tiles(0);
        own.counter = counters;
        own.counter_is_zero = true;
        own.drained = drained;
        own.next = &others;
        own.next_arrived = arrived;
        own.num_sms -= reserved_;
        if (has_own_tiles)
            check_launch(sm90::attention_forward(own, fork_.program()));
        bring_next();
        fork_.set(fork_.transfers(), arrived);
        const cudaEvent_t brought = fork_.record(fork_.transfers());
        for (const cudaStream_t stream : {helpers, rest})
            fork_.wait(stream, brought);
        if (has_own_tiles) {
            help(own, reserved_);
            fork_.wait_until_set(rest, drained);
        }
        check_launch(sm90::attention_forward(others, rest));
        keep_received();
    }

    void launch_between_hosts() {
        bring_next();  // tells whether keys come from other hosts
        const sm90::ForwardParams first = to_params(0);
        const bool in_halves = transfers_.crosses_hosts() and not first.out_f32;
        if (in_halves)
            launch_own_half(first);
        if (first.num_masks == 1 and parts_.count > int64_t{in_halves})
            launch_own_tiles(first, in_halves);
        const sm90::ForwardParams first_part = launch_part(0);
        while (num_brought() < parts_.count)
            bring_next();
        keep_received();
        fork_.wait(fork_.helpers(), arrivals_.back().all);
        if (own_tiles_.has_value())
            help(*own_tiles_, reserved_);
        if (not in_halves)
            help(first_part, helpers(0));
        for (int part = 1; part < parts_.count; ++part)
            help(launch_part(part), helpers(part));
    }

    sm90::ForwardParams to_params(int64_t part) const {
        return Forward::to_params(attributes_, parts_, operands_, results_, part);
    }
    int64_t num_brought() const { return static_cast<int64_t>(arrivals_.size()); }
    void bring_next() { arrivals_.push_back(transfers_.bring(num_brought(), operands_.own, results_.keys, needed_)); }
    void keep_received() {
        for (int64_t part = 0; part < parts_.count and results_.kept.k.element_count() > 0; ++part)
            transfers_.keep(part, results_.keys.all, results_.kept);
    }
    // The multiprocessors that help a part when nothing is to be transferred. The last one has them from the beginning.
    int helpers(int64_t part) const { return part + 1 < parts_.count ? reserved_ : 0; }
    void help(const sm90::ForwardParams& params, int num_sms) const {
        check_launch(sm90::help_attention_forward(params, num_sms, fork_.helpers()));
    }

    void launch_own_tiles(const sm90::ForwardParams& first, bool in_halves) {
        needed_ = find_needed_keys(first);
        own_tiles_ = to_own_tiles(in_halves);
        own_tiles_->num_sms -= reserved_;
        const cudaStream_t stream = chain_.next(*own_tiles_);
        check_launch(sm90::attention_forward(*own_tiles_, stream));
    }

    // Returns which own keys the tiles need that also see received ones: for the others they need not be copied.
    const uint8_t* find_needed_keys(const sm90::ForwardParams& params) {
        const int tokens = params.q_len, tile_rows = find_tile(sm90::forward_tile, params.dim, params.v_dim).rows;
        auto* const needed = static_cast<uint8_t*>(transfers_.allocate(ceil_div(tokens, collectives::kNeededRows)));
        const sm90::NeededKeysParams needs{.bands = params.bands,
                                           .tiles = params.tiles,
                                           .num_tiles = ceil_div(tokens, tile_rows),
                                           .tile_rows = tile_rows,
                                           .q_len = tokens,
                                           .own_len = tokens,
                                           .block_keys = collectives::kNeededRows,
                                           .needed = needed};
        check_launch(sm90::find_needed_keys(needs, fork_.transfers()));
        return needed;
    }

    // Returns the parameters for the tiles that see no received keys, and for the heads of all parts from `first` on.
    sm90::ForwardParams to_own_tiles(int64_t first) const {
        sm90::ForwardParams params = to_params(first);
        params.heads = static_cast<int>(parts_.heads * (parts_.count - first));
        params.kv_heads = static_cast<int>(parts_.key_heads * (parts_.count - first));
        params.kv_row_heads = static_cast<int>(parts_.key_heads * parts_.count);
        params.kv_len = params.key_end = static_cast<int>(parts_.tokens);
        params.k = parts_.own_keys("k", operands_.own.k, results_.keys.all.k, first);
        params.v = parts_.own_keys("v", operands_.own.v, results_.keys.all.v, first);
        params.subset = sm90::Tiles::kSeeOwn;
        params.from_last_tile = false;
        return params;
    }

    sm90::ForwardParams launch_part(int part) {
        sm90::ForwardParams params = to_params(part);
        params.num_sms -= helpers(part);
        if (part == 0 and half_.has_value()) {
            launch_received_half(params);
        } else {
            params.subset = own_tiles_.has_value() ? sm90::Tiles::kSeeReceived : sm90::Tiles::kAll;
            const cudaStream_t stream = chain_.next(params);
            fork_.wait(stream, arrivals_[part].all);
            check_launch(sm90::attention_forward(params, stream));
        }
        return params;
    }

    void launch_own_half(const sm90::ForwardParams& whole) {
        const int64_t row_heads = parts_.batch * parts_.tokens * parts_.heads;
        sm90::ForwardParams own = whole;
        own.out = transfers_.allocate(row_heads * whole.v_dim * sizeof(float));
        own.lse = static_cast<float*>(transfers_.allocate(row_heads * sizeof(float)));
        own.out_f32 = true;
        own.row_heads = whole.heads;
        own.sinks = data_of<const float>("sinks", operands_.sinks) + parts_.heads * parts_.count;
        own.key_end = static_cast<int>(parts_.tokens);
        own.num_sms -= reserved_;
        const cudaStream_t stream = chain_.next(own);
        fork_.wait(stream, arrivals_[0].own);
        check_launch(sm90::attention_forward(own, stream));
        half_ = {own, fork_.record(stream)};
    }

    void launch_received_half(const sm90::ForwardParams& whole) {
        sm90::ForwardParams received = half_->params;
        received.key_begin = received.key_end;
        received.key_end = whole.key_end;
        received.previous_out = received.out;
        received.previous_lse = received.lse;
        received.num_sms = whole.num_sms;
        const cudaStream_t stream = chain_.next(received);
        fork_.wait(stream, half_->done);
        fork_.wait(stream, arrivals_[0].all);
        check_launch(sm90::attention_forward(received, stream));
        check_launch(sm90::finish_attention_forward({.out = static_cast<const float*>(received.out),
                                                     .lse = received.lse,
                                                     .sinks = whole.sinks,
                                                     .to_out = whole.out,
                                                     .to_lse = whole.lse,
                                                     .dtype = whole.dtype,
                                                     .rows = parts_.batch * parts_.tokens,
                                                     .heads = whole.heads,
                                                     .row_heads = whole.row_heads,
                                                     .v_dim = whole.v_dim},
                                                    stream));
    }

    const ContextAttributes& attributes_;
    const Parts& parts_;
    const Forward::Operands& operands_;
    const Forward::Results& results_;
    ContextFork& fork_;
    ContextTransfers& transfers_;
    Chain chain_;
    const int reserved_;
    const uint8_t* needed_ = nullptr;
    std::vector<Arrival> arrivals_;  // of parts
    std::optional<Half> half_;
    std::optional<sm90::ForwardParams> own_tiles_;
};

void Forward::launch(const ContextAttributes& attributes, const Parts& parts, const Operands& operands,
                     const Results& results, ContextFork& fork, ContextTransfers& transfers) {
    ForwardCall(attributes, parts, operands, results, fork, transfers).launch();
}

}  // namespace

CollectiveHandlers context_forward_cuda() {
    return context_handlers<Forward>();
}

}  // namespace jaxmagi
