// Bits that only several axes together could change: context ranks under stages, and the sampler's log-probs against
// the loss's over context ranks and shared weights, in bfloat16.
#include <ATen/ATen.h>

#include <cstring>
#include <numeric>

#include "base/fs.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/algorithms/pipeline_step.h"
#include "trainer/model/context_rows.h"
#include "trainer/rollout/engine.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {
namespace {

using testing::eight_heads;
using testing::fill;
using testing::random_tokens;
using testing::same_bits;
using testing::split_options;

ModelOptions frozen(ModelOptions options, at::ScalarType dtype) {
  options.dtype = dtype;
  options.trainable = false;
  return options;
}

// Rows of the micro-batch that this rank computes.
std::vector<int64_t> places_of_own_rows(const Model& model, const PackedBatch& batch) {
  const PackedBatch part = context_part(model, batch);
  if (part.context) return part.context->rows;
  std::vector<int64_t> all(static_cast<size_t>(batch.tokens()));
  std::iota(all.begin(), all.end(), int64_t{0});
  return all;
}

// Hidden states of own rows, of each micro-batch; undefined but on the last stage.
std::vector<at::Tensor> hidden_states(const Model& model, const std::vector<PackedBatch>& batches) {
  std::vector<at::Tensor> hidden(batches.size());
  PipelineWork work;
  for (const PackedBatch& batch : batches) work.inputs.push_back(&batch);
  work.finish = [&](size_t index, const at::Tensor& of_batch) { return hidden[index] = of_batch; };
  forward_passes(model, work);
  return hidden;
}

// A long sequence that is cut, and short ones; in the second micro-batch one of these has other tokens.
TEST(LayoutBits, ContextRanksUnderStagesHaveThoseOfTheirTensorRanks) {
  ModelConfig config = eight_heads(ModelFamily::kQwen3, true);
  config.num_layers = 4;
  const std::vector<int64_t> lengths = {300, 41, 17, 9};
  constexpr size_t kOther = 1;
  std::vector<PackedBatch> batches;
  for (const bool other : {false, true}) {
    std::vector<std::vector<int32_t>> sequences;
    for (size_t s = 0; s < lengths.size(); ++s)
      sequences.push_back(random_tokens(lengths[s], s + (other && s == kOther ? 100 : 1)));
    batches.push_back(PackedBatch::from_sequences(sequences));
  }
  const int64_t begin = batches[0].starts[kOther], end = batches[0].starts[kOther + 1];
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t tp : {1, 2}) {
      at::Tensor wanted;
      test::on_layout({.tp = tp}, [&](ParallelContext& context) {
        Model model(config, frozen(split_options(context, config), dtype));
        fill(model);
        const std::vector<at::Tensor> hidden = hidden_states(model, batches);
        if (context.is_main()) wanted = hidden[0];
      });
      test::on_layout({.tp = tp, .cp = 2, .pp = 2}, [&](ParallelContext& context) {
        Model model(config, frozen(split_options(context, config), dtype));
        fill(model);
        const std::vector<at::Tensor> hidden = hidden_states(model, batches);
        EXPECT_EQ(hidden[0].defined(), model.split().last_stage());
        if (!hidden[0].defined()) return;
        const std::vector<int64_t> rows = places_of_own_rows(model, batches[0]);
        ASSERT_EQ(hidden[0].size(0), static_cast<int64_t>(rows.size()));
        EXPECT_TRUE(same_bits(hidden[0], wanted.index_select(0, at::tensor(rows, at::kLong))));
        int64_t changed = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
          const auto row = static_cast<int64_t>(i);
          const bool same = same_bits(hidden[1].select(0, row), wanted.select(0, rows[i]));
          const bool inside = rows[i] >= begin && rows[i] < end;
          EXPECT_TRUE(same || inside) << "row " << rows[i];
          changed += same ? 0 : 1;
        }
        EXPECT_GT(context.group(Axis::kCp).all_reduce_sum(static_cast<double>(changed)), 0);
      });
    }
  }
}

// Samples of whole weights, one of them of a prompt that context ranks cut, some ended by a text.
std::vector<GeneratedGroup> sampled(const Model& model, const Tokenizer& tokenizer, const SamplingOptions& sampling) {
  Engine engine(model, &tokenizer, {.cache_rows = 3000}, sampling);
  engine.take_cache();
  for (const int64_t length : {290, 20, 5}) {
    GroupRequest request;
    request.group_id = length;
    request.prompt = random_tokens(length, static_cast<uint64_t>(length));
    request.samples = 3;
    request.first_sample_id = static_cast<uint64_t>(10 * length);
    engine.submit(std::move(request));
  }
  return engine.run();
}

struct Compared {
  double tokens = 0, differing = 0;
};

// The log-probs of own rows of the samples, each beside another sequence, against the sampler's.
Compared compare(const Model& model, const std::vector<GeneratedGroup>& groups, const LogprobOptions& options) {
  std::vector<PackedBatch> batches;
  std::vector<std::pair<int64_t, const GeneratedSample*>> made;  // the row of the first token's log-prob
  for (const GeneratedGroup& group : groups) {
    for (const GeneratedSample& sample : group.samples) {
      std::vector<int32_t> tokens = group.prompt;
      tokens.insert(tokens.end(), sample.response.begin(), sample.response.end());
      batches.push_back(PackedBatch::from_sequences({random_tokens(11, 3), tokens}));
      made.emplace_back(11 + static_cast<int64_t>(group.prompt.size()) - 1, &sample);
    }
  }
  Compared compared;
  PipelineWork work;
  for (const PackedBatch& batch : batches) work.inputs.push_back(&batch);
  work.finish = [&](size_t index, const at::Tensor& hidden) {
    const std::vector<int64_t> rows = places_of_own_rows(model, batches[index]);
    const at::Tensor targets = batches[index].ids.roll(-1).index_select(0, at::tensor(rows, at::kLong));
    const at::Tensor logprobs = model.logprobs(hidden, targets, options).to(at::kFloat).contiguous();
    const auto& [first, sample] = made[index];
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t token = rows[i] - first;
      if (token < 0 || token >= static_cast<int64_t>(sample->logprobs.size())) continue;
      const float* of_sampler = &sample->logprobs[static_cast<size_t>(token)];
      ++compared.tokens;
      compared.differing += std::memcmp(logprobs.const_data_ptr<float>() + i, of_sampler, sizeof(float)) != 0 ? 1 : 0;
    }
    return logprobs;
  };
  forward_passes(model, work);
  return compared;
}

TEST(LayoutBits, SamplesHaveTheLossesOverContextRanksAndSharedWeights) {
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path());
  const auto tokenizer = Tokenizer::load(dir.path());
  const ModelConfig config = eight_heads(ModelFamily::kQwen3, true);
  SamplingOptions sampling;
  sampling.seed = 7;
  sampling.temperature = 0.8;
  sampling.max_new_tokens = 13;
  sampling.stop_strings = {"3", " ,", "(", ".", "*", "1", "7", "&"};
  struct Case {
    Layout layout;
    bool shared;
  };
  for (const auto& [layout, shared] : {Case{{.cp = 2}, false},
                                       {{.tp = 2}, false},
                                       {{.tp = 2, .cp = 2}, false},
                                       {{.dp = 2}, true},
                                       {{.tp = 2, .dp = 2}, true},
                                       {{.cp = 2, .dp = 2}, true}}) {
    SCOPED_TRACE(to_string(layout) + (shared ? ", shared weights" : ""));
    test::on_layout(layout, [&, shared = shared](ParallelContext& context) {
      ModelOptions options = frozen(split_options(context, config), at::kBFloat16);
      if (shared) {
        options.sharding = {
            .gradients = true, .weights = true, .ranks = &context.data_parallel(), .bucket_elements = 3000};
      }
      Model model(config, options);
      fill(model);
      const std::vector<GeneratedGroup> groups = sampled(model, *tokenizer, sampling);
      if (ShardedUnits* units = model.units()) {
        units->cut();
        units->release();
      }
      int64_t tokens = 0, by_text = 0;
      for (const GeneratedGroup& group : groups) {
        for (const GeneratedSample& sample : group.samples) {
          tokens += static_cast<int64_t>(sample.response.size());
          by_text += sample.response.size() < 13 ? 1 : 0;
        }
      }
      EXPECT_GT(by_text, 0) << "no sample was ended by a text";
      const Compared compared = compare(model, groups, sampling.logprob_options());
      EXPECT_EQ(compared.differing, 0);
      EXPECT_EQ(context.group(Axis::kCp).all_reduce_sum(compared.tokens), static_cast<double>(tokens));
    });
  }
}

}  // namespace
}  // namespace trireme
