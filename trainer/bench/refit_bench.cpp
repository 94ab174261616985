#include "trainer/bench/refit_bench.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <future>
#include <optional>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "topology/rates.h"
#include "trainer/model/weight_view.h"
#include "trainer/parallel/device.h"

namespace trireme::bench {
namespace {

constexpr int64_t kPassRows = 64;  // a pass takes the time of reading the weights, as a decode step does

// Of the slowest engine.
struct Hand {
  double transfer_seconds = 0;  // of the bytes
  double whole_seconds = 0;     // from the question to the weights in the second buffer
  double stall_seconds = 0;     // in which decoding cannot run
  double pass_seconds = 0;      // of a forward pass beside it, of an engine; 0: none was made
};

class RefitBench final {
 public:
  RefitBench(const RefitBenchOptions& options, ParallelContext& context)
      : options_(options),
        context_(context),
        target_(resolve(options.common)),
        engine_(context.rank() - 1),
        model_(make_random_model(target_.config, target_.model_options(/*trainable=*/false),
                                 options.common.seed + static_cast<uint64_t>(context.rank()))) {
    WeightLinkOptions link = options.link;
    link.actor_rank = 0;
    link.actor_ranks = 1;
    link.engine = std::max<int64_t>(0, engine_);
    link.verify_weights_period = 0;
    link.second_buffer = options.second_buffer;
    std::vector<int32_t> ids(kPassRows);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i) % 256;
    batch_ = PackedBatch::from_sequences({ids});
    batch_.ids = batch_.ids.to(target_.device);
    batch_.positions = batch_.positions.to(target_.device);
    if (sends())
      sender_ = std::make_unique<WeightSender>(link, weight_view(*model_));
    else
      receiver_ = std::make_unique<WeightReceiver>(link, weight_view(*model_));
  }

  nlohmann::json run(std::ostream& out) {
    context_.set_phase("benchmark");
    const Ceilings ceilings = measure_ceilings(target_.device, target_.dtype);
    const bool stops = worst(receiver_ && receiver_->needs_stop() ? 1 : 0) > 0;
    pass();
    const double quiet_pass = worst(sends() ? 0 : pass());
    const Hand first = hand_over(/*beside=*/false);
    std::vector<Hand> quiet, beside;
    for (int64_t r = 0; r < options_.common.repeats; ++r) quiet.push_back(hand_over(/*beside=*/false));
    if (!stops)
      for (int64_t r = 0; r < options_.common.repeats; ++r) beside.push_back(hand_over(/*beside=*/true));
    const bool same = same_bits();
    nlohmann::json json = report(ceilings, stops, quiet_pass, first, quiet, beside);
    json["same_bits"] = same;
    if (context_.is_main()) {
      print(json, out);
      write_report(options_.common, json);
    }
    context_.world().barrier();  // engines leave before who serves them
    if (!same) fail_internal("an engine has other weights than were sent");
    return json;
  }

 private:
  bool sends() const { return context_.is_main(); }
  double worst(double own) { return context_.world().all_reduce_max(own); }
  std::string link(int64_t engine) const { return "bench-" + std::to_string(engine); }

  double pass() {
    const c10::NoGradGuard no_grad;
    const Stopwatch watch;
    (void)model_->forward(batch_);
    synchronize(target_.device);
    return watch.seconds();
  }

  // Passes until `done`, at least one. Seconds of one in the mean.
  template <typename Done>
  double passes_until(Done done) {
    double seconds = 0;
    int64_t count = 0;
    do {
      seconds += pass();
      ++count;
    } while (!done());
    return seconds / static_cast<double>(count);
  }

  Hand hand_over(bool beside) {
    synchronize(target_.device);
    context_.world().barrier();
    Hand hand;
    ++version_;
    if (sends()) {
      (void)sender_->take_transfer_seconds();  // of the transfers before
      sender_->publish(version_);
      for (int64_t engine = 0; engine + 1 < context_.world_size(); ++engine) sender_->serve(engine, link(engine));
      const Deadline deadline = Deadline::after(options_.link.deadline);
      if (beside) (void)passes_until([&] { return sender_->take_transfer_seconds() > 0 || deadline.passed(); });
    } else {
      receive(beside, hand);
    }
    context_.world().barrier();
    if (sends()) sender_->retract();
    return {worst(hand.transfer_seconds), worst(hand.whole_seconds), worst(hand.stall_seconds),
            worst(hand.pass_seconds)};
  }

  void receive(bool beside, Hand& hand) {
    const Stopwatch watch;
    const auto fetch = [&] {
      TRIREME_CHECK(receiver_->fetch(link(engine_), 0) == version_, "other weights than the newest came");
    };
    if (beside) {
      std::future<void> fetched = std::async(std::launch::async, fetch);
      hand.pass_seconds = passes_until([&] { return fetched.wait_for(Milliseconds(0)) == std::future_status::ready; });
      fetched.get();
    } else {
      fetch();
    }
    hand.whole_seconds = watch.seconds();
    hand.transfer_seconds = receiver_->last().seconds;
    synchronize(target_.device);
    const Stopwatch stall;
    receiver_->apply();
    synchronize(target_.device);
    hand.stall_seconds = receiver_->needs_stop() ? hand.whole_seconds : stall.seconds();
  }

  bool same_bits() {
    const std::vector<std::string> sums =
        context_.world().all_gather_bytes(std::to_string(weight_checksum(model_->flat_parameters())));
    return std::all_of(sums.begin(), sums.end(), [&](const std::string& sum) { return sum == sums.front(); });
  }

  // By the rates of a plan; nothing: of this device none are known.
  std::optional<double> predicted_transfer(double bytes) const {
    if (!target_.device.is_cuda()) return std::nullopt;
    for (const std::string& name : known_device_rates())
      if (to_lower(machine_name(target_.device)).find(name) != std::string::npos)
        return device_rates(name)->in_node.seconds(bytes);
    return std::nullopt;
  }

  nlohmann::json report(const Ceilings& ceilings, bool stops, double quiet_pass, const Hand& first,
                        const std::vector<Hand>& quiet, const std::vector<Hand>& beside) const {
    const auto all = [](const std::vector<Hand>& hands, double Hand::*what) {
      std::vector<double> values;
      for (const Hand& hand : hands) values.push_back(hand.*what);
      return values;
    };
    const auto bytes = static_cast<double>(model_->flat_parameters().nbytes());
    const double transfer = median(all(quiet, &Hand::transfer_seconds));
    nlohmann::json json = report_header("refit", options_.common, target_);
    json.update({{"ranks", context_.world_size()},
                 {"bytes", model_->flat_parameters().nbytes()},
                 {"second_buffer", !stops},
                 {"first_seconds", first.whole_seconds},
                 {"transfer_seconds", transfer},
                 {"transfer_seconds_of_repeats", all(quiet, &Hand::transfer_seconds)},
                 {"bytes_per_second", bytes / transfer},
                 {"whole_seconds", median(all(quiet, &Hand::whole_seconds))},
                 {"stall_seconds", median(all(quiet, &Hand::stall_seconds))},
                 {"stall_seconds_of_repeats", all(quiet, &Hand::stall_seconds)},
                 {"copy_bytes_per_second", ceilings.copy_bytes_per_second},
                 {"forward_seconds", quiet_pass}});
    if (!stops) json["predicted_stall_seconds"] = 2 * bytes / ceilings.copy_bytes_per_second;
    if (const auto predicted = predicted_transfer(bytes)) json["predicted_transfer_seconds"] = *predicted;
    if (!beside.empty()) {
      json.update({{"transfer_seconds_beside", median(all(beside, &Hand::transfer_seconds))},
                   {"stall_seconds_beside", median(all(beside, &Hand::stall_seconds))},
                   {"forward_seconds_beside", median(all(beside, &Hand::pass_seconds))}});
    }
    return json;
  }

  void print(const nlohmann::json& json, std::ostream& out) const {
    const auto ms = [&](const char* key) {
      return json.contains(key) ? format_fixed(1e3 * json.at(key).get<double>(), 2) : std::string("-");
    };
    Table table({"weights of " + options_.common.shape + " to " + std::to_string(context_.world_size() - 1) +
                     " other process" + (context_.world_size() > 2 ? "es" : ""),
                 "ms", "predicted", "beside passes"});
    table.add({"transfer", ms("transfer_seconds"), ms("predicted_transfer_seconds"), ms("transfer_seconds_beside")});
    table.add({"decoding stopped", ms("stall_seconds"), ms("predicted_stall_seconds"), ms("stall_seconds_beside")});
    table.add({"from the question to the weights", ms("whole_seconds"), "-", "-"});
    table.add({"the first: connected and compared", ms("first_seconds"), "-", "-"});
    table.add({"a forward pass of " + std::to_string(kPassRows) + " tokens", ms("forward_seconds"), "-",
               ms("forward_seconds_beside")});
    table.print(out);
    out << format_bytes(json.at("bytes").get<uint64_t>()) << " to each, "
        << format_fixed(json.at("bytes_per_second").get<double>() / 1e9, 1) << " GB/s; "
        << (json.at("same_bits").get<bool>() ? "the same bits" : "OTHER BITS") << " on all ranks"
        << (json.at("second_buffer").get<bool>() ? "" : "; without a second buffer") << "\n";
  }

  const RefitBenchOptions& options_;
  ParallelContext& context_;
  const Target target_;
  const int64_t engine_;  // -1: this rank sends
  std::unique_ptr<Model> model_;
  PackedBatch batch_;
  std::unique_ptr<WeightSender> sender_;
  std::unique_ptr<WeightReceiver> receiver_;
  int64_t version_ = 0;
};

}  // namespace

nlohmann::json bench_refit(const RefitBenchOptions& options, ParallelContext& context, std::ostream& out) {
  if (context.world_size() < 2)
    fail_user("bench refit needs at least two ranks (trireme launch --nproc-per-node 2 -- bench refit --shape ...)");
  return RefitBench(options, context).run(out);
}

}  // namespace trireme::bench
