#include "trainer/bench/ops_bench.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "topology/combine_blocks.h"
#include "trainer/bench/work.h"
#include "trainer/model/parameter_layout.h"
#include "trainer/ops/expert_rows.h"
#include "trainer/ops/experts.h"
#include "trainer/ops/ops.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/communicator.h"

namespace trireme::bench {
namespace {

// Inputs are taken in turn from so many bytes of them, more than a cache holds.
constexpr double kCacheBytes = 256e6;
constexpr int64_t kMostCopies = 16;
constexpr int64_t kAdamLayers = 2;

// Widths as a model holds them there.
ModelConfig held_on(const Target& target) {
  ModelConfig config = target.config;
  if (!target.device.is_cuda()) return config;
  config.hidden_size = padded_width(config.hidden_size);
  config.intermediate_size = padded_width(config.intermediate_size);
  return config;
}

class OpsBench final {
 public:
  OpsBench(const OpsBenchOptions& options, std::ostream& out)
      : options_(options),
        target_(resolve(options.common)),
        c_(held_on(target_)),
        ceilings_(measure_ceilings(target_.device, target_.dtype)),
        out_(out),
        element_(real(target_.element_bytes)),
        q_(c_.num_heads * c_.head_dim),
        kv_(c_.num_kv_heads * c_.head_dim) {
    for (const int64_t rows : options.rows) {
      if (rows < 1) fail_user("--rows " + std::to_string(rows) + " is not a number of rows");
    }
    for (const int64_t samples : options.decode_samples) {
      if (samples < 1) fail_user("--decode-samples " + std::to_string(samples) + " is not a number of samples");
    }
    if (options.decode_context < 1) fail_user("--decode-context must be at least 1");
    if (options.packed_tokens < 16) fail_user("--packed-tokens must be at least 16");
  }

  nlohmann::json run() {
    {
      const at::NoGradGuard no_grad;
      linears();
      row_ops();
      vocabulary();
      decode_attention();
    }
    if (c_.num_experts > 0) experts();
    packed_attention();
    adamw();
    nlohmann::json report = report_header("ops", options_.common, target_);
    report.update({{"copy_bytes_per_second", ceilings_.copy_bytes_per_second},
                   {"read_bytes_per_second", ceilings_.read_bytes_per_second},
                   {"matmul_flops_per_second", ceilings_.flops_per_second},
                   {"ops", entries_}});
    out_ << "copy or read " << terabytes(ceilings_.bytes_per_second()) << ", product "
         << teraflops(ceilings_.flops_per_second) << "\n";
    table_.print(out_);
    write_report(options_.common, report);
    return report;
  }

 private:
  at::Tensor random(std::vector<int64_t> sizes) const {
    return at::empty(sizes, at::TensorOptions().dtype(target_.dtype).device(target_.device)).normal_(0.0, 0.02);
  }

  // As many tensors of one shape as exceed the caches.
  std::vector<at::Tensor> copies(const std::vector<int64_t>& sizes) const {
    int64_t elements = 1;
    for (const int64_t size : sizes) elements *= size;
    const int64_t count =
        std::clamp<int64_t>(static_cast<int64_t>(kCacheBytes / (real(elements) * element_)) + 1, 1, kMostCopies);
    std::vector<at::Tensor> result;
    for (int64_t i = 0; i < count; ++i) result.push_back(random(sizes));
    return result;
  }

  void add(const std::string& name, double bytes, double flops, const std::function<void(int64_t)>& call) {
    const double seconds = seconds_per_call(target_.device, call);
    const double floor = floor_seconds(ceilings_, bytes, flops);
    entries_.push_back({{"name", name},
                        {"microseconds", seconds * 1e6},
                        {"floor_microseconds", floor * 1e6},
                        {"bytes", bytes},
                        {"flops", flops},
                        {"bytes_per_second", bytes / seconds},
                        {"flops_per_second", flops / seconds}});
    table_.add({name, format_fixed(seconds * 1e6, 1), format_fixed(floor * 1e6, 1),
                format_fixed(bytes / seconds / 1e12, 3), format_fixed(flops / seconds / 1e12, 1),
                percent(floor, seconds)});
  }

  void linears() {
    struct Product {
      const char* name;
      int64_t in, out;
    };
    std::vector<Product> shapes = {{"qkv", c_.hidden_size, q_ + 2 * kv_}, {"output", q_, c_.hidden_size}};
    if (c_.layers_with_experts() < c_.num_layers) {
      shapes.push_back({"gate_up", c_.hidden_size, 2 * c_.intermediate_size});
      shapes.push_back({"down", c_.intermediate_size, c_.hidden_size});
    }
    for (const auto& shape : shapes) {
      const std::vector<at::Tensor> weights = copies({shape.out, shape.in});
      for (const int64_t rows : options_.rows) {
        const at::Tensor x = random({rows, shape.in});
        add(std::string("linear ") + shape.name + " " + std::to_string(shape.out) + "x" + std::to_string(shape.in) +
                ", " + std::to_string(rows) + " rows",
            element_ * real(shape.out * shape.in + rows * (shape.in + shape.out)),
            2 * real(rows) * real(shape.in) * real(shape.out),
            [&](int64_t i) { trireme::linear(x, weights[static_cast<size_t>(i) % weights.size()], at::Tensor()); });
      }
    }
  }

  // The parts of a layer's experts for rows that choose evenly, then all of it. Bytes: matrices of the experts that
  // were chosen, and rows; operations of the chosen experts.
  void experts() {
    const int64_t hidden = c_.hidden_size, width = c_.moe_intermediate_size, k = c_.experts_per_token;
    const ExpertShape shape{.experts = c_.num_experts,
                            .per_token = k,
                            .normalize = c_.normalize_experts,
                            .wide_router = true,
                            .combine_blocks = combine_blocks(c_.num_experts, 0)};
    ExpertWeights weights{random({c_.num_experts, hidden}), random({c_.num_experts * 2 * width, hidden}),
                          random({c_.num_experts * hidden, width})};
    std::vector<int64_t> counts = options_.rows;
    counts.push_back(options_.packed_tokens);
    for (const int64_t rows : counts) {
      const std::string suffix = ", " + std::to_string(rows) + " rows";
      at::Tensor x = random({rows, hidden});
      const at::AutoGradMode record(rows == options_.packed_tokens);
      const Routes routes = route(x, weights.router, shape);
      const double matrix = real(std::get<0>(at::_unique(routes.experts)).numel() * width * hidden),
                   sorted = real(rows * k);
      const at::Tensor gathered = gather_rows_by(x, routes.rows), active = random({rows * k, width});
      const at::Tensor y = grouped_linear(active, weights.down, routes.offsets, rows);
      add("route" + suffix, element_ * real(rows * hidden + c_.num_experts * hidden), 0,
          [&](int64_t) { (void)route(x, weights.router, shape); });
      add("gather" + suffix, 2 * element_ * sorted * real(hidden), 0,
          [&](int64_t) { (void)gather_rows_by(x, routes.rows); });
      add("route and gather" + suffix, element_ * (real((rows + c_.num_experts) * hidden) + sorted * real(hidden)), 0,
          [&](int64_t) {
            at::Tensor into;
            (void)route(x, weights.router, shape, false, &into);
          });
      add("combine" + suffix, element_ * (sorted + real(rows)) * real(hidden), 0,
          [&](int64_t) { (void)combine(y, routes, shape); });
      const double products = 2 * sorted * real(hidden * width);
      add("experts gate_up" + suffix, element_ * (2 * matrix + sorted * real(hidden + 2 * width)), 2 * products,
          [&](int64_t) { (void)grouped_linear(gathered, weights.gate_up, routes.offsets, rows); });
      add("experts down" + suffix, element_ * (matrix + sorted * real(hidden + width)), products,
          [&](int64_t) { (void)grouped_linear(active, weights.down, routes.offsets, rows); });
      const double bytes = element_ * (3 * matrix + 2 * real(rows * hidden));
      {
        const at::NoGradGuard no_grad;
        add("mixture of experts" + suffix, bytes, 3 * products,
            [&](int64_t) { (void)mixture_of_experts(x, weights, shape); });
      }
      if (rows != options_.packed_tokens) continue;
      x.set_requires_grad(true);
      weights.gate_up.set_requires_grad(true);
      weights.down.set_requires_grad(true);
      for (at::Tensor* weight : {&weights.gate_up, &weights.down}) {
        weight->set_grad_dtype(at::kFloat);
        weight->mutable_grad() = at::zeros(weight->sizes(), weight->options().dtype(at::kFloat));
      }
      const at::Tensor upstream = random({rows, hidden});
      add("mixture of experts, forward and backward" + suffix, 3 * bytes, 9 * products,
          [&](int64_t) { torch::autograd::backward({mixture_of_experts(x, weights, shape)}, {upstream}); });
    }
  }

  void row_ops() {
    const at::Tensor weight = random({c_.hidden_size}), head_norm = random({c_.head_dim});
    const QkvLayout layout{c_.num_heads, c_.num_kv_heads, c_.head_dim, c_.rms_norm_eps};
    for (const int64_t rows : {*std::min_element(options_.rows.begin(), options_.rows.end()),
                               *std::max_element(options_.rows.begin(), options_.rows.end())}) {
      const std::string suffix = ", " + std::to_string(rows) + " rows";
      {
        const at::Tensor x = random({rows, c_.hidden_size}), delta = random({rows, c_.hidden_size});
        add("add_rms_norm" + suffix, 4 * element_ * real(rows * c_.hidden_size), 0,
            [&](int64_t) { add_rms_norm(x, delta, weight, c_.rms_norm_eps); });
      }
      {
        const at::Tensor gate_up = random({rows, 2 * c_.intermediate_size});
        add("swiglu_halves" + suffix, 3 * element_ * real(rows * c_.intermediate_size), 0,
            [&](int64_t) { swiglu_halves(gate_up); });
      }
      const at::Tensor qkv = random({rows, q_ + 2 * kv_});
      const at::Tensor table =
          rope_table(at::arange(rows, at::kLong), c_.rope, target_.dtype == at::kDouble ? at::kDouble : at::kFloat)
              .to(target_.device);
      const at::Tensor positions = at::arange(rows, at::TensorOptions().dtype(at::kLong).device(target_.device));
      const at::Tensor norm = c_.qk_norm ? head_norm : at::Tensor();
      // v may stay where it is.
      add("split_qkv" + suffix, element_ * real(rows * 2 * (q_ + kv_)), 0,
          [&](int64_t) { split_qkv(qkv, norm, norm, table, positions, layout); });
    }
  }

  void vocabulary() {
    const at::Tensor head = random({c_.vocab_size, c_.hidden_size});
    const double head_bytes = element_ * real(c_.vocab_size * c_.hidden_size);
    for (const int64_t rows : options_.rows) {
      const at::Tensor hidden = random({rows, c_.hidden_size});
      const at::Tensor targets =
          at::arange(rows, at::TensorOptions().dtype(at::kLong).device(target_.device)).remainder(c_.vocab_size);
      const LogprobOptions distribution;
      const double flops = 2 * real(rows) * real(c_.hidden_size) * real(c_.vocab_size);
      add("token_logprobs " + std::to_string(c_.vocab_size) + "x" + std::to_string(c_.hidden_size) + ", " +
              std::to_string(rows) + " rows",
          head_bytes + element_ * real(rows * c_.hidden_size), flops,
          [&](int64_t) { token_logprobs(hidden, head, targets, distribution); });
    }
  }

  void decode_attention() {
    const int64_t context = options_.decode_context, group = c_.num_heads / c_.num_kv_heads;
    for (const int64_t samples : options_.decode_samples) {
      const std::vector<at::Tensor> keys = copies({samples * context, c_.num_kv_heads, c_.head_dim});
      const std::vector<at::Tensor> values = copies({samples * context, c_.num_kv_heads, c_.head_dim});
      const at::Tensor q = random({samples, c_.num_heads, c_.head_dim});
      std::vector<CacheRun> runs;
      for (int64_t s = 0; s < samples; ++s) runs.push_back({s * context, context - 1, 1});
      const CachePlan plan = make_cache_plan(std::move(runs), group, target_.device);
      add("attention decode, " + std::to_string(samples) + " samples, context " + std::to_string(context),
          element_ * real(2 * samples * context * kv_ + 2 * samples * q_), 4 * real(samples * context) * real(q_),
          [&](int64_t i) {
            const size_t at = static_cast<size_t>(i) % keys.size();
            attention_cached(q, keys[at], values[at], plan);
          });
    }
  }

  void packed_attention() {
    for (const int64_t sequences : {16, 4, 1}) {
      const int64_t length = options_.packed_tokens / sequences, tokens = length * sequences;
      std::vector<int64_t> starts;
      for (int64_t s = 0; s <= sequences; ++s) starts.push_back(s * length);
      at::Tensor q = random({tokens, c_.num_heads, c_.head_dim});
      at::Tensor k = random({tokens, c_.num_kv_heads, c_.head_dim}), v = random({tokens, c_.num_kv_heads, c_.head_dim});
      const double flops = real(sequences) * 2 * real(q_) * real(length) * real(length + 1);
      const double bytes = element_ * real(tokens * (2 * q_ + 2 * kv_));
      const std::string name = "attention packed, " + std::to_string(sequences) + " x " + std::to_string(length);
      {
        const at::NoGradGuard no_grad;
        add(name + ", forward", bytes, flops, [&](int64_t) { attention_packed(q, k, v, starts); });
      }
      for (at::Tensor* input : {&q, &k, &v}) input->set_requires_grad(true);
      const at::Tensor gradient = random({tokens, c_.num_heads, c_.head_dim});
      add(name + ", forward and backward", 3 * bytes, 3 * flops, [&](int64_t) {
        torch::autograd::grad({attention_packed(q, k, v, starts)}, {q, k, v}, {gradient});
      });
    }
  }

  // Everything in float32 but the live weights: reads the gradient for its norm and again for the update, zeroes it,
  // reads and writes master weight and two moments; the live weight is written unless it is the master.
  void adamw() {
    ModelConfig config = c_;
    config.num_layers = std::min(config.num_layers, kAdamLayers);
    ModelOptions model_options = target_.model_options(/*trainable=*/true);
    model_options.gradient_dtype = at::kFloat;
    const std::unique_ptr<Model> model = make_random_model(config, model_options, options_.common.seed);
    {
      const at::NoGradGuard no_grad;
      model->flat_gradients().fill_(1e-3);
    }
    Communicator alone;
    DistributedAdamW optimizer(*model, alone, AdamWOptions());
    const double bytes = 24 + 12 + (target_.dtype == at::kFloat ? 0 : element_);
    add("adamw, " + std::to_string(config.parameter_count()) + " parameters", bytes * real(config.parameter_count()), 0,
        [&](int64_t) { optimizer.step(1e-6, 0.01, 1.0); });
  }

  const OpsBenchOptions& options_;
  const Target target_;
  const ModelConfig c_;
  const Ceilings ceilings_;
  std::ostream& out_;
  const double element_;
  const int64_t q_, kv_;
  Table table_{{"op", "us", "floor us", "TB/s", "TFLOP/s", "of the floor"}};
  nlohmann::json entries_ = nlohmann::json::array();
};

}  // namespace

nlohmann::json bench_ops(const OpsBenchOptions& options, std::ostream& out) { return OpsBench(options, out).run(); }

}  // namespace trireme::bench
