// Tests which messages ranks exchange, without CUDA and NCCL: up to 1024 ranks list theirs, and memory is copied as
// NCCL would move it.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/collectives/messages.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::collectives;

using Bytes = std::vector<char>;

// Ranges of up to `max_length` rows from random ranks, at the output rows of each rank. The rows of a source keep their
// order where `in_order` holds, as in plans, and are anywhere otherwise.
struct Pattern {
    const char* name;
    int ranks, per_host, batch, ranges, max_length;
    std::vector<int> row_bytes;
    bool in_order;
};

struct Range {
    int index, source, row, destination, destination_row, length;
};

struct Rank {
    std::vector<Send> sends;
    std::vector<Receive> receives;
    std::vector<Bytes> input, output;  // by array
};

class Simulation {
public:
    explicit Simulation(const Pattern& pattern)
        : pattern_(pattern), ranks_(pattern.ranks), random_(pattern.ranks + pattern.ranges) {
        shape_ = {.rank = 0,
                  .size = pattern.ranks,
                  .batch = pattern.batch,
                  .entries = 0,
                  .input_rows = 4 * pattern.max_length,
                  .output_rows = 2 * pattern.ranges * pattern.max_length,
                  .pair_rows = 2 * pattern.ranges * pattern.max_length,
                  .input_stride = 4 * pattern.max_length};
        for (int index = 0; index < pattern.batch; ++index)
            for (int rank = 0; rank < pattern.ranks; ++rank)
                draw_ranges(index, rank);
        make_tables();
        for (Rank& rank : ranks_)
            for (const int bytes : pattern.row_bytes) {
                rank.input.push_back(random_bytes(int64_t{shape_.batch} * shape_.input_rows * bytes));
                rank.output.push_back(random_bytes(int64_t{shape_.batch} * shape_.output_rows * bytes));
            }
    }

    // Moves the rows of a cast or of a reduction. Returns whether they arrive where they should, in messages that fit
    // each other, and nothing else moves.
    bool moves(Kind kind) {
        const bool is_cast = kind == Kind::kCast;
        list_traffic(kind);
        std::vector<Bytes> staging;
        for (int rank = 0; rank < pattern_.ranks; ++rank)
            staging.push_back(Bytes(outgoing_[rank].staging_bytes + incoming_[rank].staging_bytes));
        std::vector<Rank> after = ranks_;
        std::map<std::pair<int, int>, std::vector<Message>> sent, received;
        for (int rank = 0; rank < pattern_.ranks; ++rank) {
            auto& arrays = is_cast ? ranks_[rank].input : ranks_[rank].output;
            for (const StagedCopy& copy : outgoing_[rank].copies)
                std::memcpy(staging[rank].data() + copy.staging.offset,
                            arrays[copy.array.array].data() + copy.array.offset, copy.bytes);
            for (const Message& message : outgoing_[rank].messages)
                sent[{rank, message.peer}].push_back(message);
            for (const Message& message : incoming_[rank].messages)
                received[{message.peer, rank}].push_back(message);
        }
        const auto memory = [&](std::vector<Bytes>& arrays, int rank, const Place& place) {
            return (place.array == Place::kStaging ? staging[rank] : arrays[place.array]).data() + place.offset;
        };
        if (sent.size() != received.size())
            return false;
        for (const auto& [pair, messages] : sent) {
            const auto& others = received[pair];
            if (messages.size() != others.size())
                return false;
            for (size_t i = 0; i < messages.size(); ++i) {
                if (messages[i].bytes != others[i].bytes or messages[i].bytes == 0)
                    return false;
                auto& from = is_cast ? ranks_[pair.first].input : ranks_[pair.first].output;
                std::memcpy(memory(after[pair.second].output, pair.second, others[i].place),
                            memory(from, pair.first, messages[i].place), messages[i].bytes);
            }
        }
        for (int rank = 0; rank < pattern_.ranks; ++rank)
            for (const StagedCopy& copy : incoming_[rank].copies)
                std::memcpy(after[rank].output[copy.array.array].data() + copy.array.offset,
                            staging[rank].data() + copy.staging.offset, copy.bytes);
        return have_equal_headers() and move_only_what_is_needed() and
               (is_cast ? have_outputs(after) : have_incoming(staging));
    }

    int64_t staged_bytes() const {
        int64_t bytes = 0;
        for (int rank = 0; rank < pattern_.ranks; ++rank)
            bytes += outgoing_[rank].staging_bytes + incoming_[rank].staging_bytes;
        return bytes;
    }

private:
    bool is_remote(int rank, int peer) const { return rank / pattern_.per_host != peer / pattern_.per_host; }
    int draw(int least, int most) { return std::uniform_int_distribution(least, most)(random_); }

    Bytes random_bytes(int64_t count) {
        Bytes bytes(count);
        for (char& byte : bytes)
            byte = static_cast<char>(random_());
        return bytes;
    }

    void draw_ranges(int index, int destination) {
        const int most_sources = std::min(pattern_.ranks, 4);
        int to = 0, source = draw(0, pattern_.ranks - 1);
        for (int i = draw(0, 3) == 0 ? pattern_.ranges : 0; i < pattern_.ranges; ++i) {
            if (not pattern_.in_order)
                source = (destination + draw(0, most_sources - 1) * pattern_.per_host) % pattern_.ranks;
            else if (draw(0, pattern_.ranges / 2) == 0)
                source = (source + 1) % pattern_.ranks;
            const int length = draw(1, pattern_.max_length), row = draw(0, shape_.input_rows - length);
            to += pattern_.in_order ? 0 : draw(0, 1);
            ranges_.push_back({index, source, row, destination, to, length});
            to += length;
        }
    }

    // Makes tables with the slots of each pair in the order of the ranges, and pads them.
    void make_tables() {
        std::vector<std::vector<std::vector<Send>>> sends(pattern_.ranks);
        std::vector<std::vector<std::vector<Receive>>> receives(pattern_.ranks);
        for (int rank = 0; rank < pattern_.ranks; ++rank) {
            sends[rank].resize(pattern_.batch);
            receives[rank].resize(pattern_.batch);
        }
        std::map<std::tuple<int, int, int>, int> slots;
        for (const Range& range : ranges_) {
            int& slot = slots[{range.index, range.source, range.destination}];
            sends[range.source][range.index].push_back(
                {range.destination, slot, range.row, range.length, range.destination_row});
            receives[range.destination][range.index].push_back(
                {range.source, slot, range.destination_row, range.length});
            slot += range.length;
        }
        size_t entries = 1;
        for (int rank = 0; rank < pattern_.ranks; ++rank)
            for (int index = 0; index < pattern_.batch; ++index)
                entries = std::max({entries, sends[rank][index].size(), receives[rank][index].size()});
        shape_.entries = static_cast<int>(entries);
        for (int rank = 0; rank < pattern_.ranks; ++rank)
            for (int index = 0; index < pattern_.batch; ++index) {
                sends[rank][index].resize(entries);
                receives[rank][index].resize(entries);
                append(ranks_[rank].sends, sends[rank][index]);
                append(ranks_[rank].receives, receives[rank][index]);
            }
    }

    template <typename T> static void append(std::vector<T>& to, const std::vector<T>& from) {
        to.insert(to.end(), from.begin(), from.end());
    }

    void list_traffic(Kind kind) {
        first_rows_.clear();
        outgoing_.clear();
        incoming_.clear();
        for (int rank = 0; rank < pattern_.ranks; ++rank) {
            const auto remote = [&](int peer) { return is_remote(rank, peer); };
            const auto sent = pairs_of(std::span<const Send>(ranks_[rank].sends), shape_, remote);
            const auto received = pairs_of(std::span<const Receive>(ranks_[rank].receives), shape_, remote);
            const bool is_cast = kind == Kind::kCast;
            const Call call{kind, rank, 1234, 1};
            const auto &sources = is_cast ? sent : received, &destinations = is_cast ? received : sent;
            outgoing_.push_back(traffic_of(call, Direction::kOutgoing, sources, pattern_.row_bytes, 0));
            incoming_.push_back(traffic_of(call, Direction::kIncoming, destinations, pattern_.row_bytes,
                                           outgoing_.back().staging_bytes));
            first_rows_.push_back(staged_rows(sent, shape_));
        }
    }

    bool have_equal_headers() const {
        using Header = std::tuple<int, int, uint64_t, uint64_t>;
        std::set<Header> sent, expected;
        for (int rank = 0; rank < pattern_.ranks; ++rank) {
            for (const PairHeader& header : outgoing_[rank].headers)
                sent.insert({rank, header.destination, header.rows, header.range_hash});
            for (const PairHeader& header : incoming_[rank].headers)
                expected.insert({header.source, rank, header.rows, header.range_hash});
        }
        return sent == expected;
    }

    bool move_only_what_is_needed() const {
        int64_t row_bytes = 0, needed = 0, moved = 0;
        for (const int bytes : pattern_.row_bytes)
            row_bytes += bytes;
        for (const Range& range : ranges_)
            needed += is_remote(range.source, range.destination) ? range.length * row_bytes : 0;
        for (const Traffic& traffic : outgoing_)
            for (const Message& message : traffic.messages)
                moved += message.bytes;
        return needed == moved;
    }

    // Calls same(array, bytes of a row, byte of the input, byte of the output) for each remote range and array.
    template <typename Same> bool all_ranges(Same same) const {
        for (const Range& range : ranges_)
            for (size_t array = 0; array < pattern_.row_bytes.size(); ++array) {
                const int64_t bytes = pattern_.row_bytes[array];
                const int64_t input = (int64_t{range.index} * shape_.input_rows + range.row) * bytes;
                const int64_t output = (int64_t{range.index} * shape_.output_rows + range.destination_row) * bytes;
                if (is_remote(range.source, range.destination) and not same(range, array, bytes, input, output))
                    return false;
            }
        return true;
    }

    bool have_outputs(const std::vector<Rank>& after) const {
        return all_ranges([&](const Range& range, size_t array, int64_t bytes, int64_t input, int64_t output) {
            return std::memcmp(after[range.destination].output[array].data() + output,
                               ranks_[range.source].input[array].data() + input, range.length * bytes) == 0;
        });
    }

    // The rows of a reduction lie in staging memory where the kernel that sums looks for them.
    bool have_incoming(const std::vector<Bytes>& staging) const {
        std::map<std::tuple<int, int, int>, int64_t> slots;
        std::map<std::pair<int, size_t>, int64_t> begins;
        for (int rank = 0; rank < pattern_.ranks; ++rank) {
            int64_t rows = 0, offset = outgoing_[rank].staging_bytes;
            for (const PairHeader& header : incoming_[rank].headers)
                rows += static_cast<int64_t>(header.rows);
            for (size_t array = 0; array < pattern_.row_bytes.size(); ++array) {
                begins[{rank, array}] = offset;
                offset += rows * pattern_.row_bytes[array];
            }
        }
        return all_ranges([&](const Range& range, size_t array, int64_t bytes, int64_t, int64_t output) {
            int64_t& slot = slots[{range.index, range.source, range.destination}];
            const int64_t first = first_rows_[range.source][range.index * pattern_.ranks + range.destination];
            const int64_t at = begins[{range.source, array}] + (first + slot) * bytes;
            slot += array + 1 == pattern_.row_bytes.size() ? range.length : 0;
            return std::memcmp(staging[range.source].data() + at,
                               ranks_[range.destination].output[array].data() + output, range.length * bytes) == 0;
        });
    }

    const Pattern pattern_;
    TransferShape shape_;
    std::vector<Rank> ranks_;
    std::mt19937 random_;
    std::vector<Range> ranges_;
    std::vector<Traffic> outgoing_, incoming_;
    std::vector<std::vector<int64_t>> first_rows_;
};

bool all_good = true;

void report(const std::string& name, bool is_good) {
    std::printf("%s %s\n", is_good ? "ok  " : "FAIL", name.c_str());
    all_good &= is_good;
}

void check_pattern(const Pattern& pattern, bool is_cast_in_place) {
    Simulation simulation(pattern);
    report(std::string("cast, ") + pattern.name, simulation.moves(Kind::kCast));
    if (is_cast_in_place)
        report(std::string("nothing of a cast is staged, ") + pattern.name, simulation.staged_bytes() == 0);
    report(std::string("reduction, ") + pattern.name, simulation.moves(Kind::kReduce));
}

template <typename Function> void check_throws(const char* name, Function function) {
    bool has_thrown = false;
    try {
        function();
    } catch (const std::invalid_argument&) {
        has_thrown = true;
    }
    report(name, has_thrown);
}

void check_errors() {
    const TransferShape shape{0, 2, 1, 2, 10, 8, 8, 10};
    const auto all = [](int) { return true; };
    const auto list = [&](std::vector<Send> sends) { return pairs_of(std::span<const Send>(sends), shape, all); };
    check_throws("slots with a gap", [&] { list({{1, 0, 0, 2, 0}, {1, 3, 2, 2, 2}}); });
    check_throws("slots that do not begin with 0", [&] { list({{1, 1, 0, 2, 0}, {}}); });
    check_throws("an unknown rank", [&] { list({{2, 0, 0, 2, 0}, {}}); });
    check_throws("rows beyond the input", [&] { list({{1, 0, 9, 2, 0}, {}}); });
    check_throws("rows beyond the output", [&] { list({{1, 0, 0, 2, 7}, {}}); });
    check_throws("an unused entry first", [&] { list({{}, {1, 0, 0, 2, 0}}); });
    check_throws("a negative length", [&] { list({{1, 0, 0, -2, 0}, {}}); });
}

// Ranks that cut the same rows otherwise have other hashes.
void check_hashes() {
    const TransferShape shape{0, 2, 1, 2, 10, 10, 10, 10};
    const auto all = [](int) { return true; };
    const auto hash = [&](std::vector<Receive> receives) {
        const auto pairs = pairs_of(std::span<const Receive>(receives), shape, all);
        const Call call{Kind::kCast, 0, 0, 1};
        return traffic_of(call, Direction::kOutgoing, pairs, std::vector<int>{4 << 20}, 0).headers[0].range_hash;
    };
    const uint64_t one = hash({{1, 0, 0, 5}, {}}), two = hash({{1, 0, 0, 2}, {1, 2, 2, 3}});
    report("other ranges have another hash", one != two and two != hash({{1, 0, 0, 3}, {1, 3, 3, 2}}));
}

int run() {
    check_pattern({"two ranks", 2, 1, 1, 12, 9, {16, 48}, false}, false);
    check_pattern({"two ranks in order", 2, 1, 1, 12, 9, {16, 48}, true}, false);
    check_pattern({"large rows", 2, 1, 1, 5, 1, {8 << 20}, false}, true);
    check_pattern({"a batch", 6, 2, 3, 30, 7, {16, 32, 80}, false}, false);
    check_pattern({"a batch in order", 6, 2, 3, 30, 7, {16, 32, 80}, true}, false);
    check_pattern({"128 ranks", 128, 8, 1, 40, 6, {16, 48}, true}, false);
    check_pattern({"1024 ranks", 1024, 8, 1, 12, 4, {16}, false}, false);
    check_pattern({"1024 ranks in order", 1024, 8, 2, 12, 4, {16}, true}, false);
    check_errors();
    check_hashes();
    return all_good ? 0 : 1;
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    return jaxmagi::test::run();
}
