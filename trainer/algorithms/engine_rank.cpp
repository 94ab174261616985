#include "trainer/algorithms/engine_rank.h"

#include <ATen/Parallel.h>

#include "base/error.h"
#include "base/log.h"
#include "topology/combine_blocks.h"
#include "trainer/algorithms/engine_identity.h"
#include "trainer/algorithms/engine_layout.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/session.h"
#include "trainer/algorithms/session_parts.h"
#include "trainer/model/weight_view.h"
#include "trainer/ops/linear.h"
#include "trainer/parallel/device.h"

namespace trireme {
namespace {

constexpr Milliseconds kTransferDeadline{60000};

}  // namespace

EngineRank::EngineRank(const Config& config, const EngineProcessOptions& options)
    : config_(config),
      options_(options),
      model_dir_(resolve_model(config.policy.model_name, options.hf_home)),
      description_(ModelConfig::load(model_dir_)),
      tokenizer_(load_tokenizer(config, options.hf_home, model_dir_)) {
  find_actor();
  const ModelShape shape = description_.shape();
  if (const auto problem = engine_problem(config, shape, model_dir_.string(), actors_)) fail_user(*problem);
  const Layout layout = engine_layout(config, shape, actors_);
  prepare_devices({layout});
  group_ = std::make_unique<EngineGroup>(EngineGroupOptions{
      .job = options.rendezvous, .name = options.name, .start = options.start, .rank = options.rank, .layout = layout});
  group_->ranks().set_phase("generation");
  make_model();
  sources_ = std::make_unique<WeightParts>(
      *model_, EngineLayouts{.training = actors_, .stages = stage_options(config), .engine = layout});
}

// The store is there when the actors have met, the ticket when they are ready.
void EngineRank::find_actor() {
  const RendezvousOptions& r = options_.rendezvous;
  const auto patience = Milliseconds(static_cast<int64_t>(config_.cluster.collective_timeout_s * 1000));
  const Deadline deadline = Deadline::after(patience);
  LinkStore store(r.master_address, r.master_port, r.attempt, patience);
  const LinkCancel nobody_cancels;
  const std::string missing =
      "the run's work server did not come: its actor generates itself "
      "(policy.generation.colocated.enabled), or did not get so far";
  ticket_ = store.get(kWorkTicketKey, deadline, nobody_cancels, missing);
  actors_ = parse_layout(store.get(kActorLayoutKey, deadline, nobody_cancels, missing));
  probe_ = store.get(kRewardProbeKey, deadline, nobody_cancels, missing);
  url_ = options_.work_url;
  if (url_.empty())
    url_ = "http://" + r.master_address + ":" + store.get(kWorkPortKey, deadline, nobody_cancels, missing);
}

// The weights come from the actor, the first ones too.
void EngineRank::make_model() {
  ModelOptions options =
      untrained_model_options(config_, options_.rendezvous.local_rank, description_, group_->ranks());
  // As many as in training, so that experts are added up in the same order.
  if (description_.num_experts > 0) {
    options.combine_blocks = combine_blocks(description_.num_experts, config_.policy.moe_combine_blocks, actors_.ep);
  }
  model_ = std::make_unique<Model>(description_, options);
  if (options.device.is_cpu()) choose_linear_mode(model_->linear_shapes(), options.dtype);
  if (!rows_are_exact(*model_, config_, group_->ranks(), /*generates=*/true) && group_->leads())
    log_warn("engine", "linear layers do not keep row bits on this machine: log-probs differ from the loss's");
}

void EngineRank::make_receiver(int64_t engine, const std::function<void(int64_t)>& on_bytes) {
  const int ranks = group_->size();
  WeightLinkOptions link;
  link.store_address = options_.rendezvous.master_address;
  link.store_port = options_.rendezvous.master_port;
  link.attempt = options_.rendezvous.attempt;
  link.engine = engine * ranks + group_->rank();
  link.engine_ranks = ranks;
  link.deadline = kTransferDeadline;
  link.transport = options_.transport;
  link.second_buffer = options_.second_buffer;
  link.on_bytes = on_bytes;
  receiver_ = std::make_unique<WeightReceiver>(link, weight_view(*model_));
  const bool stops = receiver_->needs_stop();
  const bool somebody_stops = group_->ranks().world().all_reduce_max(stops ? 1.0 : 0.0) > 0;
  if (stops || !somebody_stops) return;
  receiver_.reset();
  link.second_buffer = false;
  receiver_ = std::make_unique<WeightReceiver>(link, weight_view(*model_));
}

const std::vector<WeightPart>& EngineRank::parts(int64_t engine) {
  if (parts_of_ != engine) parts_ = sources_->received(engine, group_->rank());
  parts_of_ = engine;
  return parts_;
}

std::unique_ptr<Engine> EngineRank::make_engine(int threads) const {
  at::set_num_threads(threads);
  use_device();
  EngineOptions options = engine_options(config_);
  options.lanes = 1;  // it has no stages, whatever training has
  if (group_->size() > 1) {
    options.least_of_ranks = [&ranks = group_->ranks().world()](int64_t rows) {
      return static_cast<int64_t>(-ranks.all_reduce_max(static_cast<double>(-rows)));
    };
  }
  return std::make_unique<Engine>(*model_, tokenizer_.get(), options, training_sampling(config_, *tokenizer_));
}

void EngineRank::use_device() const { (void)choose_device(config_.cluster.device, options_.rendezvous.local_rank); }

}  // namespace trireme
