#include "csrc/common/math.h"

#include "xla_ffi/context_backward.h"

namespace jaxmagi {
namespace {

// Own tiles of one in so many key heads are computed while keys come.
constexpr int kFirstKeyHeads = 4;

// Launches the stages from `first` on.
void run_stages(const sm90::BackwardParams& params, int first, int num_sms, const uint32_t* arrived,
                cudaStream_t stream) {
    const int num_first_heads = ceil_div(num_key_heads(params), kFirstKeyHeads);
    const sm90::BackwardLaunch launch = staged_launch(params, num_first_heads, first, num_sms, arrived);
    check_launch(run_attention_backward(params, launch, stream));
}

}  // namespace

// There is one part, and a launch of three stages:
//   own tiles of some key heads         while keys come
//   their other tiles
//   all tiles of the other key heads    as attention on one GPU does it: queries stay in the L2 cache for all tiles
// CTAs go on with the second stage if its keys have come by then. Where they have not, another launch does what is
// left.
void launch_within_host(BackwardCall& call, int reserved) {
    ContextFork& fork = call.fork();
    const sm90::BackwardParams& params = call.params(0);
    const cudaStream_t program = fork.program(), rest = fork.of_launch(1), helpers = fork.helpers();
    uint32_t* const arrived = params.drained + Backward::kArrived;
    fork.set(fork.transfers(), arrived);
    const cudaEvent_t brought = fork.record(fork.transfers());
    call.prepare(0, program);
    run_stages(params, 0, params.num_sms - reserved, arrived, program);
    for (const cudaStream_t stream : {rest, helpers}) {
        call.prepare(0, stream);
        fork.wait(stream, brought);
    }
    run_stages(params, 0, reserved, arrived, helpers);
    fork.wait_until_set(rest, params.drained);
    run_stages(params, 1, params.num_sms, nullptr, rest);
    for (const cudaStream_t stream : {program, rest})
        fork.wait(helpers, fork.record(stream));
    for (const sm90::KeyTiles tiles : {sm90::KeyTiles::kOthers, sm90::KeyTiles::kOwn})
        call.finish(0, tiles);
}

}  // namespace jaxmagi
