#include "csrc/attention/sm90/backward/backward.h"
#include "csrc/attention/sm90/forward/forward.h"
#include "xla_ffi/attention_cuda_handler.h"

namespace jaxmagi {
namespace {

struct TileSchedule {
    static constexpr const char* kTarget = "jaxmagi_attention_tile_schedule";

    struct Attributes {
        int64_t q_len, kv_len, own_len;
        bool by_keys;
        int64_t dim, v_dim;
    };
    struct Operands { ffi::AnyBuffer bands; };
    struct Results { ffi::AnyBuffer sorted, tiles, workspace; };

    static sm90::TileScheduleParams to_params(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                              const Attributes& attributes) {
        const auto [bands] = decode_buffers<Operands>(args);
        const auto [sorted, tiles, workspace] = decode_buffers<Results>(rets);
        check_type("bands", bands, ffi::S32);
        check_rank("bands", bands, 3);
        const Shape shape = shape_of(bands);
        check(shape[2] == 6, "bands must have shape [num_masks, capacity, 6], got ", shape);
        const bool by_keys = attributes.by_keys;
        const sm90::TileShape tile = find_tile(by_keys ? sm90::backward_tile : sm90::forward_tile,
                                               to_int("dim", attributes.dim, 1), to_int("v_dim", attributes.v_dim, 1));
        const int q_len = to_int("q_len", attributes.q_len), kv_len = to_int("kv_len", attributes.kv_len);
        const int length = by_keys ? kv_len : q_len, tile_rows = by_keys ? tile.keys : tile.rows;
        const sm90::TileScheduleParams params{
            .bands = data_of<const int32_t>("bands", bands, 2 * sizeof(int32_t)),
            .num_masks = to_int("the number of masks", shape[0], 1),
            .capacity = to_int("the number of bands", shape[1]),
            .q_len = q_len,
            .kv_len = kv_len,
            .own_len = to_int("own_len", attributes.own_len, 0, attributes.kv_len),
            .by_keys = by_keys,
            .tile_rows = tile_rows,
            .block_keys = by_keys ? tile.rows : tile.keys,
            .num_tiles = num_tiles_of(tiles, length, tile_rows, by_keys),
            .sorted = data_of<sm90::ScheduledBand>("sorted", sorted),
            .tiles = data_of<sm90::ScheduledTile>("tiles", tiles),
            .workspace = data_of<uint64_t>("workspace", workspace, alignof(sm90::ScheduledTile))};
        const int64_t words =
            sm90::tile_schedule_workspace_words(params.num_masks, params.capacity, params.num_tiles);
        check_buffer("sorted", sorted, {shape[0], shape[1], 8}, ffi::S32);
        check_buffer("tiles", tiles, {shape[0], params.num_tiles, 8}, ffi::S32);
        check_buffer("workspace", workspace, {words, 2}, ffi::S32);
        return params;
    }

    static cudaError_t preload(const sm90::TileScheduleParams&) { return sm90::preload_tile_schedule(); }
    static constexpr auto launch = sm90::make_tile_schedule;
};

}  // namespace
}  // namespace jaxmagi

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxmagi::TileSchedule::Attributes, StructMember<int64_t>("q_len"),
                                      StructMember<int64_t>("kv_len"), StructMember<int64_t>("own_len"),
                                      StructMember<bool>("by_keys"), StructMember<int64_t>("dim"),
                                      StructMember<int64_t>("v_dim"));

jaxmagi::CudaHandlers jaxmagi::attention_tile_schedule_cuda() {
    return cuda_handlers<TileSchedule>();
}
