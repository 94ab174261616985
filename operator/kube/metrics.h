// Metrics: a prometheus-cpp registry with text exposition and the families that controller-runtime's dashboards expect.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace trireme::kube {

using Labels = std::map<std::string, std::string>;

// Thread-safe. References stay valid until remove() of the series or the end of this object; hot paths keep them.
class Metrics final {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // The same name and labels give the same series.
  prometheus::Counter& counter(const std::string& name, const std::string& help, const Labels& labels = {});
  prometheus::Gauge& gauge(const std::string& name, const std::string& help, const Labels& labels = {});
  prometheus::Histogram& histogram(const std::string& name, const std::string& help, const Labels& labels,
                                   const std::vector<double>& buckets);
  // Drops every series of the family (or, name "", of all families) whose labels include these. Nobody may still use
  // their references. Call it when an object goes.
  void remove(const std::string& name, const Labels& labels);

  // Runs before each exposition, e.g. to compute ages. The id takes it back; remove waits for one that is running.
  uint64_t add_scrape_hook(std::function<void()> hook);
  void remove_scrape_hook(uint64_t id);

  // text/plain; version=0.0.4
  std::string text();
  static const char* content_type();

 private:
  template <class T>
  struct FamilyEntry {
    prometheus::Family<T>* family = nullptr;
    std::map<Labels, T*> series;
  };
  std::shared_ptr<prometheus::Registry> registry_;
  std::mutex mutex_;
  std::map<std::string, FamilyEntry<prometheus::Counter>> counters_;
  std::map<std::string, FamilyEntry<prometheus::Gauge>> gauges_;
  std::map<std::string, FamilyEntry<prometheus::Histogram>> histograms_;
  std::recursive_mutex hook_mutex_;
  uint64_t next_hook_ = 1;
  std::map<uint64_t, std::function<void()>> hooks_;
};

// controller_runtime_* for one controller.
struct ControllerMetrics {
  ControllerMetrics(Metrics& metrics, const std::string& controller);
  prometheus::Counter& success;        // controller_runtime_reconcile_total{result="success"}
  prometheus::Counter& requeue;        // {result="requeue"}
  prometheus::Counter& requeue_after;  // {result="requeue_after"}
  prometheus::Counter& error;          // {result="error"}
  prometheus::Counter& errors;         // controller_runtime_reconcile_errors_total
  prometheus::Counter& terminal_errors;
  prometheus::Counter& panics;  // an exception that was no ApiError or Error
  prometheus::Counter& timeouts;
  prometheus::Histogram& seconds;  // controller_runtime_reconcile_time_seconds
  prometheus::Gauge& active_workers;
  prometheus::Gauge& max_concurrent;
};

}  // namespace trireme::kube
