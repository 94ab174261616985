#include "trainer/bench/refit_bench.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <future>
#include <map>
#include <optional>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "topology/plan.h"
#include "trainer/model/weight_parts.h"
#include "trainer/model/weight_view.h"
#include "trainer/parallel/device.h"

namespace trireme::bench {
namespace {

constexpr int64_t kPassRows = 64;  // a pass takes the time of reading the weights, as a decode step does

// Of the slowest rank.
struct Hand {
  double transfer_seconds = 0;  // of the bytes
  double whole_seconds = 0;     // from the question to the weights in the second buffer
  double stall_seconds = 0;     // in which decoding cannot run
  double pass_seconds = 0;      // of a forward pass beside it, of an engine; 0: none was made
};

// Of so many ranks.
EngineLayouts layouts_of_both(const RefitBenchOptions& options, int64_t ranks) {
  EngineLayouts layouts{.training = options.training, .engine = options.engine};
  Layout& training = layouts.training;
  const int64_t actors = options.actors > 0 ? options.actors : training.copy_ranks() * training.pp;
  const int64_t each = layouts.engine.world();
  if (ranks < actors + each || (ranks - actors) % each != 0) {
    fail_user("bench refit needs at least " + std::to_string(actors + each) + " ranks, the first " +
              std::to_string(actors) + " to train and " + std::to_string(each) + " for each engine, not " +
              std::to_string(ranks) + ": trireme launch --nproc-per-node " + std::to_string(actors + each) +
              " -- bench refit --shape ...");
  }
  const auto dp = derive_dp(training, actors);
  if (!dp) fail_user("--actors " + std::to_string(actors) + " is no multiple of --tp times --pp");
  training.dp = *dp;
  return layouts;
}

class RefitBench final {
 public:
  RefitBench(const RefitBenchOptions& options, ParallelContext& context, const EngineLayouts& layouts)
      : options_(options),
        context_(context),
        target_(resolve(options.common)),
        layouts_(layouts),
        reader_(context.rank() - layouts.training.world()) {
    make_weights();
    WeightLinkOptions link = options.link;
    link.actor_rank = sends() ? context.rank() : 0;
    link.actor_ranks = layouts.training.world();
    link.engine = std::max<int64_t>(0, reader_);
    link.engine_ranks = each();
    link.verify_weights_period = 0;
    link.second_buffer = options.second_buffer;
    if (!sends()) {
      received_ = parts_->received(reader_ / each(), reader_ % each());
      receiver_ = std::make_unique<WeightReceiver>(link, weights_);
      return;
    }
    WeightRoutes routes;  // every rank of an engine has a number of its own to the links
    routes.sources = [this](int64_t reader) { return parts_->sources(reader / each(), reader % each()); };
    routes.sent = [this](int64_t reader) { return sent_to(reader); };
    for (int64_t reader = 0; reader < readers(); ++reader) {
      const std::vector<int64_t> sources = routes.sources(reader);
      if (std::count(sources.begin(), sources.end(), context.rank()) > 0) served_.push_back(reader);
    }
    sender_ = std::make_unique<WeightSender>(link, weights_, std::move(routes));
  }

  nlohmann::json run(std::ostream& out) {
    context_.set_phase("benchmark");
    const Ceilings ceilings = measure_ceilings(target_.device, target_.dtype);
    const bool stops = worst(receiver_ && receiver_->needs_stop() ? 1 : 0) > 0;
    if (model_) pass();
    const double quiet_pass = worst(model_ && !sends() ? pass() : 0);
    const Hand first = hand_over(/*beside=*/false);
    std::vector<Hand> quiet, beside;
    for (int64_t r = 0; r < options_.common.repeats; ++r) quiet.push_back(hand_over(/*beside=*/false));
    if (!stops && model_)
      for (int64_t r = 0; r < options_.common.repeats; ++r) beside.push_back(hand_over(/*beside=*/true));
    most_bytes_ = static_cast<int64_t>(worst(sends() ? 0 : static_cast<double>(receiver_->last().bytes)));
    most_sources_ = static_cast<int64_t>(worst(static_cast<double>(received_.size())));
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
  bool sends() const { return reader_ < 0; }
  int64_t each() const { return layouts_.engine.world(); }
  int64_t readers() const { return context_.world_size() - layouts_.training.world(); }
  double worst(double own) { return context_.world().all_reduce_max(own); }
  std::string link(int64_t reader) const { return "bench-" + std::to_string(reader); }
  WeightPart sent_to(int64_t reader) const { return parts_->sent(context_.rank(), reader / each(), reader % each()); }

  // A whole model computes; what is only a part of one has its weights alone, which lie as the model's would.
  void make_weights() {
    const ModelShape shape = target_.config.shape();
    for (const Layout& layout : {layouts_.training, layouts_.engine}) {
      const LayoutReport report = check_layout(layout, {.shape = &shape});
      if (!report.ok()) fail_user(to_string(layout) + ": " + report.errors.front());
    }
    const uint64_t seed = options_.common.seed + static_cast<uint64_t>(context_.rank());
    if (group_size(layouts_.training, Axis::kCopyPp) == 1 && each() == 1) {
      model_ = make_random_model(target_.config, target_.model_options(/*trainable=*/false), seed);
      weights_ = weight_view(*model_);
      parts_ = std::make_unique<WeightParts>(*model_, layouts_);
      return make_batch();
    }
    const ModelSplit split = sends() ? model_split(shape, layouts_.training, context_.rank())
                                     : model_split(shape, layouts_.engine, reader_ % each());
    ParameterLayout own =
        parameter_layout(target_.config, split, /*freeze_router=*/true, /*padded=*/target_.device.is_cuda());
    at::manual_seed(seed);
    weights_.flat =
        at::empty({own.elements + own.frozen_elements}, at::TensorOptions().dtype(target_.dtype).device(target_.device))
            .normal_();
    parts_ = std::make_unique<WeightParts>(target_.config, std::move(own.parameters), layouts_, target_.element_bytes);
  }

  void make_batch() {
    std::vector<int32_t> ids(kPassRows);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i) % 256;
    batch_ = PackedBatch::from_sequences({ids});
    batch_.ids = batch_.ids.to(target_.device);
    batch_.positions = batch_.positions.to(target_.device);
  }

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
      for (int64_t reader = 0; context_.is_main() && reader < readers(); ++reader) sender_->serve(reader, link(reader));
      const Deadline deadline = Deadline::after(options_.link.deadline);
      if (beside && !served_.empty())
        (void)passes_until([&] { return sender_->take_transfer_seconds() > 0 || deadline.passed(); });
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
      TRIREME_CHECK(receiver_->fetch(link(reader_), received_) == version_, "other weights than the newest came");
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

  // Of every part both ends say what it is: who sent it to whom, and the checksum of what each has.
  bool same_bits() {
    std::string own;
    const auto add = [&](int64_t reader, const WeightPart& part) {
      const uint64_t sum = part.whole ? weight_checksum(weights_.flat) : part_checksum(weights_.flat, part);
      own += std::to_string(part.actor_rank) + " to " + std::to_string(reader) + ": " + std::to_string(sum) + "\n";
    };
    for (const WeightPart& part : received_) add(reader_, part);
    for (const int64_t reader : served_) add(reader, sent_to(reader));
    std::map<std::string, int> said;
    for (const std::string& lines : context_.world().all_gather_bytes(own))
      for (const std::string& line : split(lines, '\n'))
        if (!line.empty()) ++said[line];
    return std::all_of(said.begin(), said.end(), [](const auto& line) { return line.second == 2; });
  }

  // By the rates of a plan; nothing: of this device none are known.
  std::optional<double> predicted_transfer() const {
    if (!target_.device.is_cuda()) return std::nullopt;
    for (const std::string& name : known_device_rates())
      if (to_lower(machine_name(target_.device)).find(name) != std::string::npos)
        return weight_transfer_seconds(layouts_.training, readers(), most_bytes_, device_rates(name)->in_node);
    return std::nullopt;
  }

  nlohmann::json report(const Ceilings& ceilings, bool stops, double quiet_pass, const Hand& first,
                        const std::vector<Hand>& quiet, const std::vector<Hand>& beside) const {
    const auto all = [](const std::vector<Hand>& hands, double Hand::*what) {
      std::vector<double> values;
      for (const Hand& hand : hands) values.push_back(hand.*what);
      return values;
    };
    const auto bytes = static_cast<double>(most_bytes_);
    const double transfer = median(all(quiet, &Hand::transfer_seconds));
    nlohmann::json json = report_header("refit", options_.common, target_);
    json.update({{"ranks", context_.world_size()},
                 {"actors", layouts_.training.world()},
                 {"tp", layouts_.training.tp},
                 {"pp", layouts_.training.pp},
                 {"ep", layouts_.training.ep},
                 {"engines", readers() / each()},
                 {"engine_tp", layouts_.engine.tp},
                 {"engine_ep", layouts_.engine.ep},
                 {"sources", most_sources_},
                 {"bytes", most_bytes_},
                 {"second_buffer", !stops},
                 {"first_seconds", first.whole_seconds},
                 {"transfer_seconds", transfer},
                 {"transfer_seconds_of_repeats", all(quiet, &Hand::transfer_seconds)},
                 {"bytes_per_second", bytes / transfer},
                 {"whole_seconds", median(all(quiet, &Hand::whole_seconds))},
                 {"stall_seconds", median(all(quiet, &Hand::stall_seconds))},
                 {"stall_seconds_of_repeats", all(quiet, &Hand::stall_seconds)},
                 {"copy_bytes_per_second", ceilings.copy_bytes_per_second}});
    if (model_) json["forward_seconds"] = quiet_pass;
    if (!stops) json["predicted_stall_seconds"] = 2 * bytes / ceilings.copy_bytes_per_second;
    if (const auto predicted = predicted_transfer()) json["predicted_transfer_seconds"] = *predicted;
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
    const auto count = [](int64_t number, const char* what) {
      return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
    };
    Table table({"weights of " + options_.common.shape + " from " + count(layouts_.training.world(), "rank") + " to " +
                     count(readers() / each(), "engine") + (each() > 1 ? " of " + count(each(), "rank") : ""),
                 "ms", "predicted", "beside passes"});
    table.add({"transfer", ms("transfer_seconds"), ms("predicted_transfer_seconds"), ms("transfer_seconds_beside")});
    table.add({"decoding stopped", ms("stall_seconds"), ms("predicted_stall_seconds"), ms("stall_seconds_beside")});
    table.add({"from the question to the weights", ms("whole_seconds"), "-", "-"});
    table.add({"the first: connected and compared", ms("first_seconds"), "-", "-"});
    if (model_)
      table.add({"a forward pass of " + std::to_string(kPassRows) + " tokens", ms("forward_seconds"), "-",
                 ms("forward_seconds_beside")});
    table.print(out);
    out << format_bytes(json.at("bytes").get<uint64_t>()) << " to each rank"
        << (most_sources_ > 1 ? " from " + std::to_string(most_sources_) : "") << ", "
        << format_fixed(json.at("bytes_per_second").get<double>() / 1e9, 1) << " GB/s; "
        << (json.at("same_bits").get<bool>() ? "the same bits" : "OTHER BITS") << " on all ranks"
        << (json.at("second_buffer").get<bool>() ? "" : "; without a second buffer") << "\n";
  }

  const RefitBenchOptions& options_;
  ParallelContext& context_;
  const Target target_;
  const EngineLayouts layouts_;
  const int64_t reader_;          // this rank's number among those of all engines; below 0: it sends
  std::unique_ptr<Model> model_;  // null: this rank, or another one, has only a part of it
  PackedBatch batch_;             // of the model's passes
  WeightView weights_;
  std::unique_ptr<WeightParts> parts_;
  std::vector<int64_t> served_;       // that this rank sends to
  std::vector<WeightPart> received_;  // of an engine's rank
  std::unique_ptr<WeightSender> sender_;
  std::unique_ptr<WeightReceiver> receiver_;
  int64_t version_ = 0, most_bytes_ = 0, most_sources_ = 0;
};

}  // namespace

nlohmann::json bench_refit(const RefitBenchOptions& options, ParallelContext& context, std::ostream& out) {
  return RefitBench(options, context, layouts_of_both(options, context.world_size())).run(out);
}

}  // namespace trireme::bench
