// Tests which own keys context attention copies into the arrays of its parts: those that tiles with received keys see,
// by a dense mask, and rows that are sent. The places of all others stay as they were.

#include <algorithm>
#include <cstring>

#include "csrc/attention/sm90/needed_keys.h"
#include "csrc/collectives/part_rows.h"
#include "csrc/mask/band.h"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::collectives;

constexpr int kTokens = 1000, kReceived = 300, kTileRows = 96, kBands = 40, kBatch = 2;
constexpr int kBlocks = (kTokens + kNeededRows - 1) / kNeededRows;
constexpr int kWords = 12, kParts = 3;  // words of a row of a part, and parts of a whole row
constexpr int kPart = 1;                // the part that is taken
constexpr uint32_t kPoison = 0xffffffff;

struct Schedule {
    std::vector<sm90::ScheduledBand> bands;
    std::vector<sm90::ScheduledTile> tiles;
    std::vector<uint8_t> needed;  // by the dense mask
};

bool sees(const sm90::ScheduledBand& band, int q, int k) {
    return band.q0 <= q and q < band.q1 and band.k0 <= k and k < band.k1 and band.lo <= k - q and k - q <= band.hi;
}

// Makes narrow random bands, and finds cell by cell which keys the tiles see.
Schedule random_schedule(std::mt19937& random) {
    const auto draw = [&](int least, int most) { return std::uniform_int_distribution(least, most)(random); };
    Schedule schedule{.bands = {}, .tiles = {}, .needed = std::vector<uint8_t>(kBlocks)};
    for (int i = 0; i < kBands; ++i) {
        const int q = draw(0, kTokens - 1), k = draw(0, kTokens + kReceived - 1), offset = draw(-100, 100);
        const Band band = tighten({q, q + draw(1, 80), k, k + draw(1, 80), k - q + offset - 20, k - q + offset + 20},
                                  kTokens, kTokens + kReceived);
        schedule.bands.push_back({band.q0, band.q1, band.k0, band.k1, band.lo, band.hi, 0, 0});
    }
    for (int tile = 0; tile * kTileRows < kTokens; ++tile) {
        std::vector<bool> seen(kTokens + kReceived);
        for (const auto& band : schedule.bands)
            for (int q = tile * kTileRows; q < std::min((tile + 1) * kTileRows, kTokens); ++q)
                for (int k = 0; k < kTokens + kReceived; ++k)
                    seen[k] = seen[k] or sees(band, q, k);
        const bool sees_received = std::find(seen.begin() + kTokens, seen.end(), true) != seen.end();
        schedule.tiles.push_back({sees_received ? ~tile : tile, 0, kBands, 1});
        for (int k = 0; sees_received and k < kTokens; ++k)
            schedule.needed[k / kNeededRows] |= seen[k];
    }
    return schedule;
}

std::vector<uint8_t> find_needed(const Schedule& schedule) {
    const DeviceArray bands(schedule.bands);
    const DeviceArray tiles(schedule.tiles);
    const DeviceArray needed(std::vector<uint8_t>(kBlocks, 7));
    must(sm90::find_needed_keys({.bands = bands.data(),
                                 .tiles = tiles.data(),
                                 .num_tiles = static_cast<int>(schedule.tiles.size()),
                                 .tile_rows = kTileRows,
                                 .q_len = kTokens,
                                 .own_len = kTokens,
                                 .block_keys = kNeededRows,
                                 .needed = needed.data()},
                                cudaStreamPerThread),
         "finding keys");
    return needed.to_host();
}

// Some rows of each example, and an entry that is not in use.
std::vector<Send> random_sends(std::mt19937& random, int entries) {
    std::vector<Send> sends(kBatch * entries);
    for (int i = 0; i < kBatch * entries; ++i)
        if (i % entries > 0)
            sends[i] = {.peer = 0, .slot = 0, .row = static_cast<int>(random() % (kTokens - 5)),
                        .length = static_cast<int>(1 + random() % 5), .peer_row = 0};
    return sends;
}

bool is_copied(const std::vector<uint8_t>* needed, const std::vector<Send>& sends, int entries, int example, int row) {
    if (needed == nullptr or (*needed)[row / kNeededRows])
        return true;
    return std::any_of(sends.begin() + example * entries, sends.begin() + (example + 1) * entries,
                       [&](const Send& send) { return send.row <= row and row < send.row + send.length; });
}

void check_copies(Verdict& verdict, std::mt19937& random, const std::vector<uint8_t>* needed) {
    constexpr int kRows = kTokens + kReceived, kEntries = 9;
    std::vector<uint32_t> from(size_t{kBatch} * kTokens * kParts * kWords);
    std::ranges::generate(from, [&] { return static_cast<uint32_t>(random() >> 1); });
    const std::vector<uint32_t> poison(size_t{kBatch} * kRows * kWords, kPoison);
    const std::vector<Send> sends = random_sends(random, kEntries);
    const DeviceArray own(from), keys(poison), values(poison);
    const DeviceArray table(sends);
    const DeviceArray flags(needed == nullptr ? std::vector<uint8_t>(1) : *needed);
    const int64_t part_bytes = kWords * sizeof(uint32_t);
    const char* const part = reinterpret_cast<const char*>(own.data()) + kPart * part_bytes;
    const CopiedRowsParams params{{{part, keys.data(), kParts * part_bytes, part_bytes},
                                   {part, values.data(), kParts * part_bytes, part_bytes}},
                                  kBatch, kTokens, kRows, needed == nullptr ? nullptr : flags.data(), table.data(),
                                  kEntries};
    must(copy_part_rows(params, cudaStreamPerThread), "copying rows");
    std::vector<uint32_t> want = poison;
    for (int example = 0; example < kBatch; ++example)
        for (int row = 0; row < kTokens; ++row)
            if (is_copied(needed, sends, kEntries, example, row))
                std::copy_n(from.data() + ((size_t{kTokens} * example + row) * kParts + kPart) * kWords, kWords,
                            want.data() + (size_t{kRows} * example + row) * kWords);
    const std::string name = needed == nullptr ? "all rows" : "rows that are needed or sent";
    verdict.expect(name + " of keys", keys.to_host() == want);
    verdict.expect(name + " of values", values.to_host() == want);
}

int run() {
    std::mt19937 random(0);
    Verdict verdict;
    for (int i = 0; i < 5; ++i) {
        const Schedule schedule = random_schedule(random);
        verdict.expect("needed keys", find_needed(schedule) == schedule.needed);
        const auto count = std::ranges::count(schedule.needed, 1);
        verdict.expect("some are needed and some are not", 0 < count and count < kBlocks);
        check_copies(verdict, random, &schedule.needed);
    }
    check_copies(verdict, random, nullptr);
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    return jaxmagi::test::run();
}
