#include <optional>

#include "csrc/attention/sm90/forward/forward.h"
#include "csrc/attention/sm90/needed_keys.h"
#include "csrc/collectives/part_rows.h"

#include "xla_ffi/attention_cuda_handler.h"
#include "xla_ffi/context_handler.h"

namespace jaxmagi {
namespace {

// Launches attention one call behind the other, in two streams in turn: a call begins when the one before has no work
// left to begin with. Each has a flag, and may have a counter of work items, for which there is room in `counters`.
class Chain {
public:
    Chain(ContextFork& fork, int* counters, int64_t most) : fork_(fork), counters_(counters), flags_(counters + most) {}

    // Returns the stream of the next call, and gives the call its counter and flag.
    cudaStream_t next_with_counter(sm90::ForwardParams& params) {
        params.counter = counters_ + count_;
        params.counter_is_zero = true;
        return next(params);
    }

    // Returns the stream of the next call, and gives the call its flag.
    cudaStream_t next(sm90::ForwardParams& params) {
        const cudaStream_t stream = fork_.of_launch(count_);
        if (count_ > 0)
            fork_.wait_until_set(stream, reinterpret_cast<const uint32_t*>(flags_ + count_ - 1));
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
    static constexpr bool kHasPartsWithinHost = true;  // CTAs go from part to part, so that parts cost no launches

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
        ffi::AnyBuffer counters;  // of work items, and behind them flags of launches
    };

    // Counters beside those of the parts: between hosts of the own tiles and the own half; within a host of the own
    // tiles, and the number of parts that have arrived. There are as many flags.
    static constexpr int64_t kMoreCounters = 2;

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
        check_buffer("counters", results.counters, {2 * (attributes.num_parts + kMoreCounters)}, ffi::S32);
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

// A call of the pass. Within a host CTAs go through stages:
//   own tiles      of all heads, which see no received keys, from where the rank has its keys
//   first part     the other tiles of its heads, if its keys have come by then
//   other parts    the same, one after the other
// A CTA ends where keys have not come. Behind the transfer of each part there is another launch, which does what is
// left of the parts so far. So attention does not wait for all keys where every tile sees received ones. With several
// masks there are no own tiles, and parts have all tiles.
//
// Between hosts attention has this order:
//   own tiles      of all heads, as within a host
//   own half       only where keys come from other hosts and the output is not fp32: the other tiles of the first part
//                  over the rank's own keys. Nothing else would hide the transfer of this part where most tiles see
//                  received keys
//   first part     its other tiles; with an own half, over received keys, merged with that half
//   other parts    their other tiles
// Attention to a part is launched right behind the transfer of its keys, before that of the next part, since between
// hosts the host waits for each transfer. Multiprocessors that were left to transfers help when all keys have come.
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
          chain_(fork, data_of<int>("counters", results.counters), attributes.num_parts + Forward::kMoreCounters),
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
        auto* const counters = data_of<int>("counters", results_.counters);
        auto* const num_arrived = reinterpret_cast<uint32_t*>(counters + 1 + parts_.count);
        const sm90::ForwardParams parts = to_all_parts(counters + 1, num_arrived);
        sm90::ForwardParams first = parts;  // what the first launch begins with
        if (parts.num_masks == 1) {
            find_needed_keys(parts);
            first = to_own_tiles();
            first.counter = counters;
            first.counter_is_zero = true;
            first.next = &parts;
            first.num_sms -= reserved_;
            const cudaStream_t stream = chain_.next(first);
            check_launch(sm90::attention_forward(first, stream));
        }
        for (bring_next(num_arrived); num_brought() < parts_.count; bring_next(num_arrived))
            launch_all_parts(parts, reserved_);
        fork_.wait(fork_.helpers(), fork_.record(fork_.transfers()));
        if (parts.num_masks == 1 or parts_.count > 1)  // something is under way
            help(first, reserved_);
        launch_all_parts(parts, 0);
        keep_received();
    }

    // Returns the parameters for the tiles of all parts that own ones leave, in one call.
    sm90::ForwardParams to_all_parts(int* counters, const uint32_t* num_arrived) const {
        sm90::ForwardParams params = to_params(0);
        params.num_parts = static_cast<int>(parts_.count);
        params.num_arrived = num_arrived;
        params.counter = counters;
        params.counter_is_zero = true;
        params.claims_all = true;
        params.subset = params.num_masks == 1 ? sm90::Tiles::kSeeReceived : sm90::Tiles::kAll;
        return params;
    }

    // Launches attention to parts behind the transfers so far, and leaves so many multiprocessors free.
    void launch_all_parts(sm90::ForwardParams params, int num_free) {
        params.num_sms -= num_free;
        const cudaStream_t stream = chain_.next(params);
        fork_.wait(stream, fork_.record(fork_.transfers()));
        check_launch(sm90::attention_forward(params, stream));
    }

    // Brings the keys of the next part, and says how many parts have arrived then.
    void bring_next(uint32_t* num_arrived) {
        bring_next();
        fork_.set(fork_.transfers(), num_arrived, static_cast<uint32_t>(num_brought()));
    }

    void launch_between_hosts() {
        const sm90::ForwardParams first = to_params(0);
        if (first.num_masks == 1)
            launch_own_tiles(first);
        bring_next();  // tells whether keys come from other hosts
        if (transfers_.crosses_hosts() and not first.out_f32)
            launch_own_half(first);
        std::vector<sm90::ForwardParams> launched{launch_part(0)};
        while (num_brought() < parts_.count) {
            bring_next();
            launched.push_back(launch_part(std::ssize(launched)));
        }
        keep_received();
        fork_.wait(fork_.helpers(), arrivals_.back().all);
        if (own_tiles_.has_value())
            help(*own_tiles_, reserved_);
        for (int64_t part = half_.has_value() ? 1 : 0; part < parts_.count; ++part)
            help(launched[part], helpers(part));
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

    void launch_own_tiles(const sm90::ForwardParams& first) {
        find_needed_keys(first);
        own_tiles_ = to_own_tiles();
        own_tiles_->num_sms -= reserved_;
        const cudaStream_t stream = chain_.next_with_counter(*own_tiles_);
        check_launch(sm90::attention_forward(*own_tiles_, stream));
    }

    // Finds out which tiles see received keys, and which own keys these need: the others need not be copied.
    void find_needed_keys(const sm90::ForwardParams& params) {
        const int tokens = params.q_len, num_tiles = ceil_div(tokens, tile_rows(params));
        needed_ = static_cast<uint8_t*>(transfers_.allocate(ceil_div(tokens, collectives::kNeededRows)));
        sees_received_ = static_cast<uint8_t*>(transfers_.allocate(num_tiles));
        const sm90::NeededKeysParams needs{.bands = params.bands,
                                           .tiles = params.tiles,
                                           .num_tiles = num_tiles,
                                           .tile_rows = tile_rows(params),
                                           .q_len = tokens,
                                           .own_len = tokens,
                                           .block_keys = collectives::kNeededRows,
                                           .needed = needed_,
                                           .sees_received = sees_received_};
        check_launch(sm90::find_needed_keys(needs, fork_.transfers()));
    }
    static int tile_rows(const sm90::ForwardParams& params) {
        return find_tile(sm90::forward_tile, params.dim, params.v_dim).rows;
    }

    // Returns the parameters for the tiles of all heads that see no received keys.
    sm90::ForwardParams to_own_tiles() const {
        sm90::ForwardParams params = to_params(0);
        params.heads = params.row_heads;
        params.kv_heads = params.kv_row_heads = static_cast<int>(parts_.key_heads * parts_.count);
        params.kv_len = params.key_end = static_cast<int>(parts_.tokens);
        params.k = parts_.own_keys("k", operands_.own.k, results_.keys.all.k, 0);
        params.v = parts_.own_keys("v", operands_.own.v, results_.keys.all.v, 0);
        params.subset = sm90::Tiles::kSeeOwn;
        params.from_last_tile = false;
        return params;
    }

    sm90::Tiles tiles_of_parts() const {
        return own_tiles_.has_value() ? sm90::Tiles::kSeeReceived : sm90::Tiles::kAll;
    }

    sm90::ForwardParams launch_part(int64_t part) {
        sm90::ForwardParams params = to_params(part);
        params.num_sms -= helpers(part);
        if (part == 0 and half_.has_value()) {
            launch_received_half(params);
        } else {
            params.subset = tiles_of_parts();
            const cudaStream_t stream = chain_.next_with_counter(params);
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
        own.subset = tiles_of_parts();
        own.sinks = data_of<const float>("sinks", operands_.sinks) + parts_.heads * parts_.count;
        own.key_end = static_cast<int>(parts_.tokens);
        own.num_sms -= reserved_;
        const cudaStream_t stream = chain_.next_with_counter(own);
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
        const cudaStream_t stream = chain_.next_with_counter(received);
        fork_.wait(stream, half_->done);
        fork_.wait(stream, arrivals_[0].all);
        check_launch(sm90::attention_forward(received, stream));
        check_launch(sm90::finish_attention_forward({.out = static_cast<const float*>(received.out),
                                                     .lse = received.lse,
                                                     .sinks = whole.sinks,
                                                     .to_out = whole.out,
                                                     .to_lse = whole.lse,
                                                     .dtype = whole.dtype,
                                                     .is_wanted = sees_received_,
                                                     .tile_rows = tile_rows(whole),
                                                     .q_len = whole.q_len,
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
    uint8_t *needed_ = nullptr, *sees_received_ = nullptr;  // null with several masks, where all keys and tiles count
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
