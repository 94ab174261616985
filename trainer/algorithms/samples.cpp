#include "trainer/algorithms/samples.h"

#include <ATen/ATen.h>

#include <cstring>
#include <map>

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
    out.numbers(s.reference_logprobs);
    out.number(static_cast<uint8_t>(s.truncated));
    out.number(static_cast<uint8_t>(s.dropped));
    out.number(s.raw_reward);
    out.number(s.reward);
    out.number(s.advantage);
    out.number(s.loss_multiplier);
    out.number(static_cast<uint8_t>(s.trained_early));
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
    s.reference_logprobs = in.numbers<float>();
    s.truncated = in.number<uint8_t>() != 0;
    s.dropped = in.number<uint8_t>() != 0;
    s.raw_reward = in.number<double>();
    s.reward = in.number<double>();
    s.advantage = in.number<double>();
    s.loss_multiplier = in.number<double>();
    s.trained_early = in.number<uint8_t>() != 0;
    if (s.generation_logprobs.size() != s.tokens.size() ||
        (!s.reference_logprobs.empty() && s.reference_logprobs.size() != s.tokens.size()))
      fail_data("a packed sample has another number of log-probs than tokens");
    samples.push_back(std::move(s));
  }
  return samples;
}

MicroBatch make_micro_batch(const std::vector<RolloutSample>& samples, const Bin& bin, bool share_prompts) {
  MicroBatch batch;
  batch.samples = bin;
  std::vector<int64_t> rows, targets, sequence, ids, positions;
  batch.input.starts = {0};
  const auto append = [&](const int32_t* tokens, size_t count, int64_t position) {
    for (size_t t = 0; t < count; ++t) {
      ids.push_back(tokens[t]);
      positions.push_back(position + static_cast<int64_t>(t));
    }
  };
  const auto close = [&](int64_t prefix) {
    batch.input.starts.push_back(static_cast<int64_t>(ids.size()));
    if (share_prompts) batch.input.prefix.push_back(prefix);
  };
  struct Prompt {
    int64_t sequence = 0, last_row = 0;
    const std::vector<int32_t>* tokens = nullptr;
  };
  std::map<int64_t, Prompt> prompts;  // of each group, when shared
  for (size_t s = 0; s < bin.size(); ++s) {
    const RolloutSample& sample = samples[static_cast<size_t>(bin[s])];
    if (sample.tokens.empty()) continue;
    TRIREME_CHECK(!sample.prompt.empty(), "a prompt has at least one token");
    const auto length = static_cast<int64_t>(sample.prompt.size());
    int64_t before_answer = 0, prefix = -1;  // the prompt's last row, and sequence
    if (share_prompts) {
      const auto [found, fresh] = prompts.try_emplace(sample.group);
      if (fresh) {
        append(sample.prompt.data(), sample.prompt.size(), 0);
        close(-1);
        found->second = {static_cast<int64_t>(batch.input.starts.size()) - 2, static_cast<int64_t>(ids.size()) - 1,
                         &sample.prompt};
      }
      TRIREME_CHECK(*found->second.tokens == sample.prompt,
                    "the samples of group " + std::to_string(sample.group) + " have different prompts");
      before_answer = found->second.last_row;
      prefix = found->second.sequence;
    } else {
      append(sample.prompt.data(), sample.prompt.size(), 0);
      before_answer = static_cast<int64_t>(ids.size()) - 1;
    }
    const auto first = static_cast<int64_t>(ids.size());
    append(sample.tokens.data(), sample.tokens.size() - 1, length);
    for (size_t t = 0; t < sample.tokens.size(); ++t) {
      rows.push_back(t == 0 ? before_answer : first + static_cast<int64_t>(t) - 1);
      targets.push_back(sample.tokens[t]);
      sequence.push_back(static_cast<int64_t>(s));
    }
    if (static_cast<int64_t>(ids.size()) > batch.input.starts.back()) close(prefix);
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
  const at::Tensor all = model.forward(input), rows = batch.rows.to(device);
  // Where prompts are shared a row may be taken several times: embed adds its gradients in one order.
  const at::Tensor hidden = input.prefix.empty() ? all.index_select(0, rows) : embed(all, rows);
  return token_logprobs(hidden, model.head_weight(), batch.targets.to(device), options);
}

}  // namespace trireme
