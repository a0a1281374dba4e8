#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <initializer_list>

#include "xla_ffi/checks.h"
#include "xla_ffi/collectives_groups.h"
#include "xla_ffi/collectives_params.h"

// A pass of context attention is cut into parts of the heads. A part has keys and values in arrays of its own, [parts,
// batch, rows, key heads of a part, dim]: in front those of the rank that it reads there or, unless ranks are within a
// host, sends from there, and behind them those that it receives. XLA knows these arrays with as many parts as there may
// be. If a call has fewer, it uses their memory in another way.

namespace jaxmagi {

// Attributes of a call for either pass. Rows travel in one step or, if `inside_group_size` is not 0, in two: across all
// ranks, and then inside each of `inside_groups`.
struct ContextAttributes {
    DeviceIds groups, inside_groups;
    int64_t group_size, inside_group_size;
    int64_t input_rows;         // tokens of the rank
    int64_t middle_rows;        // that the step across all ranks brings, of two steps
    int64_t output_rows;        // tokens of the rank, and the rows that it receives behind them
    int64_t pair_rows, inside_pair_rows, num_sms;
    Implementation implementation;
    int64_t ranks_per_host, timeout_ms;
    int64_t num_parts;              // the most that there may be
    int64_t num_parts_within_host;  // of calls whose ranks are within a host (Parts)
    int64_t num_workspaces;  // of parts of a backward pass: fewer than num_parts if these take turns with them
    double scale, soft_cap;
    bool deterministic;  // the backward pass

    bool has_two_steps() const { return inside_group_size > 0; }
    GroupIds across() const { return {groups, group_size}; }
    GroupIds inside() const { return {inside_groups, inside_group_size}; }
};

struct KeysValues { ffi::AnyBuffer k, v; };

// Buffers that are parts of XLA's.
class Views {
public:
    // Returns the buffer that begins `offset` elements behind the beginning of another one.
    ffi::AnyBuffer add(const ffi::AnyBuffer& whole, int64_t offset, std::initializer_list<int64_t> dims) {
        View& view = views_.emplace_back();
        std::ranges::copy(dims, view.dims.begin());
        const ffi::DataType type = whole.element_type();
        view.raw = {.struct_size = XLA_FFI_Buffer_STRUCT_SIZE,
                    .extension_start = nullptr,
                    .dtype = static_cast<XLA_FFI_DataType>(type),
                    .data = static_cast<char*>(whole.untyped_data()) + offset * static_cast<int64_t>(ByteWidth(type)),
                    .rank = static_cast<int64_t>(dims.size()),
                    .dims = view.dims.data()};
        return ffi::AnyBuffer(&view.raw);
    }

private:
    struct View {
        XLA_FFI_Buffer raw;
        std::array<int64_t, 4> dims;
    };

    std::deque<View> views_;  // which stay where they are
};

// The sizes of a call, by which its buffers are cut.
struct Parts {
    int64_t count, batch, tokens, rows, heads, key_heads;  // heads of a part
    bool are_within_host = false;                          // all keys come by kernels, in one step
    bool have_native_peers = false;                        // some may come by kernels from other ranks

    // Returns as many parts as there may be. q: [batch, tokens, all heads, dim], keys: [parts, batch, rows, key heads
    // of a part, dim].
    static Parts of(const ContextAttributes& attributes, const ffi::AnyBuffer& q, const ffi::AnyBuffer& keys) {
        check_rank("q", q, 4);
        check_rank("keys", keys, 5);
        const Shape shape = shape_of(q);
        const int64_t count = to_int("num_parts", attributes.num_parts, 1), key_heads = keys.dimensions()[3];
        check(shape[2] % count == 0, "num_parts must divide the heads ", shape[2], ", got ", count);
        check_shape("keys", keys, {count, shape[0], attributes.output_rows, key_heads, shape[3]});
        check(shape[1] == attributes.input_rows and attributes.input_rows <= attributes.output_rows,
              "q must have the input_rows ", attributes.input_rows, ", and there must be no fewer output_rows, got ",
              shape[1], " and ", attributes.output_rows);
        return {count, shape[0], shape[1], attributes.output_rows, shape[2] / count, key_heads};
    }

    // Returns as many parts or fewer, whose number divides that of the heads.
    Parts with_count(int64_t fewer) const {
        check(1 <= fewer and fewer <= count and key_heads * count % fewer == 0, "there must be 1 to ", count,
              " parts, whose number divides ", key_heads * count, " key heads, got ", fewer);
        return {fewer, batch, tokens, rows, heads * count / fewer, key_heads * count / fewer, are_within_host,
                have_native_peers};
    }

    // Returns a part of [batch, tokens, all heads] or [batch, tokens, all heads, dim].
    ffi::AnyBuffer of_queries(Views& views, const ffi::AnyBuffer& whole, int64_t part) const {
        const Shape shape = shape_of(whole);
        return shape.size() == 3 ? views.add(whole, part * heads, {batch, tokens, heads})
                                 : views.add(whole, part * heads * shape[3], {batch, tokens, heads, shape[3]});
    }
    // Returns a part of an array of all parts.
    ffi::AnyBuffer of_keys(Views& views, const ffi::AnyBuffer& whole, int64_t part) const {
        const Shape shape = shape_of(whole);
        return views.add(whole, first(shape, part), {batch, shape[2], key_heads, shape[4]});
    }
    // Returns the first of the rank's own keys or values of a part, which are rows of all key heads. `all` has others.
    const void* own_keys(const char* name, const ffi::AnyBuffer& own, const ffi::AnyBuffer& all, int64_t part) const {
        const int64_t dim = shape_of(all)[4], element_bytes = static_cast<int64_t>(ByteWidth(all.element_type()));
        check_buffer(name, own, {batch, tokens, key_heads * count, dim}, all.element_type());
        return data_of<const char>(name, own, 16) + part * key_heads * dim * element_bytes;
    }
    // Returns the heads of a part of the rank's own keys, [batch, tokens, all key heads, dim], as rows that travel. They
    // lie apart, with the other heads between them: it is a view for casts whose input_pitch is the number of parts.
    ffi::AnyBuffer of_own_rows(Views& views, const ffi::AnyBuffer& own, int64_t part) const {
        const int64_t width = key_heads * shape_of(own)[3];
        return views.add(own, part * width, {batch, tokens, width});
    }
    // Returns a part of an array of all parts as rows that travel, or its first rows.
    ffi::AnyBuffer of_rows(Views& views, const ffi::AnyBuffer& whole, int64_t part) const {
        return of_rows(views, whole, part, shape_of(whole)[2]);
    }
    ffi::AnyBuffer of_rows(Views& views, const ffi::AnyBuffer& whole, int64_t part, int64_t num_rows) const {
        const Shape shape = shape_of(whole);
        return views.add(whole, first(shape, part), {batch, num_rows, key_heads * shape[4]});
    }

private:
    int64_t first(const Shape& shape, int64_t part) const { return part * batch * shape[2] * key_heads * shape[4]; }
};

}  // namespace jaxmagi
