#include "operator/kube/reflector.h"

#include <random>

#include "base/error.h"
#include "base/log.h"
#include "operator/kube/json_scan.h"
#include "operator/kube/metrics.h"
#include "operator/kube/watch_lines.h"

namespace trireme::kube {
namespace {

std::string resource_version_of(std::string_view object) {
  const auto metadata = top_level_member(object, "metadata");
  return metadata ? top_level_string(*metadata, "resourceVersion").value_or("") : "";
}

Milliseconds jittered(Milliseconds base) {
  thread_local std::mt19937_64 random{std::random_device{}()};
  const double share = std::uniform_real_distribution<double>(0.8, 1.4)(random);
  return Milliseconds(static_cast<int64_t>(static_cast<double>(base.count()) * share));
}

}  // namespace

Reflector::Reflector(const Client& client, ReflectorOptions options, ReflectorSink& sink)
    : client_(client), options_(std::move(options)), sink_(sink), cancel_(std::make_unique<Client::Cancel>()) {}

Reflector::~Reflector() { stop(); }

void Reflector::start() {
  TRIREME_CHECK(!thread_.joinable() && !stopping_.load(), "a reflector starts once");
  thread_ = std::thread([this] { run(); });
}

void Reflector::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  cancel_->stop();
  if (thread_.joinable()) thread_.join();
}

bool Reflector::sleep(Milliseconds duration) {
  std::unique_lock lock(mutex_);
  return !wake_.wait_for(lock, duration, [&] { return stopping_.load(); });
}

void Reflector::list() {
  const std::string& what = options_.resource.plural;
  ListOptions list{options_.label_selector, options_.field_selector, options_.page_limit, ""};
  const auto each = [&](std::string_view item) { sink_.list_item(item); };
  ++lists_;
  sink_.list_started();
  try {
    resource_version_ = client_.list_each(options_.resource, options_.ns, list, each,
                                          Deadline::after(options_.list_timeout), &stopping_);
  } catch (const ApiError& e) {
    if (e.kind() != ApiErrorKind::kGone || list.page_limit == 0) throw;
    // The pages took longer than the server remembers; one answer cannot expire. Items are streamed either way.
    log_info("informer", what + ": the list's continue token expired; listing again without pages");
    list.page_limit = 0;
    ++lists_;
    sink_.list_started();
    resource_version_ = client_.list_each(options_.resource, options_.ns, list, each,
                                          Deadline::after(options_.list_timeout), &stopping_);
  }
  sink_.list_finished(resource_version_);
}

Reflector::WatchEnd Reflector::watch() {
  const std::string what = "watch " + options_.resource.plural;
  const auto seconds = std::max<int64_t>(1, options_.watch_timeout.count() / 1000);
  std::string path = options_.resource.path(options_.ns) +
                     "?watch=1&allowWatchBookmarks=true&timeoutSeconds=" + std::to_string(seconds) +
                     "&resourceVersion=" + url_encode(resource_version_);
  if (!options_.label_selector.empty()) path += "&labelSelector=" + url_encode(options_.label_selector);
  if (!options_.field_selector.empty()) path += "&fieldSelector=" + url_encode(options_.field_selector);

  WatchEnd end = WatchEnd::kContinue;
  const auto on_line = [&](std::string_view line) {
    const auto type = top_level_string(line, "type");
    const auto object = top_level_member(line, "object");
    if (!type || !object) fail_data(what + ": a line that is no event: " + std::string(line.substr(0, 100)));
    if (*type == "ERROR") {
      const auto code = top_level_member(*object, "code");
      const auto text = std::string(code.value_or("500"));
      const ApiError error = ApiError::from_response(what, std::atoi(text.c_str()), *object, std::nullopt);
      if (error.kind() != ApiErrorKind::kGone) throw error;
      end = WatchEnd::kRelist;
      return false;
    }
    if (*type == "ADDED") {
      sink_.event(WatchEventType::kAdded, *object);
    } else if (*type == "MODIFIED") {
      sink_.event(WatchEventType::kModified, *object);
    } else if (*type == "DELETED") {
      sink_.event(WatchEventType::kDeleted, *object);
    } else if (*type != "BOOKMARK") {
      fail_data(what + ": unknown event type " + type->substr(0, 40));
    }
    std::string version = resource_version_of(*object);
    if (!version.empty()) resource_version_ = std::move(version);
    return true;
  };
  WatchLines lines(options_.max_object_bytes);
  ++watches_;
  // The server ends the watch itself; this bound only catches one that does not, silent or with bookmarks for ever.
  const Milliseconds bound = options_.watch_timeout + Milliseconds(15000);
  const Deadline deadline = Deadline::after(bound);
  client_.stream(
      path, what, bound, [&](std::string_view chunk) { return lines.feed(chunk, on_line) && !deadline.passed(); },
      cancel_.get());
  return end;
}

prometheus::Counter& Reflector::ended(const std::string& why) const {
  return options_.metrics->counter("rljob_watch_reconnects_total", "Watches that ended, by why.",
                                   {{"resource", options_.resource.plural}, {"code", why}});
}

void Reflector::run() {
  const std::string& plural = options_.resource.plural;
  if (options_.metrics) ended("closed");  // a rate needs a series from the start
  Milliseconds backoff = options_.backoff_min;
  bool need_list = true;
  while (!stopping_.load()) {
    const Stopwatch stopwatch;
    const std::string before = resource_version_;
    std::string code = "closed";
    Milliseconds pause{0};
    try {
      if (need_list) {
        list();
        need_list = false;
      }
      if (watch() == WatchEnd::kRelist) {
        need_list = true;
        code = "410";
      }
    } catch (const ApiError& e) {
      if (e.kind() == ApiErrorKind::kGone) need_list = true;
      code = e.status() != 0 ? std::to_string(e.status()) : to_string(e.kind());
      pause = e.retry_after().value_or(Milliseconds(0));
      if (!stopping_.load()) log_warn("informer", plural + ": " + e.what());
    } catch (const std::exception& e) {  // malformed data, or the sink: start over with a whole list
      need_list = true;
      code = "malformed";
      log_error("informer", plural + ": " + e.what());
    }
    if (stopping_.load()) break;
    if (options_.metrics) ended(code).Increment();
    const bool progress = resource_version_ != before || stopwatch.seconds() > 10;
    if (progress) backoff = options_.backoff_min;
    if (code == "closed" && progress) continue;  // the ordinary end of a watch
    if (!sleep(std::max(jittered(backoff), pause))) break;
    backoff = std::min(backoff * 2, options_.backoff_max);
  }
}

}  // namespace trireme::kube
