#include "xla_ffi/context_transfers.h"

#include <algorithm>
#include <utility>

#include "csrc/common/math.h"

namespace jaxmagi {

using namespace collectives;

namespace {

constexpr const char* kCopying = "launching the kernel that copies keys and values";

DType dtype_of_16_bits(const ffi::AnyBuffer& gradients) {
    const DType dtype = summed_dtype(gradients);
    check(dtype == DType::kBF16 or dtype == DType::kF16, "gradients are rounded to bf16 or f16, got ",
          gradients.element_type());
    return dtype;
}

}  // namespace

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

cudaEvent_t ContextTransfers::copy_own(int64_t part, const KeysValues& own, const KeysValues& all,
                                       const uint8_t* copied) {
    CopiedRowsParams params = copied_rows(part, own, all, 0, parts_.tokens);
    params.copied = copied;
    check_cuda(copy_part_rows(params, fork_.copies()), kCopying);
    return fork_.record(fork_.copies());
}

cudaEvent_t ContextTransfers::bring(int64_t part, const KeysValues& own, const CastArrays& arrays,
                                    cudaEvent_t own_copied) {
    if (sends_copies())
        fork_.wait(fork_.transfers(), own_copied);
    cast(part, own, arrays);
    if (not sends_copies())
        fork_.wait(fork_.transfers(), own_copied);
    return fork_.record(fork_.transfers());
}

cudaEvent_t ContextTransfers::put_back(int64_t part, const KeysValues& kept, const KeysValues& all,
                                       cudaEvent_t own_copied) {
    fork_.wait(fork_.transfers(), own_copied);
    check_cuda(copy_part_rows(received_rows(part, kept, all), fork_.transfers()), kCopying);
    return fork_.record(fork_.transfers());
}

void ContextTransfers::keep(int64_t part, const KeysValues& all, const KeysValues& kept) {
    CopiedRowsParams params = received_rows(part, kept, all);
    for (CopiedRows& array : params.arrays)
        array = {array.to, const_cast<void*>(array.from), array.to_row_bytes, array.from_row_bytes, array.bytes};
    std::swap(params.from_rows, params.to_rows);
    check_cuda(copy_part_rows(params, fork_.transfers()), kCopying);
}

// Returns how kept rows get there.
CopiedRowsParams ContextTransfers::received_rows(int64_t part, const KeysValues& kept, const KeysValues& all) {
    return copied_rows(part, kept, all, parts_.tokens, parts_.rows - parts_.tokens);
}

// Returns how so many rows of all heads get into rows of a part from `first` on.
CopiedRowsParams ContextTransfers::copied_rows(int64_t part, const KeysValues& from, const KeysValues& all,
                                               int64_t first, int64_t count) {
    const int64_t all_heads = parts_.key_heads * parts_.count;
    const auto array = [&](const char* name, const ffi::AnyBuffer& rows, const ffi::AnyBuffer& to) -> CopiedRows {
        const int64_t dim = shape_of(to)[4];
        check_buffer(name, rows, {parts_.batch, count, all_heads, dim}, to.element_type());
        const int64_t head_bytes = dim * static_cast<int64_t>(ByteWidth(to.element_type()));
        const int64_t part_bytes = parts_.key_heads * head_bytes;
        return {data_of<const char>(name, rows, 16) + part * part_bytes,
                data_of<char>(name, parts_.of_rows(views_, to, part), 16) + first * part_bytes, all_heads * head_bytes,
                part_bytes, part_bytes};
    };
    return {.arrays = {array("k", from.k, all.k), array("v", from.v, all.v)},
            .batch = parts_.batch,
            .count = count,
            .from_rows = count,
            .to_rows = parts_.rows,
            .copied = nullptr};
}

void ContextTransfers::cast(int64_t part, const KeysValues& own, const CastArrays& arrays) {
    const int tokens = static_cast<int>(parts_.tokens), stride = static_cast<int>(parts_.rows);
    const std::vector all = rows(arrays.all, part);
    if (not sends_copies()) {
        const std::vector sent{parts_.of_own_rows(views_, own.k, part), parts_.of_own_rows(views_, own.v, part)};
        return launch(Kind::kCast, part, across(), sent, all,
                      {.input_pitch = static_cast<int>(parts_.count), .first_output_row = tokens});
    }
    const std::vector sent{parts_.of_rows(views_, arrays.all.k, part, tokens),
                           parts_.of_rows(views_, arrays.all.v, part, tokens)};
    if (not attributes_.has_two_steps())
        return launch(Kind::kCast, part, across(), sent, all, {.input_stride = stride, .first_output_row = tokens});
    const std::vector middle = rows(arrays.middle, part);
    launch(Kind::kCast, part, across(), sent, middle, {.input_stride = stride});
    launch(Kind::kCast, part, inside(), middle, all, {.first_output_row = tokens});
}

bool ContextTransfers::crosses_hosts() const {
    return std::ranges::any_of(transfers_, &Transfer::has_remote_rows);
}

SentBlocks ContextTransfers::find_sent_blocks(int64_t count, int64_t rows, cudaStream_t stream) {
    const SentBlocks blocks{static_cast<uint8_t*>(allocate(std::max<int64_t>(parts_.batch * count, 1))), count, rows};
    const auto* const sends = data_of<const Send>("sends", tables_.sends);
    const auto entries = static_cast<int>(tables_.sends.dimensions()[1]);
    check_cuda(collectives::find_sent_blocks(blocks, sends, entries, parts_.batch, stream),
               "launching the kernel that finds blocks of rows that are sent");
    return blocks;
}

const uint8_t* ContextTransfers::find_copied_blocks(int64_t first_row, bool are_sent, cudaStream_t stream) {
    const auto batch = static_cast<size_t>(parts_.batch);
    const size_t count = ceil_div(parts_.tokens, int64_t{kCopiedBlockRows}), first = first_row / kCopiedBlockRows;
    uint8_t* flags;
    if (are_sent and sends_copies()) {
        flags = find_sent_blocks(static_cast<int64_t>(count), kCopiedBlockRows, stream).is_sent;
    } else {
        flags = static_cast<uint8_t*>(allocate(std::max<size_t>(batch * count, 1)));
        check_cuda(cudaMemsetAsync(flags, 0, batch * count, stream), "clearing flags");
    }
    if (first_row < parts_.tokens)
        check_cuda(cudaMemset2DAsync(flags + first, count, 1, count - first, batch, stream), "setting flags");
    return flags;
}

void ContextTransfers::give_back(int64_t part, const ReturnArrays& arrays) {
    const std::vector gradients = rounded(arrays.gradients, arrays.wire, part, parts_.tokens);
    const std::vector sums = rows(arrays.sums, part);
    if (attributes_.has_two_steps()) {
        launch(Kind::kReduce, part, inside(), gradients, rows(arrays.middle, part), {});
        launch(Kind::kReduce, part, across(), rounded(arrays.middle, arrays.middle_wire, part, 0), sums,
               {.keeps_empty_sums = true});
    } else {
        launch(Kind::kReduce, part, across(), gradients, sums, {.keeps_empty_sums = true});
    }
}

void ContextTransfers::add_own(int64_t part, const ReturnArrays& arrays, const SentBlocks& blocks) {
    const int64_t all_heads = parts_.key_heads * parts_.count;
    const auto array = [&](const char* name, const ffi::AnyBuffer& own, const ffi::AnyBuffer& sums,
                           const ffi::AnyBuffer& to) -> GradientRows {
        const int64_t dim = shape_of(sums)[4], width = parts_.key_heads * dim;
        check_type(name, own, ffi::F32);
        check_type(name, sums, ffi::F32);
        check_shape(name, to, {parts_.batch, parts_.tokens, all_heads, dim});
        return {data_of<const float>(name, parts_.of_rows(views_, own, part), 16),
                data_of<const float>(name, parts_.of_rows(views_, sums, part), 16),
                data_of<uint16_t>(name, to, 16) + part * width, width, all_heads * dim};
    };
    const GradientRowsParams params{{array("gradients of keys", arrays.gradients.k, arrays.sums.k, arrays.result.k),
                                     array("gradients of values", arrays.gradients.v, arrays.sums.v, arrays.result.v)},
                                    data_of<const Send>("sends", tables_.sends),
                                    static_cast<int>(tables_.sends.dimensions()[1]),
                                    parts_.batch, parts_.tokens, parts_.rows, dtype_of_16_bits(arrays.result.k),
                                    blocks};
    check_cuda(add_gradients(params, fork_.transfers()), "launching the kernel that adds gradients");
}

void ContextTransfers::launch(Kind kind, int64_t part, const Step& step, const std::vector<ffi::AnyBuffer>& from,
                              const std::vector<ffi::AnyBuffer>& to, Placement placement) {
    placement.compares_tables = part == 0;  // all parts have the same tables
    const TransferAttributes attributes{.groups = step.group.ids,
                                        .group_size = step.group.size,
                                        .input_rows = step.input_rows,
                                        .output_rows = step.output_rows,
                                        .pair_rows = step.pair_rows,
                                        .num_sms = attributes_.num_sms,
                                        .implementation = attributes_.implementation,
                                        .ranks_per_host = step.ranks_per_host,
                                        .timeout_ms = attributes_.timeout_ms};
    transfers_.emplace_back(kind, Buffers{step.sends, step.receives, from, to}, attributes, placement,
                            connected_group(step.group), fork_.setup(), scratch_);
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
                             .dtype = dtype_of_16_bits(to[0])};
    for (size_t i = 0; i < 2; ++i) {
        check_type("gradients that are rounded", from[i], ffi::F32);
        check_buffer("rounded gradients", to[i], shape_of(from[i]), wire.k.element_type());
        params.arrays[i] = {data_of<const float>("gradients", from[i], 16), data_of<void>("gradients", to[i], 16),
                            from[i].dimensions()[2]};
    }
    check_cuda(round_rows(params, fork_.transfers()), "launching the kernel that rounds gradients");
    return to;
}

}  // namespace jaxmagi
