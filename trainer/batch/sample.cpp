#include "trainer/batch/sample.h"

#include <cstring>

#include "base/error.h"

namespace trireme {
namespace {

// Of the byte of a sample that says what became of its rewards.
constexpr uint8_t kDropped = 1, kScored = 2;

class Packer final {
 public:
  template <typename T>
  void number(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  template <typename T>
  void numbers(const std::vector<T>& values) {
    number(static_cast<uint64_t>(values.size()));
    bytes_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Unpacker final {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  template <typename T>
  std::vector<T> numbers() {
    const auto count = number<uint64_t>();
    if (count > bytes_.size() / sizeof(T)) fail_data("a packed sample names more values than it holds");
    std::vector<T> values(count);
    if (count > 0) std::memcpy(values.data(), take(count * sizeof(T)), count * sizeof(T));
    return values;
  }
  bool done() const { return bytes_.empty(); }

 private:
  const char* take(size_t size) {
    if (size > bytes_.size()) fail_data("a packed sample is cut off");
    const char* at = bytes_.data();
    bytes_.remove_prefix(size);
    return at;
  }
  std::string_view bytes_;
};

}  // namespace

int64_t Sample::valid_tokens() const {
  int64_t count = 0;
  for (size_t t = 0; t < response.size(); ++t) count += counts(t) ? 1 : 0;
  return count;
}

double Sample::mean_advantage() const {
  if (advantages.empty()) return 0;
  double above_first = 0;
  for (const double advantage : advantages) above_first += advantage - advantages.front();
  return advantages.front() + above_first / static_cast<double>(advantages.size());
}

std::string pack_samples(const std::vector<Sample>& samples) {
  Packer out;
  for (const Sample& s : samples) {
    out.number(s.group);
    out.number(s.index);
    out.numbers(s.response);
    out.numbers(s.generation_logprobs);
    out.numbers(s.reference_logprobs);
    out.numbers(s.weight_versions);
    out.number(static_cast<uint8_t>(s.mixed_context));
    out.numbers(s.previous_logprobs);
    out.number(static_cast<uint8_t>(s.truncated));
    out.number(static_cast<uint8_t>((s.dropped ? kDropped : 0) | (s.score ? kScored : 0)));
    out.number(s.raw_reward);
    out.numbers(s.reward_parts);
    if (s.score) out.number(*s.score);
    out.number(s.reward);
    out.number(s.loss_multiplier);
    out.number(static_cast<uint8_t>(s.trained_early));
    out.numbers(s.loss_mask);
    out.numbers(s.values);
    out.numbers(s.rewards);
    out.numbers(s.advantages);
    out.numbers(s.returns);
  }
  return out.take();
}

std::vector<Sample> unpack_samples(std::string_view bytes, const std::vector<SharedTokens>& prompts) {
  Unpacker in(bytes);
  std::vector<Sample> samples;
  while (!in.done()) {
    Sample s;
    s.group = in.number<int64_t>();
    if (s.group < 0 || s.group >= static_cast<int64_t>(prompts.size()))
      fail_data("a packed sample names group " + std::to_string(s.group) + " of " + std::to_string(prompts.size()));
    s.prompt = prompts[static_cast<size_t>(s.group)];
    s.index = in.number<int64_t>();
    s.response = in.numbers<int32_t>();
    s.generation_logprobs = in.numbers<float>();
    s.reference_logprobs = in.numbers<float>();
    s.weight_versions = in.numbers<VersionSpan>();
    s.mixed_context = in.number<uint8_t>() != 0;
    s.previous_logprobs = in.numbers<float>();
    s.truncated = in.number<uint8_t>() != 0;
    const auto rewards = in.number<uint8_t>();
    s.dropped = (rewards & kDropped) != 0;
    s.raw_reward = in.number<double>();
    s.reward_parts = in.numbers<double>();
    if ((rewards & kScored) != 0) s.score = in.number<float>();
    s.reward = in.number<double>();
    s.loss_multiplier = in.number<double>();
    s.trained_early = in.number<uint8_t>() != 0;
    s.loss_mask = in.numbers<uint8_t>();
    s.values = in.numbers<float>();
    s.rewards = in.numbers<double>();
    s.advantages = in.numbers<double>();
    s.returns = in.numbers<double>();
    const auto of_tokens = [&](const auto& numbers) { return numbers.empty() || numbers.size() == s.response.size(); };
    if (s.generation_logprobs.size() != s.response.size() || !of_tokens(s.reference_logprobs) ||
        !of_tokens(s.previous_logprobs))
      fail_data("a packed sample has another number of log-probs than tokens");
    if (!of_tokens(s.loss_mask) || !of_tokens(s.values) || !of_tokens(s.rewards) || !of_tokens(s.advantages) ||
        !of_tokens(s.returns))
      fail_data("a packed sample has numbers of tokens for other tokens than its own");
    if (!s.weight_versions.empty() && !spans_tile(s.weight_versions, static_cast<int64_t>(s.response.size())))
      fail_data("a packed sample has weight versions that are not those of its tokens");
    samples.push_back(std::move(s));
  }
  return samples;
}

std::vector<std::vector<Members>> make_micro_batches(const std::vector<Sample>& samples, const Members& members,
                                                     const MicroBatchOptions& options, int64_t ranks) {
  SharedLengths sequences;
  for (const int64_t i : members) {
    const Sample& sample = samples[static_cast<size_t>(i)];
    sequences.lengths.push_back(sample.length());
    sequences.prompts.push_back(static_cast<int64_t>(sample.prompt.size()));
    sequences.groups.push_back(sample.group);
  }
  std::vector<std::vector<Members>> all = make_micro_batches(sequences, options, ranks);
  for (std::vector<Members>& of_rank : all) {
    for (Members& micro_batch : of_rank) {
      for (int64_t& i : micro_batch) i = members[static_cast<size_t>(i)];
    }
  }
  return all;
}

}  // namespace trireme
