#include "trainer/algorithms/samples.h"

#include <ATen/ATen.h>

#include <cstring>

#include "base/error.h"

namespace trireme {
namespace {

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

std::string pack_samples(const std::vector<RolloutSample>& samples) {
  Packer out;
  for (const RolloutSample& s : samples) {
    out.number(s.group);
    out.number(s.index);
    out.numbers(s.prompt);
    out.numbers(s.tokens);
    out.numbers(s.generation_logprobs);
    out.number(static_cast<uint8_t>(s.truncated));
    out.number(static_cast<uint8_t>(s.dropped));
    out.number(s.raw_reward);
    out.number(s.reward);
    out.number(s.advantage);
    out.number(s.loss_multiplier);
  }
  return out.take();
}

std::vector<RolloutSample> unpack_samples(std::string_view bytes) {
  Unpacker in(bytes);
  std::vector<RolloutSample> samples;
  while (!in.done()) {
    RolloutSample s;
    s.group = in.number<int64_t>();
    s.index = in.number<int64_t>();
    s.prompt = in.numbers<int32_t>();
    s.tokens = in.numbers<int32_t>();
    s.generation_logprobs = in.numbers<float>();
    s.truncated = in.number<uint8_t>() != 0;
    s.dropped = in.number<uint8_t>() != 0;
    s.raw_reward = in.number<double>();
    s.reward = in.number<double>();
    s.advantage = in.number<double>();
    s.loss_multiplier = in.number<double>();
    if (s.generation_logprobs.size() != s.tokens.size())
      fail_data("a packed sample has another number of log-probs than tokens");
    samples.push_back(std::move(s));
  }
  return samples;
}

MicroBatch make_micro_batch(const std::vector<RolloutSample>& samples, const Bin& bin) {
  MicroBatch batch;
  batch.samples = bin;
  std::vector<int64_t> rows, targets, sequence, ids, positions;
  batch.input.starts = {0};
  for (size_t s = 0; s < bin.size(); ++s) {
    const RolloutSample& sample = samples[static_cast<size_t>(bin[s])];
    if (sample.tokens.empty()) continue;
    const int64_t start = static_cast<int64_t>(ids.size());
    ids.insert(ids.end(), sample.prompt.begin(), sample.prompt.end());
    ids.insert(ids.end(), sample.tokens.begin(), sample.tokens.end() - 1);
    for (int64_t p = 0; start + p < static_cast<int64_t>(ids.size()); ++p) positions.push_back(p);
    const int64_t first = start + static_cast<int64_t>(sample.prompt.size()) - 1;
    TRIREME_CHECK(!sample.prompt.empty(), "a prompt has at least one token");
    for (size_t t = 0; t < sample.tokens.size(); ++t) {
      rows.push_back(first + static_cast<int64_t>(t));
      targets.push_back(sample.tokens[t]);
      sequence.push_back(static_cast<int64_t>(s));
    }
    batch.input.starts.push_back(static_cast<int64_t>(ids.size()));
  }
  batch.input.ids = at::tensor(ids, at::kLong);
  batch.input.positions = at::tensor(positions, at::kLong);
  batch.rows = at::tensor(rows, at::kLong);
  batch.targets = at::tensor(targets, at::kLong);
  batch.sequence = at::tensor(sequence, at::kLong);
  return batch;
}

at::Tensor generation_logprobs(const std::vector<RolloutSample>& samples, const Bin& bin) {
  std::vector<float> flat;
  for (const int64_t i : bin) {
    const std::vector<float>& own = samples[static_cast<size_t>(i)].generation_logprobs;
    flat.insert(flat.end(), own.begin(), own.end());
  }
  return at::tensor(flat, at::kFloat);
}

at::Tensor spread(const std::vector<RolloutSample>& samples, const Bin& bin,
                  const std::vector<double>& per_sample_of_bin) {
  std::vector<float> flat;
  for (size_t s = 0; s < bin.size(); ++s) {
    flat.insert(flat.end(), samples[static_cast<size_t>(bin[s])].tokens.size(),
                static_cast<float>(per_sample_of_bin[s]));
  }
  return at::tensor(flat, at::kFloat);
}

at::Tensor answer_logprobs(const Model& model, const MicroBatch& batch, const LogprobOptions& options) {
  const at::Device device = model.options().device;
  PackedBatch input = batch.input;
  input.ids = input.ids.to(device);
  input.positions = input.positions.to(device);
  const at::Tensor hidden = model.forward(input).index_select(0, batch.rows.to(device));
  return token_logprobs(hidden, model.head_weight(), batch.targets.to(device), options);
}

}  // namespace trireme
