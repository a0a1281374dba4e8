#include "xla_ffi/collectives_groups.h"

#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "csrc/collectives/address_exchange.h"
#include "csrc/collectives/part_rows.h"
#include "csrc/collectives/remote_kernels.h"
#include "csrc/collectives/transfer_params.h"
#include "xla_ffi/cuda_checks.h"

namespace jaxmagi {
namespace {

using namespace collectives;

class KnownGroups {
public:
    Peers& connect(const GroupIds& group, const Bootstrap& bootstrap) {
        Peers& peers = connect_peers(current_ordinal(), bootstrap);
        const std::lock_guard lock(mutex_);
        if (not loaded_.contains(current_ordinal()))
            for (const auto preload : {preload_push, preload_pull, preload_remote_kernels, preload_part_rows,
                                       preload_address_exchange})
                check_cuda(preload(), "loading the kernels");
        loaded_.insert(current_ordinal());
        groups_[key(group)] = &peers;
        return peers;
    }

    Peers& get(const GroupIds& group) {
        const std::lock_guard lock(mutex_);
        return *groups_.at(key(group));
    }

private:
    using Key = std::tuple<int, int64_t, std::vector<int64_t>>;

    static Key key(const GroupIds& group) {
        return {current_ordinal(), group.size, {group.ids.begin(), group.ids.end()}};
    }

    std::mutex mutex_;
    std::map<Key, Peers*> groups_;
    std::set<int> loaded_;  // devices
};

KnownGroups& known_groups() {
    static auto* const groups = new KnownGroups;  // never destroyed: handlers may outlive main
    return *groups;
}

}  // namespace

Peers& connect_group(const GroupIds& group, const Bootstrap& bootstrap) {
    return known_groups().connect(group, bootstrap);
}

Peers& connected_group(const GroupIds& group) {
    return known_groups().get(group);
}

}  // namespace jaxmagi
