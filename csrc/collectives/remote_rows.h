#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>
#include <vector>

#include "csrc/collectives/messages.h"
#include "csrc/collectives/peers.h"
#include "csrc/collectives/remote_kernels.h"
#include "csrc/collectives/transfer_params.h"

// A rank's part of a transfer with its remote peers, over NCCL. Only the tables say which rows these are, and NCCL
// takes counts from the host. So the host waits for the tables and reads them, once a transfer, and loses its lead over
// the device: it reads, lists messages, and allocates before anything of the transfer is launched.
//
// Unless an earlier transfer has had the same tables, the ranks of each pair first exchange headers, and compare them
// before any row moves. Ranks whose tables disagree end with an error, and neither write nor read rows that were meant
// otherwise. A rank that expects nothing from another one does not hear from it; then that one waits until its time
// limit, and a later call does not take the old header.

namespace jaxmagi::collectives {

class RemoteRows {
public:
    struct Context {
        std::string call;  // the call and the rank that makes it, for messages
        std::function<bool(int peer)> is_remote;
        // Called until the transfer has ended: what it refers to must live as long as the group.
        std::function<std::string(int peer)> name_of;
        std::function<void*(size_t bytes)> allocate;   // device memory that stays until the transfer has ended
        bool compares_tables;  // false if an earlier transfer has done so with these tables
    };

    // Reads the tables when `program` has computed them, and allocates what the transfer needs. Throws
    // std::invalid_argument if they do not fit the transfer.
    RemoteRows(const TransferParams& params, const Context& context, cudaStream_t program);

    bool is_empty() const { return outgoing_.headers.empty() and incoming_.headers.empty(); }

    // Tells a group reduce where its incoming rows will be.
    void add_to(TransferParams& params) const;

    // The three steps of the transfer, in one stream: copies the rows that do not lie as they are sent, exchanges
    // headers, if tables are to be compared, and rows, and copies the rows that do not lie as they have come.
    void pack(cudaStream_t stream) const;
    void exchange(const Peers& peers, cudaStream_t stream) const;
    void unpack(cudaStream_t stream) const;

    // The messages and their memory, for tests that have no NCCL.
    const Traffic& outgoing() const { return outgoing_; }
    const Traffic& incoming() const { return incoming_; }
    char* outgoing_data(const Message& message) const { return resolve(message.place, sources_); }
    char* incoming_data(const Message& message) const { return resolve(message.place, destinations_); }

private:
    struct Part {  // of the device memory
        size_t offset, count;
    };

    void list_traffic(const TransferParams& params, const IsRemote& is_remote, cudaStream_t program);
    void reserve_memory();
    void upload(const std::vector<PairText>& texts, cudaStream_t program) const;
    std::vector<CopiedBytes> resolve_copies(const Traffic& traffic, bool to_staging) const;
    char* resolve(const Place& place, const std::vector<char*>& arrays) const;
    void exchange_headers(const Peers& peers, cudaStream_t stream) const;
    std::function<std::string()> absent_ranks_finder() const;
    template <typename T> T* at(const Part& part) const { return reinterpret_cast<T*>(memory_ + part.offset); }
    template <typename T> Part reserve(size_t count);

    Kind kind_;
    uint64_t timeout_ms_;
    bool compares_tables_;
    std::string description_;  // the call, and the ranks with which rows are exchanged
    std::function<std::string(int peer)> name_of_;
    Traffic outgoing_, incoming_;
    std::vector<char*> sources_, destinations_;  // arrays of this rank
    std::vector<int64_t> incoming_offsets_, incoming_rows_;

    char* memory_ = nullptr;
    size_t bytes_ = 0;
    // Uploaded parts come first.
    Part out_headers_{}, expected_headers_{}, texts_{}, packed_{}, unpacked_{}, first_rows_{};
    Part in_headers_{}, staging_{};
};

}  // namespace jaxmagi::collectives
