#include "trainer/bench/exchange_bench.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "trainer/parallel/device.h"
#include "trainer/parallel/exchange.h"
#include "trainer/parallel/flat_bytes.h"
#include "trainer/parallel/peer_exchange.h"

namespace trireme::bench {
namespace {

constexpr int64_t kInGraph = 16;  // exchanges in a graph
constexpr double kEps = 1e-6;

std::string microseconds(double seconds) { return format_fixed(seconds * 1e6, 2); }
std::string gigabytes(double bytes_per_second) { return format_fixed(bytes_per_second / 1e9, 1) + " GB/s"; }

class ExchangeBench final {
 public:
  ExchangeBench(const ExchangeBenchOptions& options, ParallelContext& context)
      : options_(options),
        context_(context),
        group_(context.tensor_parallel()),
        target_(resolve(options.common)),
        width_(target_.config.hidden_size),
        over_memory_(group_.peers(target_.device) != nullptr) {}

  nlohmann::json run(std::ostream& out) {
    nlohmann::json small = nlohmann::json::array(), large = nlohmann::json::array();
    Table table({"rows x " + std::to_string(width_), "norm alone, us", "communicator, norm", "exchange",
                 "exchange, addition, norm", "elements that differ"});
    for (const int64_t rows : options_.rows) small.push_back(small_row(rows, table));
    Table training({"exchange of " + std::to_string(options_.large_mebibytes) + " MiB", "us", "a device sends",
                    "elements that differ"});
    large_row("gather_rows", large, training);
    large_row("sum_to_rows", large, training);
    nlohmann::json report = report_header("exchange", options_.common, target_);
    report.update({{"ranks", group_.size()}, {"over_memory", over_memory_}, {"small", small}, {"large", large}});
    if (!context_.is_main()) return report;
    out << "exchanges over " << (over_memory_ ? "the devices' memory" : "the communicator") << ", " << group_.size()
        << " ranks\n";
    table.print(out);
    out << "\n";
    training.print(out);
    write_report(options_.common, report);
    return report;
  }

 private:
  // Values of both signs over many magnitudes, pairs of negative zeros among them; other ones on each rank.
  at::Tensor draw(int64_t rows, int64_t salt) const {
    const at::Tensor at = at::arange(rows * width_, at::TensorOptions(target_.device).dtype(at::kDouble));
    const at::Tensor values =
        (at * (0.7 + 0.1 * group_.rank() + 0.01 * static_cast<double>(salt))).sin() * ((at * 0.013).cos() * 6).exp();
    at::Tensor drawn = values.view({rows, width_}).to(target_.dtype);
    drawn.narrow(1, 0, 2).fill_(-0.0);
    return drawn;
  }

  // The definition, of parts that come whole.
  at::Tensor defined_sum(const at::Tensor& partial) {
    std::vector<int64_t> sizes = partial.sizes().vec();
    sizes.insert(sizes.begin(), group_.size());
    at::Tensor parts = at::empty(sizes, partial.options());
    group_.all_gather(flat_bytes(parts), flat_bytes(partial.contiguous()));
    return ordered_sum(parts);
  }

  int64_t differing(const at::Tensor& one, const at::Tensor& other) {
    const at::ScalarType bits = one.element_size() == 2 ? at::kShort : one.element_size() == 4 ? at::kInt : at::kLong;
    const auto own = one.contiguous().view(bits).ne(other.contiguous().view(bits)).sum().item<int64_t>();
    return context_.world().all_reduce_sum(own);
  }

  // The same number of calls on all ranks; of the slowest.
  double seconds(const std::function<void()>& call, bool in_graph) {
    context_.world().barrier();
    return context_.world().all_reduce_max(counted_seconds_per_call(target_.device, call, in_graph ? kInGraph : 0));
  }

  nlohmann::json small_row(int64_t rows, Table& table) {
    const at::NoGradGuard no_grad;
    const at::Tensor x = draw(rows, 5), partial = draw(rows, 1);
    const at::Tensor scale = draw(1, 3).view({width_});
    const at::Tensor sum = defined_sum(partial);
    const NormResult expected = add_rms_norm(x, sum, scale, kEps);
    const NormResult found = sum_add_rms_norm(group_, x, partial, scale, kEps);
    const int64_t differ = differing(found.sum, expected.sum) + differing(found.normed, expected.normed) +
                           differing(sum_rows(group_, partial), sum);
    const bool graphs = over_memory_;
    const double norm = seconds([&] { (void)add_rms_norm(x, sum, scale, kEps); }, target_.device.is_cuda());
    const double communicator = seconds(
        [&] {
          at::Tensor reduced = partial.clone();
          group_.all_reduce_sum(reduced);
          (void)add_rms_norm(x, reduced, scale, kEps);
        },
        false);
    const double bare = seconds([&] { (void)sum_rows(group_, partial); }, graphs);
    const double fused = seconds([&] { (void)sum_add_rms_norm(group_, x, partial, scale, kEps); }, graphs);
    table.add({std::to_string(rows), microseconds(norm), microseconds(communicator), microseconds(bare),
               microseconds(fused), std::to_string(differ)});
    return {{"rows", rows},
            {"width", width_},
            {"norm_microseconds", norm * 1e6},
            {"communicator_microseconds", communicator * 1e6},
            {"exchange_microseconds", bare * 1e6},
            {"fused_microseconds", fused * 1e6},
            {"differing", differ}};
  }

  void large_row(const std::string& name, nlohmann::json& rows, Table& table) {
    const at::NoGradGuard no_grad;
    const int64_t ranks = group_.size(), row_bytes = width_ * target_.element_bytes;
    const int64_t own = std::max<int64_t>(1, (options_.large_mebibytes << 20) / row_bytes / ranks);
    const bool gather = name == "gather_rows";
    const at::Tensor in = draw(gather ? own : own * ranks, 2);
    const auto call = [&] { return gather ? gather_rows(group_, in) : sum_to_rows(group_, in); };
    int64_t differ = 0;
    if (gather) {
      at::Tensor whole = at::empty({own * ranks, width_}, in.options());
      group_.all_gather(flat_bytes(whole), flat_bytes(in));
      differ = differing_but_zeros(call(), whole);
    } else {
      differ = differing(call(), defined_sum(in).narrow(0, own * group_.rank(), own));
    }
    const double time = seconds([&] { (void)call(); }, over_memory_);
    const double sent = static_cast<double>(own * row_bytes * (ranks - 1));
    table.add({name, microseconds(time), gigabytes(sent / time), std::to_string(differ)});
    rows.push_back({{"name", name}, {"microseconds", time * 1e6}, {"bytes_sent", sent}, {"differing", differ}});
  }

  // Rows that travel over memory lose the sign of a pair of negative zeros.
  int64_t differing_but_zeros(const at::Tensor& one, const at::Tensor& other) {
    const auto own = at::ne(one, other).sum().item<int64_t>();
    return context_.world().all_reduce_sum(own);
  }

  const ExchangeBenchOptions& options_;
  ParallelContext& context_;
  Communicator& group_;
  const Target target_;
  const int64_t width_;
  const bool over_memory_;
};

}  // namespace

nlohmann::json bench_exchange(const ExchangeBenchOptions& options, ParallelContext& context, std::ostream& out) {
  if (context.tensor_parallel().size() < 2)
    fail_user("bench exchange needs at least two ranks (trireme launch --nproc-per-node 2 -- bench exchange --tp 2)");
  if (options.rows.empty() || *std::min_element(options.rows.begin(), options.rows.end()) < 1)
    fail_user("--rows needs numbers of rows above 0");
  return ExchangeBench(options, context).run(out);
}

}  // namespace trireme::bench
