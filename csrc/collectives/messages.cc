#include "csrc/collectives/messages.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "csrc/common/hash.h"

namespace jaxmagi::collectives {
namespace {

// Messages of this size take their bytes' time: each costs NCCL and the network as long as some 100 KB to 1 MB do, by
// sockets (docs/log/hosts.md). Smaller ones are joined, which costs a copy in the memory of the device.
constexpr int64_t kLargeMessageBytes = 8 << 20;

// --- pairs ---

struct Entry {
    int peer, index, slot, length;
    RowRange range;
};

using Numbers = std::initializer_list<std::pair<const char*, int>>;

// Throws unless `fits`, with the words of the kernels that check the same (checks.cuh).
void check_fits(bool fits, const TransferShape& shape, Numbers entry) {
    if (fits)
        return;
    std::string text;
    for (const auto& [name, number] : entry)
        text += (text.empty() ? "" : ", ") + std::string(name) + " " + std::to_string(number);
    throw std::invalid_argument("rank " + std::to_string(shape.rank) + " has a spec with the entry (" + text +
                                "), which does not fit " + std::to_string(shape.size) + " ranks, " +
                                std::to_string(shape.input_rows) + " input rows, " +
                                std::to_string(shape.output_rows) + " output rows and " +
                                std::to_string(shape.pair_rows) + " rows of a pair");
}

bool is_peer(int peer, const TransferShape& shape) {
    return 0 <= peer and peer < shape.size;
}

RowRange range_of(const Send& send, int index, const TransferShape& shape) {
    const auto& [peer, slot, row, length, peer_row] = send;
    const bool fits = is_peer(peer, shape) and row >= 0 and peer_row >= 0 and slot >= 0 and
                      length <= shape.input_rows - row and length <= shape.output_rows - peer_row and
                      length <= shape.pair_rows - slot;
    check_fits(fits, shape,
               {{"dst_rank", peer}, {"slot", slot}, {"row", row}, {"length", length}, {"dst_row", peer_row}});
    return {int64_t{index} * shape.input_stride + row, int64_t{index} * shape.output_rows + peer_row, length};
}

RowRange range_of(const Receive& receive, int index, const TransferShape& shape) {
    const auto& [peer, slot, row, length] = receive;
    const bool fits = is_peer(peer, shape) and row >= 0 and slot >= 0 and length <= shape.output_rows - row and
                      length <= shape.pair_rows - slot;
    check_fits(fits, shape, {{"src_rank", peer}, {"slot", slot}, {"row", row}, {"length", length}});
    const int64_t output_row = int64_t{index} * shape.output_rows + row;
    return {output_row, output_row, length};
}

void check_place(int length, int length_before, int64_t place, const TransferShape& shape) {
    if (length < 0 or (length > 0 and place > 0 and length_before == 0))
        throw std::invalid_argument("rank " + std::to_string(shape.rank) +
                                    " has a spec with an entry of length " + std::to_string(length) + " in place " +
                                    std::to_string(place) + ": those in use come first, unused ones have length 0");
}

// Asks about each rank once: tables may have thousands of entries.
std::vector<bool> remote_peers(const TransferShape& shape, const IsRemote& is_remote) {
    std::vector<bool> remote(shape.size);
    for (int peer = 0; peer < shape.size; ++peer)
        remote[peer] = is_remote(peer);
    return remote;
}

// Returns the entries with remote peers, by peer, transfer of the batch, and slot.
template <typename TableEntry>
std::vector<Entry> remote_entries(std::span<const TableEntry> table, const TransferShape& shape,
                                  const IsRemote& is_remote) {
    const std::vector<bool> remote = remote_peers(shape, is_remote);
    std::vector<Entry> entries;
    entries.reserve(table.size());
    for (int64_t i = 0; i < int64_t{shape.batch} * shape.entries; ++i) {
        const TableEntry& entry = table[i];
        const int index = static_cast<int>(i / shape.entries);
        check_place(entry.length, i > 0 ? table[i - 1].length : 0, i % shape.entries, shape);
        if (entry.length == 0)
            continue;
        const RowRange range = range_of(entry, index, shape);
        if (remote[entry.peer])
            entries.push_back({entry.peer, index, entry.slot, entry.length, range});
    }
    const auto place = [](const Entry& each) { return std::tuple(each.peer, each.index, each.slot); };
    if (not std::ranges::is_sorted(entries, {}, place))  // the sends of a single transfer are sorted
        std::ranges::sort(entries, {}, place);
    return entries;
}

void check_slot(const Entry& entry, int slot) {
    if (entry.slot != slot)
        throw std::invalid_argument("a spec has an entry for rank " + std::to_string(entry.peer) +
                                    " with slot " + std::to_string(entry.slot) + ", but the rows before it fill " +
                                    std::to_string(slot) + " slots");
}

std::vector<Pair> to_pairs(const std::vector<Entry>& entries) {
    std::vector<Pair> pairs;
    int index = 0, slot = 0;
    for (const Entry& entry : entries) {
        const bool is_new = pairs.empty() or pairs.back().peer != entry.peer;
        if (is_new)
            pairs.push_back({entry.peer, 0, {}});
        if (is_new or index != entry.index)
            slot = 0;
        check_slot(entry, slot);
        index = entry.index;
        slot += entry.length;
        pairs.back().ranges.push_back(entry.range);
        pairs.back().rows += entry.length;
    }
    return pairs;
}

// --- messages ---

bool are_large(size_t count, int64_t bytes) {
    return count == 1 or bytes >= static_cast<int64_t>(count) * kLargeMessageBytes;
}

// Returns a predicate for two ranges: whether the second does not begin, by the given rows, where the first ends.
auto leaves_gap(int64_t RowRange::*row) {
    return [row](const RowRange& before, const RowRange& range) { return before.*row + before.length != range.*row; };
}

// Returns the ends of stretches of ranges whose output rows are consecutive, as indices.
std::vector<size_t> ends_of_stretches(const std::vector<RowRange>& ranges) {
    std::vector<size_t> ends;
    for (auto at = ranges.begin(); at != ranges.end();) {
        at = std::ranges::adjacent_find(at, ranges.end(), leaves_gap(&RowRange::output_row));
        at += at != ranges.end();  // it was the last range before the gap
        ends.push_back(at - ranges.begin());
    }
    return ends;
}

// Returns the ends of the messages of each array, whose rows have `row_bytes` on average, as indices of ranges. Uses
// only what both ranks know: lengths and output rows.
std::vector<size_t> cut(Kind kind, const Pair& pair, int64_t row_bytes) {
    const int64_t bytes = pair.rows * row_bytes;
    const size_t count = pair.ranges.size();
    if (kind == Kind::kCast and are_large(count, bytes)) {
        std::vector<size_t> ends(count);
        for (size_t i = 0; i < count; ++i)
            ends[i] = i + 1;
        return ends;
    }
    std::vector<size_t> ends = ends_of_stretches(pair.ranges);
    if (are_large(ends.size(), bytes))
        return ends;
    return {count};
}

int64_t rows_of(std::span<const RowRange> ranges) {
    int64_t rows = 0;
    for (const RowRange& range : ranges)
        rows += range.length;
    return rows;
}

// Returns a hash of what both ranks of a pair know of its ranges.
uint64_t hash_of(const Pair& pair) {
    Hash hash;
    for (const RowRange& range : pair.ranges)
        for (const int64_t number : {range.output_row, range.length})
            hash.add(number);
    return hash.value();
}

// Appends messages, and the copies that bring their rows together where the rank's arrays have them apart.
class MessageList {
public:
    MessageList(bool is_all_staged, int64_t staging_offset)
        : is_all_staged_(is_all_staged), begin_(staging_offset), end_(staging_offset) {}

    void add(int peer, std::span<const RowRange> ranges, int array, int64_t row_bytes) {
        const int64_t bytes = rows_of(ranges) * row_bytes;
        const Place staging{Place::kStaging, end_};
        const bool lie_apart = std::ranges::adjacent_find(ranges, leaves_gap(&RowRange::row)) != ranges.end();
        if (not is_all_staged_ and not lie_apart) {
            traffic_.messages.push_back({peer, {array, ranges.front().row * row_bytes}, bytes});
            return;
        }
        traffic_.messages.push_back({peer, staging, bytes});
        if (not is_all_staged_)
            for (const RowRange& range : ranges) {
                const int64_t range_bytes = range.length * row_bytes;
                traffic_.copies.push_back({{array, range.row * row_bytes}, {Place::kStaging, end_}, range_bytes});
                end_ += range_bytes;
            }
        end_ = staging.offset + bytes;
    }

    Traffic finish(std::vector<PairHeader> headers) && {
        traffic_.headers = std::move(headers);
        traffic_.staging_bytes = end_ - begin_;
        return std::move(traffic_);
    }

private:
    const bool is_all_staged_;
    const int64_t begin_;
    int64_t end_;
    Traffic traffic_;
};

}  // namespace

std::vector<Pair> pairs_of(std::span<const Send> sends, const TransferShape& shape, const IsRemote& is_remote) {
    return to_pairs(remote_entries(sends, shape, is_remote));
}

std::vector<Pair> pairs_of(std::span<const Receive> receives, const TransferShape& shape, const IsRemote& is_remote) {
    return to_pairs(remote_entries(receives, shape, is_remote));
}

Traffic traffic_of(const Call& call, Direction direction, std::span<const Pair> pairs, std::span<const int> row_bytes,
                   int64_t staging_offset) {
    int64_t all_bytes = 0;
    for (const int bytes : row_bytes)
        all_bytes += bytes;
    const bool is_outgoing = direction == Direction::kOutgoing;
    std::vector<std::vector<size_t>> cuts;
    std::vector<PairHeader> headers;
    for (const Pair& pair : pairs) {
        cuts.push_back(cut(call.kind, pair, all_bytes / static_cast<int64_t>(row_bytes.size())));
        headers.push_back({.call_hash = call.hash,
                           .call = call.number,
                           .rows = static_cast<uint64_t>(pair.rows),
                           .range_hash = hash_of(pair),
                           .source = is_outgoing ? call.rank : pair.peer,
                           .destination = is_outgoing ? pair.peer : call.rank});
    }
    MessageList list(call.kind == Kind::kReduce and not is_outgoing, staging_offset);
    for (int array = 0; array < static_cast<int>(row_bytes.size()); ++array)
        for (size_t i = 0; i < pairs.size(); ++i)
            for (size_t begin = 0; const size_t end : cuts[i]) {
                list.add(pairs[i].peer, std::span(pairs[i].ranges).subspan(begin, end - begin), array,
                         row_bytes[array]);
                begin = end;
            }
    return std::move(list).finish(std::move(headers));
}

std::vector<int64_t> staged_rows(std::span<const Pair> sent, const TransferShape& shape) {
    std::vector<int64_t> first(static_cast<size_t>(shape.batch) * shape.size);
    int64_t rows = 0;
    for (const Pair& pair : sent)
        for (int64_t last = -1; const RowRange& range : pair.ranges) {
            const int64_t index = range.row / shape.input_stride;
            if (index != last)
                first[index * shape.size + pair.peer] = rows;
            last = index;
            rows += range.length;
        }
    return first;
}

}  // namespace jaxmagi::collectives
