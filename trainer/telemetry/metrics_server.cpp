#include "trainer/telemetry/metrics_server.h"

#include <httplib.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <atomic>
#include <cmath>
#include <sstream>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme {
namespace {

const prometheus::Histogram::BucketBoundaries kSecondsBuckets = {0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,    2.5, 5,
                                                                 10,   25,    50,   100, 250,  500, 1000, 2500};

struct GaugeName {
  const char* metric;
  const char* logged;  // full name in the step log
  const char* help;
};
const GaugeName kGauges[] = {
    {"trireme_last_step_seconds", "timing/train/total_step_time", "Wall time of the last step."},
    {"trireme_reward_mean", "train/reward", "Mean reward of the last step's samples."},
    {"trireme_response_length_mean", "train/mean_gen_tokens_per_sample", "Mean tokens of the last step's responses."},
    {"trireme_truncation_ratio", "train/truncation_rate",
     "Share of the last step's responses cut off at the length limit."},
    {"trireme_tokens_per_second", "performance/tokens_per_sec",
     "Prompt and response tokens of the last step by its wall time, whole job."},
    {"trireme_generation_tokens_per_second", "performance/generation_tokens_per_sec",
     "Response tokens by generation time, whole job."},
    {"trireme_exposed_exchange_seconds", "performance/exposed_exchange_s",
     "What ranks stood still in the last step's training, in the mean, since another's part of an exchange was "
     "missing."},
    {"trireme_expert_exchange_seconds", "performance/expert_exchange_s",
     "Of these what they stood still for rows of experts that lie on several ranks."},
    {"trireme_pipeline_bubble_seconds", "performance/pipeline_bubble_s",
     "The same, since a pipeline stage had nothing to do."},
    {"trireme_refit_bytes", "performance/refit_bytes",
     "Weights that the fullest rank fetched from others for generation, last step."},
    {"trireme_generation_group_ranks", "performance/generation_group_ranks", "Ranks that generate with one model."},
    {"trireme_validation_accuracy", "validation/accuracy", "Mean reward of the last validation."},
    {"trireme_logprob_mismatch_tokens", "train/logprob_mismatch_tokens",
     "Tokens of the last step whose sampled and trained log-probs differ, of those compared."},
    {"trireme_logprob_compared_tokens", "train/logprob_compared_tokens",
     "Tokens of the last step that were trained with the weights that sampled them."},
    {"trireme_weight_version", "train/weight_version", "Version of the weights that the last step began with."},
    {"trireme_optimizer_steps", "train/optimizer_steps", "Optimizer steps of the policy since the run began."},
    {"trireme_trajectory_age", "train/avg_trajectory_age",
     "Steps by which the weights of a sample's oldest token were older than its step's, in the mean."},
    {"trireme_weight_transfer_seconds", "performance/weight_transfer_seconds",
     "The slowest transfer of weights to a generation process, last step."},
    {"trireme_logprob_mult_error", "train/token_mult_prob_error",
     "Mean exp(|sampled - trained log-prob|); 1 is perfect."},
    {"trireme_grad_norm", "train/grad_norm", "Gradient norm before clipping."},
    {"trireme_loss", "train/loss", "Loss of the last step."},
    {"trireme_critic_loss", "critic/loss", "Loss of the critic, last step (PPO)."},
    {"trireme_critic_explained_variance", "critic/explained_var",
     "Share of the returns' variance that the critic's values explain, last step (PPO); 1 is perfect, below 0 worse "
     "than their mean."},
    {"trireme_expert_load_max", "train/moe/expert_load_max",
     "Tokens of a layer's busiest expert by the mean of all, in the worst layer, last step; 1 is even."},
    {"trireme_unused_experts", "train/moe/unused_experts",
     "Experts that got no token in the last step, of all layers."},
    {"trireme_router_entropy", "train/moe/router_entropy",
     "Entropy of a token's probabilities over all experts, last step."},
    {"trireme_learning_rate", "train/lr", "Learning rate of the last step."},
    {"trireme_kl", "train/kl_penalty", "KL to the reference model, last step."},
    {"trireme_entropy", "train/approx_entropy", "Approximate entropy of the policy, last step."},
};

}  // namespace

struct MetricsServer::Impl {
  explicit Impl(const MetricsOptions& given)
      : options(given),
        labels{{"rank", std::to_string(given.rank)}},
        step(gauge("trireme_step", "Steps finished.")),
        max_steps(gauge("trireme_max_steps", "Steps the run will take at most.")),
        checkpoint_step(prometheus::BuildGauge()
                            .Name("trireme_checkpoint_step")
                            .Help("Step of the newest complete checkpoint.")
                            .Labels(labels)
                            .Register(registry)),
        step_seconds(histogram("trireme_step_seconds", "Wall time of steps.").Add({}, kSecondsBuckets)),
        phase_seconds(histogram("trireme_phase_seconds", "Exposed wall time of a step's phases.")),
        last_phase_seconds(prometheus::BuildGauge()
                               .Name("trireme_last_phase_seconds")
                               .Help("Exposed wall time of the last step's phases.")
                               .Labels(labels)
                               .Register(registry)),
        ledger_groups(prometheus::BuildGauge()
                          .Name("trireme_ledger_groups")
                          .Help("Groups of later steps when the last one was complete: begun, or complete already.")
                          .Labels(labels)
                          .Register(registry)),
        engines(prometheus::BuildGauge()
                    .Name("trireme_engines")
                    .Help("Generation processes: there now; lost or left since the start.")
                    .Labels(labels)
                    .Register(registry)),
        reward_failures(counter("trireme_reward_failures_total", "Rewards that could not be had.")),
        samples(counter("trireme_samples_total", "Samples trained on.")),
        tokens(counter("trireme_tokens_total", "Prompt and response tokens trained on.")) {
    gauge("trireme_start_time_seconds", "Unix time at which this rank started.").SetToCurrentTime();
    for (const GaugeName& name : kGauges) {
      values.push_back(&prometheus::BuildGauge().Name(name.metric).Help(name.help).Labels(labels).Register(registry));
    }
    beat();
    serve();
  }

  ~Impl() {
    // Once, and only when its loop runs: before that stop() does nothing, and a second time it asserts.
    for (bool told = false; !ended.load(); std::this_thread::sleep_for(Milliseconds(1))) {
      if (told || !server.is_running()) continue;
      server.stop();
      told = true;
    }
    thread.join();
  }

  prometheus::Gauge& gauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Labels(labels).Register(registry).Add({});
  }
  prometheus::Counter& counter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Labels(labels).Register(registry).Add({});
  }
  prometheus::Family<prometheus::Histogram>& histogram(const char* name, const char* help) {
    return prometheus::BuildHistogram().Name(name).Help(help).Labels(labels).Register(registry);
  }

  void beat() { last_beat = SteadyClock::now().time_since_epoch().count(); }

  double silent_s() const {
    const SteadyClock::duration since(SteadyClock::now().time_since_epoch().count() - last_beat.load());
    return std::chrono::duration<double>(since).count();
  }

  std::string scrape() const {
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, registry.Collect());
    return out.str();
  }

  void serve() {
    // The library's default sets SO_REUSEPORT, under which a second server on the port would silently share it.
    server.set_socket_options([](socket_t socket) {
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    // A slow peer holds a thread for 2 s; what comes when all are held and a few wait is turned away.
    server.new_task_queue = [] { return new httplib::ThreadPool(2, 32, 64); };
    server.set_payload_max_length(1024);  // no request here has a body
    server.set_keep_alive_timeout(1);
    server.set_read_timeout(2);
    server.set_write_timeout(5);
    server.Get("/metrics", [this](const httplib::Request&, httplib::Response& response) {
      response.set_content(scrape(), "text/plain; version=0.0.4; charset=utf-8");
    });
    server.Get("/healthz", [this](const httplib::Request&, httplib::Response& response) {
      const double silent = silent_s();
      if (options.stall_s > 0 && silent > options.stall_s) {
        response.status = 503;
        response.set_content("no progress for " + format_fixed(silent, 0) + " s\n", "text/plain");
      } else {
        response.set_content("ok\n", "text/plain");
      }
    });
    if (options.port == 0) {
      bound_port = server.bind_to_any_port(options.address);
    } else {
      bound_port = server.bind_to_port(options.address, options.port) ? options.port : -1;
    }
    if (bound_port <= 0) {
      fail_io("logger.prometheus.port: cannot listen on " + options.address + ":" + std::to_string(options.port) +
              ": the port is in use or not allowed; choose another or 0");
    }
    thread = std::thread([this] {
      server.listen_after_bind();
      ended = true;
    });
    log_debug("telemetry", "metrics on " + options.address + ":" + std::to_string(bound_port));
  }

  const MetricsOptions options;
  const prometheus::Labels labels;
  prometheus::Registry registry;
  prometheus::Gauge& step;
  prometheus::Gauge& max_steps;
  prometheus::Family<prometheus::Gauge>& checkpoint_step;
  prometheus::Histogram& step_seconds;
  prometheus::Family<prometheus::Histogram>& phase_seconds;
  prometheus::Family<prometheus::Gauge>& last_phase_seconds;
  prometheus::Family<prometheus::Gauge>& ledger_groups;
  prometheus::Family<prometheus::Gauge>& engines;
  prometheus::Counter& reward_failures;
  prometheus::Counter& samples;
  prometheus::Counter& tokens;
  std::vector<prometheus::Family<prometheus::Gauge>*>
      values;  // one for each of kGauges; no series before its first value
  std::atomic<SteadyClock::rep> last_beat{0};
  httplib::Server server;
  int bound_port = 0;
  std::atomic<bool> ended{false};
  std::thread thread;
};

MetricsServer::MetricsServer(const MetricsOptions& options) : impl_(std::make_unique<Impl>(options)) {}
MetricsServer::~MetricsServer() = default;

int MetricsServer::port() const { return impl_->bound_port; }

void MetricsServer::observe(const StepRecord& record) {
  Impl& impl = *impl_;
  impl.beat();
  impl.step.Set(static_cast<double>(record.step));
  if (record.max_steps > 0) impl.max_steps.Set(static_cast<double>(record.max_steps));
  impl.step_seconds.Observe(record.phases.total_s);
  for (const Phase phase : all_phases()) {
    impl.phase_seconds.Add({{"phase", to_string(phase)}}, kSecondsBuckets).Observe(record.phases.of(phase));
    impl.last_phase_seconds.Add({{"phase", to_string(phase)}}).Set(record.phases.of(phase));
  }
  const auto flat = record.flat();
  for (size_t i = 0; i < std::size(kGauges); ++i) {
    if (const auto found = flat.find(kGauges[i].logged); found != flat.end())
      impl.values[i]->Add({}).Set(found->second);
  }
  for (const char* state : {"leased", "complete"}) {
    const auto found = flat.find(std::string("performance/ledger_groups_") + state);
    if (found != flat.end()) impl.ledger_groups.Add({{"state", state}}).Set(found->second);
  }
  const auto add = [&](prometheus::Counter& counter, const char* name) {
    const auto found = flat.find(name);
    if (found != flat.end() && std::isfinite(found->second) && found->second > 0) counter.Increment(found->second);
  };
  add(impl.samples, "train/num_valid_samples");
  add(impl.tokens, "train/total_num_tokens");
}

void MetricsServer::count_reward_failures(int64_t failures) {
  if (failures > 0) impl_->reward_failures.Increment(static_cast<double>(failures));
}
void MetricsServer::set_engines(int64_t live, int64_t lost) {
  impl_->engines.Add({{"state", "live"}}).Set(static_cast<double>(live));
  impl_->engines.Add({{"state", "lost"}}).Set(static_cast<double>(lost));
}
void MetricsServer::set_checkpoint_step(int64_t step) { impl_->checkpoint_step.Add({}).Set(static_cast<double>(step)); }
void MetricsServer::beat() { impl_->beat(); }
std::string MetricsServer::scrape() const { return impl_->scrape(); }

}  // namespace trireme
