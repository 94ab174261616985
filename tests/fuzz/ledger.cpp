// libFuzzer: bytes as the ledger of a checkpoint: where its groups lie, and their packed samples. What is read is whole
// and packs to what it was read from; what the ledger takes of it makes whole steps.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "trainer/batch/sample.h"
#include "trainer/rollout/ledger.h"

namespace {

using namespace trireme;

void expect(bool holds) {
  if (!holds) std::abort();
}

// Before `bytes`, one each: what the ledger is like, how many groups there are, and the distance of each from the one
// before.
struct Header {
  LedgerOptions options;
  std::vector<int64_t> numbers;
};

Header take_header(std::string_view& bytes) {
  const auto next = [&]() -> int64_t {
    const auto value = bytes.empty() ? uint8_t{0} : static_cast<uint8_t>(bytes.front());
    bytes.remove_prefix(bytes.empty() ? 0 : 1);
    return value;
  };
  Header header;
  const int64_t shape = next();
  header.options.groups_per_step = 1 + shape % 4;
  header.options.samples_per_group = 1 + shape / 4 % 4;
  header.options.max_age = shape / 16 % 4;
  if (shape >= 128) {
    header.options.teaches_nothing = [](const std::vector<Sample>& group) {
      return std::all_of(group.begin(), group.end(),
                         [&](const Sample& sample) { return sample.raw_reward == group.front().raw_reward; });
    };
    header.options.max_groups_of_step = 2 * header.options.groups_per_step;
  }
  int64_t number = next() % 4;  // the ledger's first group is 1
  for (int64_t left = next() % 8; left > 0; --left) {
    header.numbers.push_back(number);
    number += next() % 8;
  }
  return header;
}

void check_ledger(const Header& header, std::vector<Sample> samples) {
  std::vector<LedgerGroup> groups;
  for (const int64_t number : header.numbers) groups.push_back({number, true, {}});
  for (Sample& sample : samples) groups[static_cast<size_t>(sample.group)].samples.push_back(std::move(sample));
  const auto all = static_cast<int64_t>(groups.size());
  Ledger ledger(header.options, /*first_step=*/3, /*first_group=*/1);
  const int64_t refused = ledger.restore(std::move(groups));
  std::set<int64_t> whole;
  for (const LedgerGroup& group : ledger.whole_groups()) {
    expect(group.number >= ledger.first_group() && group.number < ledger.end_group());
    expect(static_cast<int64_t>(group.samples.size()) == header.options.samples_per_group);
    for (const Sample& sample : group.samples) expect(sample.group == group.number);
    expect(whole.insert(group.number).second);
  }
  expect(static_cast<int64_t>(whole.size()) == all - refused);
  expect(ledger.counts().complete == all - refused && ledger.counts().leased_samples == 0);
  while (ledger.complete()) {
    const int64_t step = ledger.next_step();
    int64_t kept = 0;
    for (const LedgerGroup& group : ledger.take(step)) {
      expect(whole.erase(group.number) == 1);
      kept += group.kept ? 1 : 0;
    }
    expect(kept == header.options.groups_per_step);
    ledger.trained(step);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const Header header = take_header(bytes);
  std::vector<SharedTokens> prompts(header.numbers.size(), SharedTokens{1, 2});
  std::vector<Sample> samples;
  try {
    samples = unpack_samples(bytes, prompts);
  } catch (const Error& error) {
    expect(error.kind() == ErrorKind::kData);
    return 0;
  }
  for (const Sample& sample : samples) {
    expect(sample.group >= 0 && sample.group < static_cast<int64_t>(prompts.size()));
    expect(sample.generation_logprobs.size() == sample.response.size());
    expect(sample.weight_versions.empty() ||
           spans_tile(sample.weight_versions, static_cast<int64_t>(sample.response.size())));
    (void)sample.valid_tokens();
  }
  // Not the bytes themselves: a flag may be written as any number but 0.
  const std::string packed = pack_samples(samples);
  expect(packed.size() == bytes.size() && pack_samples(unpack_samples(packed, prompts)) == packed);
  check_ledger(header, std::move(samples));
  return 0;
}
