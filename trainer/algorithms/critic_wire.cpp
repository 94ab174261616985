#include "trainer/algorithms/critic_wire.h"

#include <cstring>
#include <type_traits>

#include "base/error.h"

namespace trireme {
namespace {

constexpr uint64_t kMostPrompts = uint64_t{1} << 24, kMostMetrics = 4096;

template <typename T>
void put_number(std::string& bytes, T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Takes from the front of what actor and critic wrote.
class CriticReader final {
 public:
  explicit CriticReader(std::string_view bytes) : bytes_(bytes) {}
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view take(uint64_t size) {
    if (size > bytes_.size()) fail_data("a message between actor and critic is cut off");
    const std::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }
  // So many, of at least so many bytes each: at most `most`, and no more than there are bytes for.
  uint64_t count(uint64_t most, uint64_t bytes_each) {
    const auto count = number<uint64_t>();
    if (count > most || count > bytes_.size() / bytes_each)
      fail_data("a message between actor and critic names " + std::to_string(count) + " parts, more than it holds");
    return count;
  }
  std::string_view rest() const { return bytes_; }
  void expect_end() const {
    if (!bytes_.empty()) fail_data("a message between actor and critic goes on behind its end");
  }

 private:
  std::string_view bytes_;
};

void put_metrics(std::string& bytes, const std::map<std::string, double>& metrics) {
  put_number(bytes, static_cast<uint64_t>(metrics.size()));
  for (const auto& [name, value] : metrics) {
    put_number(bytes, static_cast<uint64_t>(name.size()));
    bytes += name;
    put_number(bytes, value);
  }
}

std::map<std::string, double> take_metrics(CriticReader& in) {
  std::map<std::string, double> metrics;
  for (uint64_t left = in.count(kMostMetrics, sizeof(uint64_t) + sizeof(double)); left > 0; --left) {
    const std::string name(in.take(in.number<uint64_t>()));
    metrics[name] = in.number<double>();
  }
  return metrics;
}

}  // namespace

std::string pack_for_critic(const std::vector<Sample>& samples) {
  // Samples of a group stand next to each other: its prompt is written once, pack_samples() names it by its place.
  std::vector<const Sample*> firsts;
  std::vector<Sample> stripped;
  for (const Sample& sample : samples) {
    if (firsts.empty() || firsts.back()->group != sample.group || !(firsts.back()->prompt == sample.prompt))
      firsts.push_back(&sample);
    Sample& out = stripped.emplace_back();
    out.group = static_cast<int64_t>(firsts.size()) - 1;
    out.index = sample.index;
    out.response = sample.response;
    out.generation_logprobs = sample.generation_logprobs;
    out.loss_multiplier = sample.loss_multiplier;
    out.loss_mask = sample.loss_mask;
    out.values = sample.values;
    out.returns = sample.returns;
  }
  std::string bytes;
  put_number(bytes, static_cast<uint64_t>(firsts.size()));
  for (const Sample* first : firsts) {
    const std::vector<int32_t>& prompt = *first->prompt;
    put_number(bytes, first->group);
    put_number(bytes, static_cast<uint64_t>(prompt.size()));
    bytes.append(reinterpret_cast<const char*>(prompt.data()), prompt.size() * sizeof(int32_t));
  }
  return bytes + pack_samples(stripped);
}

std::vector<Sample> unpack_for_critic(std::string_view bytes) {
  CriticReader in(bytes);
  const uint64_t count = in.count(kMostPrompts, sizeof(int64_t) + sizeof(uint64_t));
  std::vector<int64_t> groups;
  std::vector<SharedTokens> prompts;
  for (uint64_t i = 0; i < count; ++i) {
    groups.push_back(in.number<int64_t>());
    const uint64_t tokens = in.count(UINT64_MAX, sizeof(int32_t));
    const std::string_view raw = in.take(tokens * sizeof(int32_t));
    std::vector<int32_t> prompt(tokens);
    if (tokens > 0) std::memcpy(prompt.data(), raw.data(), raw.size());
    prompts.emplace_back(std::move(prompt));
  }
  std::vector<Sample> samples = unpack_samples(in.rest(), prompts);
  for (Sample& sample : samples) sample.group = groups[static_cast<size_t>(sample.group)];
  return samples;
}

std::string pack_values(const std::vector<Sample>& samples) {
  std::string bytes;
  for (const Sample& sample : samples) {
    TRIREME_CHECK(sample.values.size() == sample.response.size(), "values of every token");
    bytes.append(reinterpret_cast<const char*>(sample.values.data()), sample.values.size() * sizeof(float));
  }
  return bytes;
}

void unpack_values(std::string_view bytes, std::vector<Sample>& samples) {
  CriticReader in(bytes);
  for (Sample& sample : samples) {
    sample.values.resize(sample.response.size());
    const std::string_view raw = in.take(sample.values.size() * sizeof(float));
    if (!raw.empty()) std::memcpy(sample.values.data(), raw.data(), raw.size());
  }
  if (!in.rest().empty()) fail_data("the critic gave more values than there are tokens");
}

std::string pack_call(const CriticCall& call) {
  std::string bytes;
  put_number(bytes, static_cast<uint8_t>(call.kind));
  put_number(bytes, call.step);
  put_number(bytes, call.passes);
  put_number(bytes, static_cast<uint8_t>(call.stopped));
  put_metrics(bytes, call.metrics);
  return bytes + pack_for_critic(call.samples);
}

CriticCall unpack_call(std::string_view bytes) {
  CriticReader in(bytes);
  CriticCall call;
  const auto kind = in.number<uint8_t>();
  if (kind > static_cast<uint8_t>(CriticCall::Kind::kEnd))
    fail_data("the critic was called for something that it does not know: " + std::to_string(kind));
  call.kind = static_cast<CriticCall::Kind>(kind);
  call.step = in.number<int64_t>();
  call.passes = in.number<int64_t>();
  if (call.step < 0 || call.passes < 0)
    fail_data("the critic was called for " + std::to_string(call.passes) + " passes in step " +
              std::to_string(call.step));
  call.stopped = in.number<uint8_t>() != 0;
  call.metrics = take_metrics(in);
  call.samples = unpack_for_critic(in.rest());
  return call;
}

std::string pack_trained(const CriticTrained& trained) {
  std::string bytes;
  put_number(bytes, trained.seconds);
  put_metrics(bytes, trained.metrics);
  return bytes;
}

CriticTrained unpack_trained(std::string_view bytes) {
  CriticReader in(bytes);
  CriticTrained trained;
  trained.seconds = in.number<double>();
  trained.metrics = take_metrics(in);
  in.expect_end();
  return trained;
}

}  // namespace trireme
