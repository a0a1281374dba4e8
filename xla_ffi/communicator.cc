#include "xla_ffi/communicator.h"

#include "xla_ffi/checks.h"

namespace jaxmagi {
namespace {

// Tells our communicators from those of XLA's collectives, which have 0 and 1: no call of XLA's comes between ours on
// the same communicator. "magi" in ASCII.
constexpr int64_t kCommunicationId = 0x6d616769;

std::vector<XLA_FFI_ReplicaGroup> replica_groups(DeviceIds ids, int64_t group_size) {
    const int64_t num_ids = static_cast<int64_t>(ids.size());
    check(group_size > 0 and num_ids > 0 and num_ids % group_size == 0,
          "groups must hold a positive multiple of group_size devices, got " + std::to_string(num_ids) +
              " devices and group_size " + std::to_string(group_size));
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

void check_error(const CollectivesContext& context, XLA_FFI_Error* error, const std::string& what) {
    if (error == nullptr)
        return;
    const std::string message = xla::ffi::internal::GetErrorMessage(context.api, error);
    xla::ffi::internal::DestroyError(context.api, error);
    throw std::runtime_error(what + ": " + message);
}

template <typename Arguments>
Arguments to_arguments(size_t struct_size, const std::vector<XLA_FFI_ReplicaGroup>& groups) {
    Arguments arguments{};
    arguments.struct_size = struct_size;
    arguments.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
    arguments.groups = groups.data();
    arguments.num_groups = groups.size();
    arguments.communication_id = kCommunicationId;
    return arguments;
}

}  // namespace

void request_communicator(const CollectivesContext& context, DeviceIds ids, int64_t group_size) {
    check_extension(context);
    const auto groups = replica_groups(ids, group_size);
    auto request =
        to_arguments<XLA_FFI_Communicator_Request_Args>(XLA_FFI_Communicator_Request_Args_STRUCT_SIZE, groups);
    check_error(context, context.extension->request_communicator(context.extension, &request),
                "requesting a communicator from XLA");
}

nccl::Communicator get_communicator(const CollectivesContext& context, DeviceIds ids, int64_t group_size) {
    check_extension(context);
    const auto groups = replica_groups(ids, group_size);
    auto query = to_arguments<XLA_FFI_Communicator_Get_Args>(XLA_FFI_Communicator_Get_Args_STRUCT_SIZE, groups);
    check_error(context, context.extension->get_communicator(context.extension, &query),
                "getting the communicator from XLA");
    if (query.communicator == nullptr)
        throw std::runtime_error("XLA has no communicator for this device's group");
    return reinterpret_cast<nccl::Communicator>(query.communicator);
}

}  // namespace jaxmagi
