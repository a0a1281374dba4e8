#include "xla_ffi/context_forward.h"

namespace jaxmagi {
namespace {

// Returns the parameters for the tiles of all parts that own ones leave, in one call.
sm90::ForwardParams to_all_parts(const ForwardCall& call, int* counters, const uint32_t* num_arrived) {
    sm90::ForwardParams params = call.to_params(0);
    params.num_parts = static_cast<int>(call.parts().count);
    params.num_arrived = num_arrived;
    params.counter = counters;
    params.counter_is_zero = true;
    params.claims_all = true;
    return params;
}

// Launches attention to parts behind the transfers so far and beside own tiles, and leaves so many multiprocessors
// free. What it leaves of the parts is for a launch behind it: with a flag its CTAs end when one has ended.
void launch_parts(ContextFork& fork, sm90::ForwardParams params, int num_free, uint32_t* drained) {
    params.num_sms -= num_free;
    params.drained = drained;
    const cudaStream_t stream = fork.of_launch(1);
    fork.wait(stream, fork.record(fork.transfers()));
    check_launch(sm90::attention_forward(params, stream));
}

// Brings the keys of the next part, and says how many parts have arrived then.
void bring_next(ForwardCall& call, uint32_t* num_arrived) {
    call.bring_next();
    call.fork().set(call.fork().transfers(), num_arrived, static_cast<uint32_t>(call.num_brought()));
}

}  // namespace

// CTAs have two kinds of work:
//   own tiles      of all heads, which see no received keys, from where the rank has its keys
//   parts          the other tiles of the heads of a part, if its keys have come by then, one part after the other
// They begin with own tiles, go to parts that have come when they begin with another section of these, and return. A
// CTA ends where no own tile is left and keys have not come. Another launch begins with the first part when its keys
// have come, for masks under which every tile sees received ones. When all keys have come, a last one does what is
// left. With several masks there are no own tiles, and parts have all tiles.
void launch_within_host(ForwardCall& call, int reserved) {
    ContextFork& fork = call.fork();
    const int64_t num_parts = call.parts().count;
    int* const counters = call.counters();
    auto* const num_arrived = reinterpret_cast<uint32_t*>(counters + 1 + num_parts);
    const sm90::ForwardParams parts = to_all_parts(call, counters + 1, num_arrived);
    sm90::ForwardParams first = parts;  // what the first launch begins with
    if (parts.num_masks == 1) {
        first = call.to_own_tiles();
        first.counter = counters;
        first.counter_is_zero = true;
        first.next = &parts;
        first.num_sms -= reserved;
        first.drained = call.flags();
        check_launch(sm90::attention_forward(first, fork.program()));
        fork.wait_until_set(fork.of_launch(1), first.drained);
    }
    bring_next(call, num_arrived);
    if (num_parts > 1)
        launch_parts(fork, parts, reserved, call.flags() + 1);
    while (call.num_brought() < num_parts)
        bring_next(call, num_arrived);
    fork.wait(fork.helpers(), fork.record(fork.transfers()));
    if (parts.num_masks == 1 or num_parts > 1)  // something is under way
        call.help(first, reserved);
    launch_parts(fork, parts, 0, nullptr);
    call.keep_received();
}

}  // namespace jaxmagi
