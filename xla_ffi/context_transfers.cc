#include "xla_ffi/context_transfers.h"

#include <algorithm>

#include "csrc/collectives/part_rows.h"

namespace jaxmagi {

using namespace collectives;

struct ContextTransfers::Step {
    GroupIds group;
    ffi::AnyBuffer sends, receives;
    int64_t input_rows, output_rows, pair_rows, ranks_per_host;
};

ContextTransfers::Step ContextTransfers::across() {
    const int64_t output_rows = attributes_.has_two_steps() ? attributes_.middle_rows : attributes_.output_rows;
    return {attributes_.across(),    tables_.sends,         tables_.receives, attributes_.input_rows, output_rows,
            attributes_.pair_rows, attributes_.ranks_per_host};
}

ContextTransfers::Step ContextTransfers::inside() {
    return {attributes_.inside(),     tables_.inside_sends,          tables_.inside_receives, attributes_.middle_rows,
            attributes_.output_rows, attributes_.inside_pair_rows, 0};
}

void ContextTransfers::copy_own(const KeysValues& own, const KeysValues& all) {
    const auto array = [&](const char* name, const ffi::AnyBuffer& from, const ffi::AnyBuffer& to) -> OwnRows {
        const int64_t heads = parts_.key_heads * parts_.count, dim = shape_of(to)[4];
        check_buffer(name, from, {parts_.batch, parts_.tokens, heads, dim}, to.element_type());
        const int64_t row_bytes = heads * dim * static_cast<int64_t>(ByteWidth(to.element_type()));
        return {data_of<const void>(name, from, 16), data_of<void>(name, to, 16), row_bytes};
    };
    const OwnRowsParams params{{array("k", own.k, all.k), array("v", own.v, all.v)},
                               parts_.batch, parts_.tokens, parts_.rows, parts_.count};
    check_cuda(copy_own_rows(params, fork_.program()), "launching the kernel that copies keys and values");
}

void ContextTransfers::cast(int64_t part, const CastArrays& arrays) {
    const int stride = static_cast<int>(parts_.rows), tokens = static_cast<int>(parts_.tokens);
    const std::vector own{parts_.of_rows(views_, arrays.all.k, part, tokens),
                          parts_.of_rows(views_, arrays.all.v, part, tokens)};
    const std::vector all = rows(arrays.all, part);
    if (not attributes_.has_two_steps())
        return launch(Kind::kCast, across(), own, all, {.input_stride = stride, .first_output_row = tokens});
    const std::vector middle = rows(arrays.middle, part);
    launch(Kind::kCast, across(), own, middle, {.input_stride = stride});
    launch(Kind::kCast, inside(), middle, all, {.first_output_row = tokens});
}

bool ContextTransfers::crosses_hosts() const {
    return std::ranges::any_of(transfers_, &Transfer::has_remote_rows);
}

void ContextTransfers::give_back(int64_t part, const ReturnArrays& arrays) {
    const std::vector gradients = rounded(arrays.gradients, arrays.wire, part, parts_.tokens);
    const std::vector sums = rows(arrays.sums, part);
    if (not attributes_.has_two_steps())
        return launch(Kind::kReduce, across(), gradients, sums, {});
    launch(Kind::kReduce, inside(), gradients, rows(arrays.middle, part), {});
    launch(Kind::kReduce, across(), rounded(arrays.middle, arrays.middle_wire, part, 0), sums, {});
}

void ContextTransfers::launch(Kind kind, const Step& step, const std::vector<ffi::AnyBuffer>& from,
                              const std::vector<ffi::AnyBuffer>& to, const Placement& placement) {
    const TransferAttributes attributes{.groups = step.group.ids,
                                        .group_size = step.group.size,
                                        .input_rows = step.input_rows,
                                        .output_rows = step.output_rows,
                                        .pair_rows = step.pair_rows,
                                        .num_sms = attributes_.num_sms,
                                        .implementation = attributes_.implementation,
                                        .ranks_per_host = step.ranks_per_host,
                                        .timeout_ms = attributes_.timeout_ms};
    // Only the first one may have to wait for the tables. Those behind it must not wait for what computes meanwhile.
    const cudaStream_t setup = transfers_.empty() ? fork_.program() : fork_.setup();
    transfers_.emplace_back(kind, Buffers{step.sends, step.receives, from, to}, attributes, placement,
                            connected_group(step.group), setup, scratch_);
    transfers_.back().launch(fork_.transfers());
}

std::vector<ffi::AnyBuffer> ContextTransfers::rows(const KeysValues& arrays, int64_t part) {
    return {parts_.of_rows(views_, arrays.k, part), parts_.of_rows(views_, arrays.v, part)};
}

std::vector<ffi::AnyBuffer> ContextTransfers::rounded(const KeysValues& arrays, const KeysValues& wire, int64_t part,
                                                      int64_t first) {
    const std::vector from = rows(arrays, part);
    if (wire.k.element_count() == 0)
        return from;
    const std::vector to = rows(wire, part);
    RoundedRowsParams params{.arrays = {},
                             .batch = parts_.batch,
                             .rows = from[0].dimensions()[1],
                             .first = first,
                             .dtype = summed_dtype(to[0])};
    for (size_t i = 0; i < 2; ++i) {
        check_type("gradients that are rounded", from[i], ffi::F32);
        check_buffer("rounded gradients", to[i], shape_of(from[i]), wire.k.element_type());
        params.arrays[i] = {data_of<const float>("gradients", from[i], 16), data_of<void>("gradients", to[i], 16),
                            from[i].dimensions()[2]};
    }
    check(params.dtype == DType::kBF16 or params.dtype == DType::kF16,
          "gradients are rounded to bf16 or f16, got ", to[0].element_type());
    check_cuda(round_rows(params, fork_.transfers()), "launching the kernel that rounds gradients");
    return to;
}

}  // namespace jaxmagi
