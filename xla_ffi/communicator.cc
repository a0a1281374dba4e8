#include "xla_ffi/communicator.h"

#include "xla_ffi/checks.h"

namespace jaxmagi {
namespace {

// XLA's own collectives have the ids 0 and 1. With another id ("magi" in ASCII), no operation of XLA's comes between
// ours on the same communicator.
constexpr int64_t kCommunicationId = 0x6d616769;

std::vector<XLA_FFI_ReplicaGroup> replica_groups(DeviceIds ids, int64_t group_size) {
    const int64_t num_ids = static_cast<int64_t>(ids.size());
    check(group_size > 0 and num_ids > 0 and num_ids % group_size == 0,
          "groups must hold a positive multiple of group_size devices, got ", num_ids, " devices and group_size ",
          group_size);
    std::vector<XLA_FFI_ReplicaGroup> groups;
    for (int64_t first = 0; first < num_ids; first += group_size)
        groups.push_back({ids.begin() + first, static_cast<size_t>(group_size)});
    return groups;
}

void check_extension(const CollectivesContext& context) {
    constexpr size_t kNeeded = XLA_FFI_STRUCT_SIZE(XLA_FFI_Collectives_Extension, get_communicator);
    const size_t size = context.extension->extension_base.struct_size;
    if (size < kNeeded)
        throw std::runtime_error("XLA's collectives extension has " + std::to_string(size) +
                                 " bytes and lends no communicators, for which it needs " + std::to_string(kNeeded));
}

// Calls a function of the extension for groups. Throws if it fails.
template <typename Arguments, typename Function>
Arguments call(const CollectivesContext& context, Function XLA_FFI_Collectives_Extension::*function, size_t struct_size,
               DeviceIds ids, int64_t group_size, const std::string& what) {
    check_extension(context);
    const auto groups = replica_groups(ids, group_size);
    Arguments arguments{};
    arguments.struct_size = struct_size;
    arguments.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
    arguments.groups = groups.data();
    arguments.num_groups = groups.size();
    arguments.communication_id = kCommunicationId;
    if (XLA_FFI_Error* const error = (context.extension->*function)(context.extension, &arguments)) {
        const std::string message = xla::ffi::internal::GetErrorMessage(context.api, error);
        xla::ffi::internal::DestroyError(context.api, error);
        throw std::runtime_error(what + ": " + message);
    }
    return arguments;
}

}  // namespace

void request_communicator(const CollectivesContext& context, DeviceIds ids, int64_t group_size) {
    call<XLA_FFI_Communicator_Request_Args>(context, &XLA_FFI_Collectives_Extension::request_communicator,
                                            XLA_FFI_Communicator_Request_Args_STRUCT_SIZE, ids, group_size,
                                            "requesting a communicator from XLA");
}

nccl::Communicator get_communicator(const CollectivesContext& context, DeviceIds ids, int64_t group_size) {
    const auto found = call<XLA_FFI_Communicator_Get_Args>(
        context, &XLA_FFI_Collectives_Extension::get_communicator, XLA_FFI_Communicator_Get_Args_STRUCT_SIZE, ids,
        group_size, "getting the communicator from XLA");
    if (found.communicator == nullptr)
        throw std::runtime_error("XLA has no communicator for this device's group");
    return reinterpret_cast<nccl::Communicator>(found.communicator);
}

}  // namespace jaxmagi
