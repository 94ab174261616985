#include "operator/kube/metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>

namespace trireme::kube {
namespace {

bool includes(const Labels& labels, const Labels& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const auto& pair) {
    const auto it = labels.find(pair.first);
    return it != labels.end() && it->second == pair.second;
  });
}

template <class Families>
void remove_series(Families& families, const std::string& name, const Labels& wanted) {
  for (auto& [family_name, entry] : families) {
    if (!name.empty() && family_name != name) continue;
    for (auto it = entry.series.begin(); it != entry.series.end();) {
      if (includes(it->first, wanted)) {
        entry.family->Remove(it->second);
        it = entry.series.erase(it);
      } else {
        ++it;
      }
    }
  }
}

}  // namespace

Metrics::Metrics() : registry_(std::make_shared<prometheus::Registry>()) {}
Metrics::~Metrics() = default;

prometheus::Counter& Metrics::counter(const std::string& name, const std::string& help, const Labels& labels) {
  std::lock_guard lock(mutex_);
  auto& entry = counters_[name];
  if (!entry.family) entry.family = &prometheus::BuildCounter().Name(name).Help(help).Register(*registry_);
  auto& series = entry.series[labels];
  if (!series) series = &entry.family->Add(labels);
  return *series;
}

prometheus::Gauge& Metrics::gauge(const std::string& name, const std::string& help, const Labels& labels) {
  std::lock_guard lock(mutex_);
  auto& entry = gauges_[name];
  if (!entry.family) entry.family = &prometheus::BuildGauge().Name(name).Help(help).Register(*registry_);
  auto& series = entry.series[labels];
  if (!series) series = &entry.family->Add(labels);
  return *series;
}

prometheus::Histogram& Metrics::histogram(const std::string& name, const std::string& help, const Labels& labels,
                                          const std::vector<double>& buckets) {
  std::lock_guard lock(mutex_);
  auto& entry = histograms_[name];
  if (!entry.family) entry.family = &prometheus::BuildHistogram().Name(name).Help(help).Register(*registry_);
  auto& series = entry.series[labels];
  if (!series) series = &entry.family->Add(labels, buckets);
  return *series;
}

void Metrics::remove(const std::string& name, const Labels& labels) {
  std::lock_guard lock(mutex_);
  remove_series(counters_, name, labels);
  remove_series(gauges_, name, labels);
  remove_series(histograms_, name, labels);
}

uint64_t Metrics::add_scrape_hook(std::function<void()> hook) {
  std::lock_guard lock(hook_mutex_);
  hooks_.emplace(next_hook_, std::move(hook));
  return next_hook_++;
}

void Metrics::remove_scrape_hook(uint64_t id) {
  std::lock_guard lock(hook_mutex_);
  hooks_.erase(id);
}

std::string Metrics::text() {
  {
    std::lock_guard lock(hook_mutex_);
    for (const auto& [id, hook] : hooks_) hook();
  }
  return prometheus::TextSerializer().Serialize(registry_->Collect());
}

const char* Metrics::content_type() { return "text/plain; version=0.0.4; charset=utf-8"; }

namespace {

const std::vector<double> kReconcileBuckets{
    0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5,
    1.75,  2.0,  2.5,   3.0,  3.5, 4.0,  4.5, 5,    6,   7,    8,   9,    10,  15,  20,  25,  30,  40,  50,   60};

prometheus::Counter& reconcile_total(Metrics& m, const std::string& controller, const char* result) {
  return m.counter("controller_runtime_reconcile_total", "Reconciliations per controller and result.",
                   {{"controller", controller}, {"result", result}});
}

}  // namespace

ControllerMetrics::ControllerMetrics(Metrics& m, const std::string& c)
    : success(reconcile_total(m, c, "success")),
      requeue(reconcile_total(m, c, "requeue")),
      requeue_after(reconcile_total(m, c, "requeue_after")),
      error(reconcile_total(m, c, "error")),
      errors(
          m.counter("controller_runtime_reconcile_errors_total", "Reconciliations that failed.", {{"controller", c}})),
      terminal_errors(m.counter("controller_runtime_terminal_reconcile_errors_total",
                                "Failures that a retry cannot mend.", {{"controller", c}})),
      panics(m.counter("controller_runtime_reconcile_panics_total",
                       "Reconciliations that ended by an unexpected exception.", {{"controller", c}})),
      timeouts(m.counter("controller_runtime_reconcile_timeouts_total", "Reconciliations that passed their deadline.",
                         {{"controller", c}})),
      seconds(m.histogram("controller_runtime_reconcile_time_seconds", "Length of a reconciliation.",
                          {{"controller", c}}, kReconcileBuckets)),
      active_workers(m.gauge("controller_runtime_active_workers", "Workers at a reconciliation.", {{"controller", c}})),
      max_concurrent(
          m.gauge("controller_runtime_max_concurrent_reconciles", "Workers of the controller.", {{"controller", c}})) {}

}  // namespace trireme::kube
