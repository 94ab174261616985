#include "trainer/batch/micro_batch.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "base/error.h"
#include "trainer/model/context_rows.h"
#include "trainer/parallel/exchange.h"

namespace trireme {

MicroBatch make_micro_batch(const std::vector<Sample>& samples, const Members& members, bool share_prompts) {
  MicroBatch batch;
  batch.members = members;
  std::vector<int64_t> rows, targets, sequence, ids, positions;
  batch.input.starts = {0};
  const auto append = [&](const int32_t* tokens, size_t count, int64_t position) {
    for (size_t t = 0; t < count; ++t) {
      ids.push_back(tokens[t]);
      positions.push_back(position + static_cast<int64_t>(t));
    }
  };
  auto names = std::make_shared<std::vector<SequenceName>>();
  const auto close = [&](int64_t prefix, const SequenceName& name) {
    batch.input.starts.push_back(static_cast<int64_t>(ids.size()));
    names->push_back(name);
    if (share_prompts) batch.input.prefix.push_back(prefix);
  };
  struct Prompt {
    int64_t sequence = 0, last_row = 0;
    SharedTokens tokens;
  };
  std::map<int64_t, Prompt> prompts;  // of each group, when shared
  for (size_t s = 0; s < members.size(); ++s) {
    const Sample& sample = samples[static_cast<size_t>(members[s])];
    if (sample.response.empty()) continue;
    TRIREME_CHECK(!sample.prompt.empty(), "a prompt has at least one token");
    const auto length = static_cast<int64_t>(sample.prompt.size());
    int64_t before_response = 0, prefix = -1;  // the prompt's last row, and sequence
    if (share_prompts) {
      const auto [found, fresh] = prompts.try_emplace(sample.group);
      if (fresh) {
        append(sample.prompt.data(), sample.prompt.size(), 0);
        close(-1, {sample.group, -1, length});
        found->second = {static_cast<int64_t>(batch.input.starts.size()) - 2, static_cast<int64_t>(ids.size()) - 1,
                         sample.prompt};
      }
      TRIREME_CHECK(found->second.tokens == sample.prompt,
                    "the samples of group " + std::to_string(sample.group) + " have different prompts");
      before_response = found->second.last_row;
      prefix = found->second.sequence;
    } else {
      append(sample.prompt.data(), sample.prompt.size(), 0);
      before_response = static_cast<int64_t>(ids.size()) - 1;
    }
    const auto first = static_cast<int64_t>(ids.size());
    append(sample.response.data(), sample.response.size() - 1, length);
    for (size_t t = 0; t < sample.response.size(); ++t) {
      rows.push_back(t == 0 ? before_response : first + static_cast<int64_t>(t) - 1);
      targets.push_back(sample.response[t]);
      sequence.push_back(static_cast<int64_t>(s));
    }
    if (static_cast<int64_t>(ids.size()) > batch.input.starts.back())
      close(prefix, {sample.group, sample.index, length});
  }
  batch.input.names = std::move(names);
  batch.input.ids = at::tensor(ids, at::kLong);
  batch.input.positions = at::tensor(positions, at::kLong);
  batch.rows = at::tensor(rows, at::kLong);
  batch.targets = at::tensor(targets, at::kLong);
  batch.sequence = at::tensor(sequence, at::kLong);
  return batch;
}

at::Tensor generation_logprobs(const std::vector<Sample>& samples, const Members& members) {
  std::vector<float> flat;
  for (const int64_t i : members) {
    const std::vector<float>& own = samples[static_cast<size_t>(i)].generation_logprobs;
    flat.insert(flat.end(), own.begin(), own.end());
  }
  return at::tensor(flat, at::kFloat);
}

at::Tensor spread(const std::vector<Sample>& samples, const Members& members, const std::vector<double>& per_member) {
  std::vector<float> flat;
  for (size_t s = 0; s < members.size(); ++s) {
    flat.insert(flat.end(), samples[static_cast<size_t>(members[s])].response.size(),
                static_cast<float>(per_member[s]));
  }
  return at::tensor(flat, at::kFloat);
}

namespace {

template <typename T>
at::Tensor flat_numbers(const std::vector<Sample>& samples, const Members& members, std::vector<T> Sample::*numbers) {
  std::vector<float> flat;
  for (const int64_t i : members) {
    const Sample& sample = samples[static_cast<size_t>(i)];
    TRIREME_CHECK((sample.*numbers).size() == sample.response.size(), "sample " + std::to_string(sample.index) +
                                                                          " of group " + std::to_string(sample.group) +
                                                                          " lacks a number of its tokens");
    for (const T number : sample.*numbers) flat.push_back(static_cast<float>(number));
  }
  return at::tensor(flat, at::kFloat);
}

}  // namespace

at::Tensor of_tokens(const std::vector<Sample>& samples, const Members& members, std::vector<double> Sample::*numbers) {
  return flat_numbers(samples, members, numbers);
}

at::Tensor of_tokens(const std::vector<Sample>& samples, const Members& members, std::vector<float> Sample::*numbers) {
  return flat_numbers(samples, members, numbers);
}

at::Tensor loss_mask(const std::vector<Sample>& samples, const Members& members) {
  std::vector<float> flat;
  for (const int64_t i : members) {
    const Sample& sample = samples[static_cast<size_t>(i)];
    for (size_t t = 0; t < sample.response.size(); ++t)
      flat.push_back(sample.counts(t) ? static_cast<float>(sample.loss_multiplier) : 0.0F);
  }
  return at::tensor(flat, at::kFloat);
}

namespace {

// Of hidden states that predict some response tokens, and which of the micro-batch's these are: a number of each.
using NumbersOfRows = std::function<at::Tensor(const at::Tensor& states, const at::Tensor& which)>;

// Each rank computes those of its rows, all get all, back in the order of the micro-batch.
at::Tensor numbers_of_parts(const Model& model, const at::Tensor& hidden, const MicroBatch& batch,
                            const NumbersOfRows& compute) {
  Communicator& group = *model.options().context;
  const PackedBatch part = context_part(model, batch.input);
  const ContextRows& context = *part.context;
  const auto ranks = static_cast<size_t>(group.size()), own = static_cast<size_t>(group.rank());
  std::vector<int64_t> begins(ranks + 1, 0), counts(ranks, 0), owner, number, taken, which;
  for (size_t r = 0; r < ranks; ++r) begins[r + 1] = begins[r] + context.counts[r];
  const auto* rows = batch.rows.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < batch.rows.size(0); ++t) {
    const int64_t place = context.places[static_cast<size_t>(rows[t])];
    const auto r = static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), place) - begins.begin() - 1);
    owner.push_back(static_cast<int64_t>(r));
    number.push_back(counts[r]++);
    if (r != own) continue;
    taken.push_back(place - begins[r]);
    which.push_back(t);
  }
  std::vector<int64_t> order, before(ranks, 0);
  for (size_t r = 1; r < ranks; ++r) before[r] = before[r - 1] + counts[r - 1];
  for (size_t t = 0; t < owner.size(); ++t) order.push_back(before[static_cast<size_t>(owner[t])] + number[t]);
  const at::Device device = hidden.device();
  const at::Tensor at_rows = at::tensor(taken, at::kLong).to(device), index = at::tensor(which, at::kLong);
  const at::Tensor states = batch.input.prefix.empty() ? hidden.index_select(0, at_rows) : embed(hidden, at_rows);
  return share_rows(group, compute(states, index), counts).index_select(0, at::tensor(order, at::kLong).to(device));
}

}  // namespace

at::Tensor response_logprobs(const Model& model, const MicroBatch& batch, const LogprobOptions& options) {
  const at::Device device = model.options().device;
  PackedBatch input = context_part(model, batch.input);
  input.ids = input.ids.to(device);
  input.positions = input.positions.to(device);
  return response_logprobs(model, model.forward(input), batch, options);
}

namespace {

// The hidden states that predict the response tokens. Where prompts are shared a row may be taken several times: embed
// adds its gradients in one order.
at::Tensor predicting_rows(const at::Tensor& hidden, const MicroBatch& batch) {
  const at::Tensor rows = batch.rows.to(hidden.device());
  return batch.input.prefix.empty() ? hidden.index_select(0, rows) : embed(hidden, rows);
}

}  // namespace

at::Tensor response_logprobs(const Model& model, const at::Tensor& hidden, const MicroBatch& batch,
                             const LogprobOptions& options) {
  if (model.options().context != nullptr) {
    return numbers_of_parts(model, hidden, batch, [&](const at::Tensor& states, const at::Tensor& which) {
      return model.logprobs(states, batch.targets.index_select(0, which).to(hidden.device()), options);
    });
  }
  return model.logprobs(predicting_rows(hidden, batch), batch.targets.to(hidden.device()), options);
}

at::Tensor response_values(const Model& model, const at::Tensor& hidden, const MicroBatch& batch) {
  if (model.options().context != nullptr) {
    return numbers_of_parts(model, hidden, batch,
                            [&](const at::Tensor& states, const at::Tensor&) { return model.values(states); });
  }
  return model.values(predicting_rows(hidden, batch));
}

}  // namespace trireme
