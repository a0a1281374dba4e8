#include <ranges>
#include <vector>

#include "xla_ffi/context_backward.h"

namespace jaxmagi {
namespace {

// Own tiles and the others have counters of their own.
int counter_of(sm90::KeyTiles tiles) {
    return tiles == sm90::KeyTiles::kOthers;
}

// Holds the launches. In this order there is something to compute beside most transfers:
//   own tiles of the first part         while keys come
//   received tiles of part after part   while keys of later parts come, and gradients of earlier ones return
//   own tiles of the other parts        while gradients return
// With a fixed order of sums, and where parts share workspaces, the own tiles of a part come right before its received
// ones.
class LaunchesByPart {
public:
    LaunchesByPart(BackwardCall& call, int reserved)
        : call_(call), fork_(call.fork()), reserved_(reserved), launches_(ordered_launches(call)) {}

    void launch() {
        for (Launch& one : launches_) {
            launch(one);
            // The host may wait for the cast of each other part, and the device has two launches to go on with.
            if (&one == &launches_.front())
                continue;
            while (call_.num_brought() < call_.num_parts())
                call_.bring_next();
            for (; num_finished_ <= &one - launches_.data(); ++num_finished_)
                help_and_finish(launches_[num_finished_]);
        }
    }

private:
    struct Launch {
        int64_t part;
        sm90::KeyTiles tiles;
        bool is_followed = true;
        cudaEvent_t done = nullptr;
    };
    using enum sm90::KeyTiles;

    static std::vector<Launch> ordered_launches(const BackwardCall& call) {
        std::vector<Launch> launches;
        const bool by_part = call.params(0).deterministic or call.shares_workspaces();
        for (int64_t part = 0; part < call.num_parts(); ++part) {
            if (part == 0 or by_part)
                launches.push_back({part, kOwn});
            launches.push_back({part, kOthers});
        }
        for (int64_t part = 1; part < call.num_parts() and not by_part; ++part)
            launches.push_back({part, kOwn});
        for (Launch& one : std::views::reverse(launches)) {
            one.is_followed = false;
            if (has_tiles(call.params(one.part), one.tiles))
                break;
        }
        return launches;
    }

    void launch(Launch& one) {
        const sm90::BackwardParams& params = call_.params(one.part);
        const cudaStream_t stream = fork_.of_launch(num_launches_++);
        call_.prepare(one.part, stream);
        if (one.tiles == kOthers)
            fork_.wait(stream, call_.all_arrived(one.part));
        if (before_ != nullptr)
            fork_.wait_until_set(stream, before_);
        run(one, params.num_sms - reserved_, stream);
        if (has_tiles(params, one.tiles))
            before_ = params.drained + counter_of(one.tiles);
        one.done = fork_.record(stream);
    }

    void run(const Launch& one, int num_sms, cudaStream_t stream) const {
        const sm90::BackwardParams& params = call_.params(one.part);
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
        call_.prepare(one.part, helpers);
        fork_.wait(helpers, fork_.record(fork_.transfers()));  // until nothing travels
        run(one, reserved_, helpers);
        fork_.wait(helpers, one.done);
        call_.finish(one.part, one.tiles);
    }

    BackwardCall& call_;
    ContextFork& fork_;
    const int reserved_;
    std::vector<Launch> launches_;
    int num_launches_ = 0;
    int64_t num_finished_ = 0;          // launches
    const uint32_t* before_ = nullptr;  // the flag of the launch before
};

}  // namespace

void launch_by_part(BackwardCall& call, int reserved) {
    LaunchesByPart(call, reserved).launch();
}

}  // namespace jaxmagi
