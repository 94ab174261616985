#include "trainer/ops/router_watch.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"

namespace trireme {

namespace {

// Of one token's weight: the gradient by the probabilities of each sequence [sequences, experts] float64.
at::Tensor balance_gradient(const BalanceOptions& balance, const Routes& routes, const ExpertShape& shape,
                            const WatchedRows& rows, const std::function<void(at::Tensor)>& over_ranks) {
  const int64_t sequences = rows.lengths.size(0);
  const at::Tensor places = (rows.sequence.unsqueeze(1) * shape.experts + routes.experts).flatten();
  const at::Tensor own = at::zeros({sequences * shape.experts}, places.options());  // whole numbers: in any order
  own.scatter_add_(0, places, at::ones_like(places));
  if (over_ranks) over_ranks(own);
  at::Tensor chosen = at::mm(rows.of_samples, own.view({sequences, shape.experts}).to(at::kDouble));
  at::Tensor tokens = at::mv(rows.of_samples, rows.lengths);  // of each sample; 0: a prompt alone
  if (balance.kind == BalanceOptions::Kind::kMicroBatch) {
    chosen = chosen.sum(0, /*keepdim=*/true).expand({sequences, shape.experts});
    tokens = tokens.sum().expand({sequences});
  }
  const double factor = balance.coefficient * static_cast<double>(shape.experts) / static_cast<double>(shape.per_token);
  return at::mm(rows.of_samples.t(), chosen * (factor / tokens.clamp_min(1.0)).unsqueeze(1));
}

}  // namespace

WatchedRows WatchedRows::of(const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix,
                            const at::Tensor& rows, at::Device device) {
  const int64_t sequences = starts.empty() ? 0 : static_cast<int64_t>(starts.size()) - 1;
  const at::Tensor of_row = at::empty({starts.empty() ? 0 : starts.back()}, at::kLong),
                   of_samples = at::eye(sequences, at::kDouble);
  const at::Tensor lengths = at::empty({sequences}, at::kDouble);
  for (int64_t s = 0; s < sequences; ++s) {
    const auto index = static_cast<size_t>(s);
    of_row.narrow(0, starts[index], starts[index + 1] - starts[index]).fill_(s);
    lengths[s] = static_cast<double>(starts[index + 1] - starts[index]);
    if (prefix.empty() || prefix[index] < 0) continue;
    of_samples[s][prefix[index]] = 1;
    of_samples[prefix[index]][prefix[index]] = 0;  // a prompt alone is no sample
  }
  return {(rows.defined() ? of_row.index_select(0, rows) : of_row).to(device), of_samples.to(device),
          lengths.to(device)};
}

RouterWatch::RouterWatch(int64_t layers, int64_t experts, const BalanceOptions& balance, at::Device device)
    : balance_(balance),
      sums_{at::zeros({layers, experts + 4}, at::TensorOptions().dtype(at::kDouble).device(device))} {}

at::Tensor RouterWatch::add(int64_t layer, const Routes& routes, const ExpertShape& shape, const WatchedRows& rows) {
  const at::NoGradGuard no_grad;
  const at::Tensor& p = routes.probabilities;
  const bool balanced = balance_.kind != BalanceOptions::Kind::kNone;
  TRIREME_CHECK(p.defined() && (!balanced || rows.sequence.size(0) == p.size(0)),
                "router watch: the rows are others than the routes'");
  const at::Tensor chosen = routes.experts.flatten().to(at::kLong);
  const at::Tensor counts = at::zeros({shape.experts}, chosen.options()).scatter_add_(0, chosen, at::ones_like(chosen));
  const at::Tensor of_layer = sums_.of_layers[layer];
  of_layer.narrow(0, 0, shape.experts) += counts;
  of_layer[shape.experts] += static_cast<double>(p.size(0));
  of_layer[shape.experts + 1] += at::special_entr(p).sum(at::kDouble);
  if (!balanced) return {};
  const at::Tensor gradient = balance_gradient(balance_, routes, shape, rows, over_ranks);
  of_layer[shape.experts + 2] += (p * gradient.index_select(0, rows.sequence)).sum(at::kDouble);
  of_layer[shape.experts + 3] += rows.of_samples.sum(0).index_select(0, rows.sequence).sum();  // of own rows
  return (gradient / valid_tokens_).to(p.scalar_type());
}

std::shared_ptr<const WatchedRows> RouterWatch::rows_of(const std::vector<int64_t>& starts,
                                                        const std::vector<int64_t>& prefix,
                                                        const at::Tensor& rows) const {
  if (balance_.kind == BalanceOptions::Kind::kNone) return std::make_shared<const WatchedRows>();
  return std::make_shared<const WatchedRows>(WatchedRows::of(starts, prefix, rows, sums_.of_layers.device()));
}

RouterSums RouterWatch::take() {
  RouterSums taken{sums_.of_layers.clone()};
  sums_.of_layers.zero_();
  return taken;
}

at::Tensor balance_by_logits(const at::Tensor& gradient, const at::Tensor& sequence, const at::Tensor& probabilities) {
  const at::Tensor scaled = probabilities * gradient.index_select(0, sequence);
  return scaled - probabilities * scaled.sum(1, /*keepdim=*/true);
}

}  // namespace trireme
