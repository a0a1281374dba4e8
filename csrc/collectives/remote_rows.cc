#include "csrc/collectives/remote_rows.h"

#include <algorithm>
#include <utility>

#include "csrc/collectives/nccl_watchdog.h"
#include "csrc/collectives/statistics.h"
#include "csrc/common/check_cuda.h"
#include "csrc/common/math.h"

namespace jaxmagi::collectives {
namespace {

constexpr size_t kAlignment = 256, kMostNamed = 8;

// Returns a table that is on the device. The host waits for the stream before it copies to pageable memory, since a
// copy that has to wait may keep other threads from the device.
template <typename Entry> std::vector<Entry> read_table(const Entry* table, int64_t count, cudaStream_t stream) {
    std::vector<Entry> entries(count);
    check_cuda(cudaMemcpyAsync(entries.data(), table, count * sizeof(Entry), cudaMemcpyDeviceToHost, stream),
               "reading a spec");
    return entries;
}

// Cuts a copy into pieces that are quick enough for one warp each.
void append_pieces(std::vector<CopiedBytes>& pieces, const char* from, char* to, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kMaxCopiedBytes)
        pieces.push_back({from + at, to + at, std::min(kMaxCopiedBytes, bytes - at)});
}

size_t count_pieces(const Traffic& traffic) {
    size_t count = 0;
    for (const StagedCopy& copy : traffic.copies)
        count += ceil_div(copy.bytes, kMaxCopiedBytes);
    return count;
}

int64_t bytes_of(const Traffic& traffic) {
    int64_t bytes = 0;
    for (const Message& message : traffic.messages)
        bytes += message.bytes;
    return bytes;
}

// Returns the ranks with which rows are exchanged, each once.
std::vector<int> peers_of(const Traffic& outgoing, const Traffic& incoming) {
    std::vector<int> peers;
    for (const PairHeader& header : outgoing.headers)
        peers.push_back(header.destination);
    for (const PairHeader& header : incoming.headers)
        peers.push_back(header.source);
    std::ranges::sort(peers);
    const auto repeated = std::ranges::unique(peers);
    peers.erase(repeated.begin(), repeated.end());
    return peers;
}

PairText to_text(const std::string& description) {
    PairText text{};
    description.copy(text.text, sizeof text.text - 1);
    return text;
}

// Returns the names of ranks, of many the first ones and how many more there are.
std::string list_names(const std::vector<int>& ranks, const std::function<std::string(int)>& name_of) {
    std::string names;
    for (size_t i = 0; i < std::min(ranks.size(), kMostNamed); ++i)
        names += (i > 0 ? ", " : "") + name_of(ranks[i]);
    if (ranks.size() > kMostNamed)
        names += " and " + std::to_string(ranks.size() - kMostNamed) + " more";
    return names;
}

// Reads headers while the stream that receives them waits. Throws if the device does not answer. The stream is not
// given back, as the process ends.
std::vector<PairHeader> read_headers(const PairHeader* headers, size_t count, int ordinal) {
    std::vector<PairHeader> read(count);
    cudaStream_t stream;
    check_cuda(cudaSetDevice(ordinal), "choosing a device");
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    check_cuda(cudaMemcpyAsync(read.data(), headers, count * sizeof *headers, cudaMemcpyDeviceToHost, stream),
               "reading headers");
    check_cuda(cudaStreamSynchronize(stream), "reading headers");
    return read;
}

}  // namespace

RemoteRows::RemoteRows(const TransferParams& params, const Context& context, cudaStream_t program)
    : kind_(params.kind), timeout_ms_(params.timeout_ns / 1'000'000), compares_tables_(context.compares_tables) {
    for (int i = 0; i < params.num_arrays; ++i) {
        sources_.push_back(const_cast<char*>(params.arrays[i].from));
        if (kind_ == Kind::kCast)
            destinations_.push_back(reinterpret_cast<char*>(params.resolve(params.published[i], params.slot)));
    }
    list_traffic(params, context.is_remote, program);
    if (is_empty())
        return;
    name_of_ = context.name_of;
    description_ = context.call + ", with " + list_names(peers_of(outgoing_, incoming_), name_of_);
    std::vector<PairText> texts;
    for (const PairHeader& header : incoming_.headers)
        texts.push_back(to_text(context.call + ", with " + name_of_(header.source)));
    reserve_memory();
    memory_ = static_cast<char*>(context.allocate(bytes_));
    upload(texts, program);
}

void RemoteRows::list_traffic(const TransferParams& params, const IsRemote& is_remote, cudaStream_t program) {
    check_cuda(cudaStreamSynchronize(program), "waiting for a spec");
    const int64_t count = int64_t{params.batch} * params.entries;
    const auto sends = read_table(params.sends, count, program);
    const auto receives = read_table(params.receives, count, program);
    check_cuda(cudaStreamSynchronize(program), "reading a spec");
    const TransferShape shape{params.rank,    params.size,       params.batch,       params.entries,
                              params.input_rows, params.output_rows, params.pair_rows, params.input_stride};
    const auto sent = pairs_of(std::span(sends), shape, is_remote);
    const auto received = pairs_of(std::span(receives), shape, is_remote);
    std::vector<int> row_bytes;
    for (int i = 0; i < params.num_arrays; ++i)
        row_bytes.push_back(params.arrays[i].row_bytes);
    const bool is_cast = kind_ == Kind::kCast;
    const auto& [sources, destinations] = is_cast ? std::tie(sent, received) : std::tie(received, sent);
    const Call call{kind_, params.rank, params.call_hash, params.call};
    outgoing_ = traffic_of(call, Direction::kOutgoing, sources, row_bytes, 0);
    incoming_ = traffic_of(call, Direction::kIncoming, destinations, row_bytes, outgoing_.staging_bytes);
    if (is_cast)
        return;
    incoming_rows_ = staged_rows(sent, shape);
    int64_t rows = 0, offset = outgoing_.staging_bytes;
    for (const Pair& pair : sent)
        rows += pair.rows;
    for (const int bytes : row_bytes) {
        incoming_offsets_.push_back(offset);
        offset += rows * bytes;
    }
}

template <typename T> RemoteRows::Part RemoteRows::reserve(size_t count) {
    const Part part{bytes_, count};
    bytes_ = round_up(bytes_ + count * sizeof(T), kAlignment);
    return part;
}

void RemoteRows::reserve_memory() {
    out_headers_ = reserve<PairHeader>(outgoing_.headers.size());
    expected_headers_ = reserve<PairHeader>(incoming_.headers.size());
    texts_ = reserve<PairText>(incoming_.headers.size());
    packed_ = reserve<CopiedBytes>(count_pieces(outgoing_));
    unpacked_ = reserve<CopiedBytes>(count_pieces(incoming_));
    first_rows_ = reserve<int64_t>(incoming_rows_.size());
    in_headers_ = reserve<PairHeader>(incoming_.headers.size());
    staging_ = reserve<char>(outgoing_.staging_bytes + incoming_.staging_bytes);
}

void RemoteRows::upload(const std::vector<PairText>& texts, cudaStream_t program) const {
    std::vector<char> image(staging_.offset);  // with zeros where headers will come
    const auto put = [&](const Part& part, const auto& items) {
        std::copy_n(reinterpret_cast<const char*>(items.data()), items.size() * sizeof items[0],
                    image.data() + part.offset);
    };
    put(out_headers_, outgoing_.headers);
    put(expected_headers_, incoming_.headers);
    put(texts_, texts);
    put(packed_, resolve_copies(outgoing_, true));
    put(unpacked_, resolve_copies(incoming_, false));
    put(first_rows_, incoming_rows_);
    check_cuda(cudaMemcpyAsync(memory_, image.data(), image.size(), cudaMemcpyHostToDevice, program),
               "copying the messages of a transfer to the device");
    check_cuda(cudaStreamSynchronize(program), "copying the messages of a transfer to the device");  // from `image`
}

std::vector<CopiedBytes> RemoteRows::resolve_copies(const Traffic& traffic, bool to_staging) const {
    std::vector<CopiedBytes> pieces;
    for (const auto& [array, staging, bytes] : traffic.copies) {
        char* const in_array = resolve(array, to_staging ? sources_ : destinations_);
        char* const in_staging = resolve(staging, {});
        if (to_staging)
            append_pieces(pieces, in_array, in_staging, bytes);
        else
            append_pieces(pieces, in_staging, in_array, bytes);
    }
    return pieces;
}

char* RemoteRows::resolve(const Place& place, const std::vector<char*>& arrays) const {
    return (place.array == Place::kStaging ? at<char>(staging_) : arrays[place.array]) + place.offset;
}

void RemoteRows::add_to(TransferParams& params) const {
    if (kind_ == Kind::kCast or incoming_.headers.empty())
        return;
    params.incoming = at<char>(staging_);
    params.incoming_rows = at<int64_t>(first_rows_);
    for (int i = 0; i < params.num_arrays; ++i)
        params.arrays[i].incoming_offset = incoming_offsets_[i];
}

void RemoteRows::pack(cudaStream_t stream) const {
    if (packed_.count > 0)
        check_cuda(copy_bytes(at<CopiedBytes>(packed_), static_cast<int>(packed_.count), stream),
                   "launching the kernel that packs rows");
}

void RemoteRows::unpack(cudaStream_t stream) const {
    if (unpacked_.count > 0)
        check_cuda(copy_bytes(at<CopiedBytes>(unpacked_), static_cast<int>(unpacked_.count), stream),
                   "launching the kernel that unpacks rows");
}

void RemoteRows::exchange(const Peers& peers, cudaStream_t stream) const {
    if (compares_tables_)
        exchange_headers(peers, stream);
    std::vector<nccl::Message> sends, receives;
    for (const Message& message : outgoing_.messages)
        sends.push_back({outgoing_data(message), static_cast<size_t>(message.bytes), message.peer});
    for (const Message& message : incoming_.messages)
        receives.push_back({incoming_data(message), static_cast<size_t>(message.bytes), message.peer});
    count_nccl(static_cast<int64_t>(sends.size()), bytes_of(outgoing_), 0);
    enqueue_nccl(stream, timeout_ms_, {peers.who(), "moved the rows of " + description_, {}},
                 [&] { nccl::exchange(sends, receives, peers.communicator, stream); });
}

void RemoteRows::exchange_headers(const Peers& peers, cudaStream_t stream) const {
    std::vector<nccl::Message> sends, receives;
    for (size_t i = 0; i < outgoing_.headers.size(); ++i)
        sends.push_back({at<PairHeader>(out_headers_) + i, sizeof(PairHeader), outgoing_.headers[i].destination});
    for (size_t i = 0; i < incoming_.headers.size(); ++i)
        receives.push_back({at<PairHeader>(in_headers_) + i, sizeof(PairHeader), incoming_.headers[i].source});
    count_nccl(0, 0, static_cast<int64_t>(sends.size() * sizeof(PairHeader)));
    enqueue_nccl(stream, timeout_ms_, {peers.who(), "exchanged the headers of " + description_, absent_ranks_finder()},
                 [&] { nccl::exchange(sends, receives, peers.communicator, stream); });
    if (in_headers_.count > 0)
        check_cuda(check_headers(at<PairHeader>(in_headers_), at<PairHeader>(expected_headers_), at<PairText>(texts_),
                                 static_cast<int>(in_headers_.count), stream),
                   "launching the kernel that compares headers");
}

// Returns a function that says from which ranks no header has come. NCCL may serve ranks one after another, so that
// those behind an absent one may be among them.
std::function<std::string()> RemoteRows::absent_ranks_finder() const {
    std::vector<int> sources;
    for (const PairHeader& header : incoming_.headers)
        sources.push_back(header.source);
    return [sources, headers = at<PairHeader>(in_headers_), name_of = name_of_,
            ordinal = current_ordinal()]() -> std::string {
        const std::vector<PairHeader> read = read_headers(headers, sources.size(), ordinal);
        std::vector<int> absent;
        for (size_t i = 0; i < read.size(); ++i)
            if (read[i].call == 0)  // calls count from 1
                absent.push_back(sources[i]);
        return absent.empty() ? "" : "nothing has come from " + list_names(absent, name_of);
    };
}

}  // namespace jaxmagi::collectives
