// Tests which tiles see received keys; that context attention copies blocks of own keys into the arrays of its parts,
// where the places of all others stay as they were; and to which gradients of own keys it adds those of other ranks,
// and which it leaves alone, since they have been stored before.

#include <algorithm>
#include <bit>
#include <cstring>

#include "csrc/attention/sm90/received_tiles.h"
#include "csrc/collectives/part_rows.h"
#include "tests/csrc/check.h"

namespace jaxmagi::test {
namespace {

using namespace jaxmagi::collectives;

constexpr int kTokens = 1000, kReceived = 300, kBatch = 2;
constexpr int kWords = 12, kParts = 3;  // words of a row of a part, and parts of a whole row
constexpr int kPart = 1;                // the part that is taken
constexpr int kRowWords[] = {4, 12, 128, 256, 512, 1000};  // of a row of a part, where rows are copied to parts
constexpr uint32_t kPoison = 0xffffffff;

void check_received_tiles(Verdict& verdict, std::mt19937& random, int num_tiles) {
    std::vector<sm90::ScheduledTile> tiles;
    std::vector<uint8_t> want;
    for (int tile = 0; tile < num_tiles; ++tile) {
        want.push_back(random() % 2);
        tiles.push_back({want.back() ? ~tile : tile, 0, 1, 1, {0, 1}, 0, 0});
    }
    std::ranges::shuffle(tiles, random);
    const DeviceArray scheduled(tiles);
    const DeviceArray found(std::vector<uint8_t>(tiles.size(), 7));
    must(sm90::find_received_tiles(scheduled.data(), num_tiles, found.data(), cudaStreamPerThread), "finding tiles");
    verdict.expect(std::to_string(num_tiles) + " tiles that see received keys or not", found.to_host() == want);
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

bool is_sent(const std::vector<Send>& sends, int entries, int example, int row) {
    return std::any_of(sends.begin() + example * entries, sends.begin() + (example + 1) * entries,
                       [&](const Send& send) { return send.row <= row and row < send.row + send.length; });
}

// Holds rows of all heads, and the place where those of a part go: behind each other, in front of rows that are not
// copied.
class RowsToParts {
public:
    // words: of a row of a part.
    RowsToParts(std::mt19937& random, int tokens, int words)
        : tokens_(tokens), words_(words), from_(random_words(random, size_t{kBatch} * tokens * kParts * words)),
          to_(std::vector<uint32_t>(size_t{kBatch} * rows() * words, kPoison)), all_(from_.to_host()) {}

    CopiedRows array() const {
        const int64_t bytes = words_ * sizeof(uint32_t);
        return {reinterpret_cast<const char*>(from_.data()) + kPart * bytes, to_.data(), kParts * bytes, bytes, bytes};
    }
    int rows() const { return tokens_ + kReceived; }

    // copied: flags of blocks; null: all are copied.
    bool is_right(const std::vector<uint8_t>* copied) const {
        std::vector<uint32_t> want(size_t{kBatch} * rows() * words_, kPoison);
        const int blocks = (tokens_ + kCopiedBlockRows - 1) / kCopiedBlockRows;
        for (int example = 0; example < kBatch; ++example)
            for (int row = 0; row < tokens_; ++row)
                if (copied == nullptr or (*copied)[example * blocks + row / kCopiedBlockRows])
                    std::copy_n(all_.data() + ((size_t{1} * tokens_ * example + row) * kParts + kPart) * words_, words_,
                                want.data() + (size_t{1} * rows() * example + row) * words_);
        return to_.to_host() == want;
    }

private:
    static std::vector<uint32_t> random_words(std::mt19937& random, size_t count) {
        std::vector<uint32_t> words(count);
        std::ranges::generate(words, [&] { return static_cast<uint32_t>(random() >> 1); });
        return words;
    }

    int tokens_, words_;
    DeviceArray<uint32_t> from_, to_;
    std::vector<uint32_t> all_;
};

void check_copies(Verdict& verdict, std::mt19937& random, int tokens, int key_words, int value_words, bool all) {
    const RowsToParts keys(random, tokens, key_words), values(random, tokens, value_words);
    std::vector<uint8_t> copied(size_t{kBatch} * ((tokens + kCopiedBlockRows - 1) / kCopiedBlockRows));
    std::ranges::generate(copied, [&] { return static_cast<uint8_t>(random() % 2); });
    const DeviceArray flags(copied);
    const CopiedRowsParams params{{keys.array(), values.array()}, kBatch, tokens, tokens, keys.rows(),
                                  all ? nullptr : flags.data()};
    must(copy_part_rows(params, cudaStreamPerThread), "copying rows");
    const std::string name = (all ? "all of " : "some blocks of ") + std::to_string(tokens) + " rows of " +
                             std::to_string(key_words) + " and " + std::to_string(value_words) + " words";
    verdict.expect(name + ", keys", keys.is_right(all ? nullptr : &copied));
    verdict.expect(name + ", values", values.is_right(all ? nullptr : &copied));
}

// Copies rows behind the first kTokens ones of a part into whole rows, as those are that are kept.
void check_copies_of_a_part(Verdict& verdict, std::mt19937& random) {
    constexpr int kRows = kTokens + kReceived;
    std::vector<uint32_t> from(size_t{kBatch} * kRows * kWords);
    std::ranges::generate(from, [&] { return static_cast<uint32_t>(random() >> 1); });
    const std::vector<uint32_t> poison(size_t{kBatch} * kReceived * kParts * kWords, kPoison);
    const DeviceArray part(from);
    const DeviceArray keys(poison), values(poison);
    const int64_t part_bytes = kWords * sizeof(uint32_t);
    const auto array = [&](const DeviceArray<uint32_t>& to) -> CopiedRows {
        return {part.data() + kTokens * kWords, to.data() + kPart * kWords, part_bytes, kParts * part_bytes,
                part_bytes};
    };
    const CopiedRowsParams params{
        {array(keys), array(values)}, kBatch, kReceived, kRows, kReceived, nullptr};
    must(copy_part_rows(params, cudaStreamPerThread), "copying rows of a part");
    std::vector<uint32_t> want = poison;
    for (int example = 0; example < kBatch; ++example)
        for (int row = 0; row < kReceived; ++row)
            std::copy_n(from.data() + (size_t{kRows} * example + kTokens + row) * kWords, kWords,
                        want.data() + ((size_t{kReceived} * example + row) * kParts + kPart) * kWords);
    verdict.expect("kept keys", keys.to_host() == want);
    verdict.expect("kept values", values.to_host() == want);
}

constexpr int kEntries = 9, kWidth = 16, kRowWidth = 48;  // floats of a row of a part, and of a whole row
constexpr uint16_t kBefore = 0x7f80;  // infinity in bfloat16, which no sum is

// Returns which of the first blocks have a row that is sent, row by row.
std::vector<uint8_t> sent_blocks(const std::vector<Send>& sends, int count, int rows) {
    std::vector<uint8_t> found(size_t{kBatch} * count);
    for (int example = 0; example < kBatch; ++example)
        for (int row = 0; row < count * rows; ++row)
            found[example * count + row / rows] |= is_sent(sends, kEntries, example, row);
    return found;
}

// Returns a whole number that floats and bfloat16 have, also doubled.
float small_number(std::mt19937& random) {
    return static_cast<float>(random() % 100);
}

uint16_t to_bf16(float number) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(number) >> 16);
}

// rows: of a block. Behind the blocks are some rows that have none.
void check_sums(Verdict& verdict, std::mt19937& random, int rows) {
    constexpr int kRows = kTokens + kReceived;
    const int count = (kTokens - 30) / rows;
    const std::vector<Send> sends = random_sends(random, kEntries);
    const std::vector<uint8_t> expected = sent_blocks(sends, count, rows);
    const auto num_sent = std::ranges::count(expected, 1);
    verdict.expect("some blocks are sent and some are not", 0 < num_sent and num_sent < std::ssize(expected));
    std::vector<float> own(size_t{kBatch} * kRows * kWidth), others(size_t{kBatch} * kTokens * kWidth);
    std::ranges::generate(own, [&] { return small_number(random); });
    std::ranges::generate(others, [&] { return small_number(random); });
    const std::vector<uint16_t> before(size_t{kBatch} * kTokens * kRowWidth, kBefore);
    const DeviceArray own_rows(own), sums(others);
    const DeviceArray keys(before), values(before);
    const DeviceArray table(sends);
    const DeviceArray flags(std::vector<uint8_t>(expected.size(), 7));
    const SentBlocks blocks{flags.data(), count, rows};
    must(find_sent_blocks(blocks, table.data(), kEntries, kBatch, cudaStreamPerThread), "finding blocks");
    verdict.expect("blocks that are sent", flags.to_host() == expected);
    const auto array = [&](const DeviceArray<uint16_t>& to) -> GradientRows {
        return {own_rows.data(), sums.data(), to.data() + kPart * kWidth, kWidth, kRowWidth};
    };
    const GradientRowsParams params{{array(keys), array(values)}, table.data(), kEntries, kBatch, kTokens, kRows,
                                    DType::kBF16, blocks};
    must(add_gradients(params, cudaStreamPerThread), "adding gradients");
    std::vector<uint16_t> want = before;
    for (int example = 0; example < kBatch; ++example)
        for (int row = 0; row < kTokens; ++row) {
            const int block = row / rows;
            if (block < count and not expected[example * count + block])
                continue;
            for (int i = 0; i < kWidth; ++i) {
                const size_t at = (size_t{kTokens} * example + row) * kWidth + i;
                const float more = is_sent(sends, kEntries, example, row) ? others[at] : 0.f;
                const float sum = own[(size_t{kRows} * example + row) * kWidth + i] + more;
                want[(size_t{kTokens} * example + row) * kRowWidth + kPart * kWidth + i] = to_bf16(sum);
            }
        }
    verdict.expect("sums of keys", keys.to_host() == want);
    verdict.expect("sums of values", values.to_host() == want);
}

int run() {
    std::mt19937 random(0);
    Verdict verdict;
    for (const int num_tiles : {1, 255, 256, 1000})
        check_received_tiles(verdict, random, num_tiles);
    for (const bool all : {false, true}) {
        for (const int words : kRowWords)
            check_copies(verdict, random, kTokens, words, words, all);
        check_copies(verdict, random, kTokens, 48, 256, all);
        check_copies(verdict, random, 50'000, 512, 4, all);  // more groups of rows than lanes of all CTAs
    }
    check_copies_of_a_part(verdict, random);
    for (const int rows : {64, 96, 128})
        check_sums(verdict, random, rows);
    return verdict.exit_code();
}

}  // namespace
}  // namespace jaxmagi::test

int main() {
    return jaxmagi::test::run();
}
