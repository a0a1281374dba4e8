#include <iterator>
#include <optional>
#include <vector>

#include "xla_ffi/context_forward.h"

namespace jaxmagi {
namespace {

// Launches attention one call behind the other, in two streams in turn: a call begins when the one before has no work
// left to begin with. Each has a counter of work items and a flag.
class Chain {
public:
    explicit Chain(const ForwardCall& call) : fork_(call.fork()), counters_(call.counters()), flags_(call.flags()) {}

    // Returns the stream of the next call, and gives the call its counter and flag.
    cudaStream_t next(sm90::ForwardParams& params) {
        params.counter = counters_ + count_;
        params.counter_is_zero = true;
        const cudaStream_t stream = fork_.of_launch(count_);
        if (count_ > 0)
            fork_.wait_until_set(stream, flags_ + count_ - 1);
        params.drained = flags_ + count_;
        ++count_;
        return stream;
    }

private:
    ContextFork& fork_;
    int* const counters_;
    uint32_t* const flags_;
    int count_ = 0;
};

// Holds the launches, in this order:
//   own tiles      of all heads, which see no received keys, from where the rank has its keys
//   own half       only where keys come from other hosts and the output is not fp32: the other tiles of the first part
//                  over the rank's own keys. Nothing else would hide the transfer of this part where most tiles see
//                  received keys
//   first part     its other tiles; with an own half, over received keys, merged with that half
//   other parts    their other tiles
// Attention to a part is launched right behind the transfer of its keys, before that of the next part, since between
// hosts the host waits for each transfer. Multiprocessors that were left to transfers help when all keys have come.
// With several masks there are no own tiles, and parts have all tiles.
class LaunchesBetweenHosts {
public:
    LaunchesBetweenHosts(ForwardCall& call, int reserved)
        : call_(call), fork_(call.fork()), parts_(call.parts()), reserved_(reserved), chain_(call) {}

    void launch() {
        const sm90::ForwardParams first = call_.to_params(0);
        call_.copy_next();  // now, while all multiprocessors are free: the first transfer begins behind it
        if (first.num_masks == 1)
            launch_own_tiles();
        call_.bring_next();  // tells whether keys come from other hosts
        if (call_.transfers().crosses_hosts() and not first.out_f32)
            launch_own_half(first);
        std::vector<sm90::ForwardParams> launched{launch_part(0)};
        while (call_.num_brought() < parts_.count) {
            call_.bring_next();
            launched.push_back(launch_part(std::ssize(launched)));
        }
        call_.keep_received();
        fork_.wait(fork_.helpers(), call_.all_arrived(parts_.count - 1));
        if (own_tiles_.has_value())
            call_.help(*own_tiles_, reserved_);
        for (int64_t part = half_.has_value() ? 1 : 0; part < parts_.count; ++part)
            call_.help(launched[part], helpers(part));
    }

private:
    struct Half {
        sm90::ForwardParams params;
        cudaEvent_t done;
    };

    // Returns how many multiprocessors help a part when nothing is left to transfer. The last part has them from the
    // beginning.
    int helpers(int64_t part) const { return part + 1 < parts_.count ? reserved_ : 0; }

    void launch_own_tiles() {
        own_tiles_ = call_.to_own_tiles();
        own_tiles_->num_sms -= reserved_;
        const cudaStream_t stream = chain_.next(*own_tiles_);
        check_launch(sm90::attention_forward(*own_tiles_, stream));
    }

    sm90::ForwardParams launch_part(int64_t part) {
        sm90::ForwardParams params = call_.to_params(part);
        params.num_sms -= helpers(part);
        if (part == 0 and half_.has_value()) {
            launch_received_half(params);
        } else {
            const cudaStream_t stream = chain_.next(params);
            fork_.wait(stream, call_.all_arrived(part));
            check_launch(sm90::attention_forward(params, stream));
        }
        return params;
    }

    void launch_own_half(const sm90::ForwardParams& whole) {
        const int64_t row_heads = parts_.batch * parts_.tokens * parts_.heads;
        sm90::ForwardParams own = whole;
        own.out = call_.transfers().allocate(row_heads * whole.v_dim * sizeof(float));
        own.lse = static_cast<float*>(call_.transfers().allocate(row_heads * sizeof(float)));
        own.out_f32 = true;
        own.row_heads = whole.heads;
        own.sinks = whole.sinks + parts_.heads * parts_.count;  // the row that has none
        own.key_end = static_cast<int>(parts_.tokens);
        own.num_sms -= reserved_;
        const cudaStream_t stream = chain_.next(own);
        fork_.wait(stream, call_.own_copied(0));
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
        fork_.wait(stream, call_.all_arrived(0));
        check_launch(sm90::attention_forward(received, stream));
        check_launch(sm90::finish_attention_forward({.out = static_cast<const float*>(received.out),
                                                     .lse = received.lse,
                                                     .sinks = whole.sinks,
                                                     .to_out = whole.out,
                                                     .to_lse = whole.lse,
                                                     .dtype = whole.dtype,
                                                     .is_wanted = wanted_tiles(whole, stream),
                                                     .tile_rows = ForwardCall::tile(whole).rows,
                                                     .q_len = whole.q_len,
                                                     .rows = parts_.batch * parts_.tokens,
                                                     .heads = whole.heads,
                                                     .row_heads = whole.row_heads,
                                                     .v_dim = whole.v_dim},
                                                    stream));
    }

    // Returns null with several masks, where all tiles count.
    const uint8_t* wanted_tiles(const sm90::ForwardParams& params, cudaStream_t stream) {
        return params.num_masks == 1 ? call_.find_received_tiles(params, stream) : nullptr;
    }

    ForwardCall& call_;
    ContextFork& fork_;
    const Parts& parts_;
    const int reserved_;
    Chain chain_;
    std::optional<Half> half_;
    std::optional<sm90::ForwardParams> own_tiles_;
};

}  // namespace

void launch_between_hosts(ForwardCall& call, int reserved) {
    LaunchesBetweenHosts(call, reserved).launch();
}

}  // namespace jaxmagi
