#include "operator/telemetry/path_probe.h"

#include <httplib.h>

#include "base/log.h"
#include "base/url.h"

namespace trireme::telemetry {

PathProbe::PathProbe(const std::string& url, Milliseconds interval, Milliseconds timeout)
    : origin_(split_url(url).origin()), interval_(interval), timeout_(timeout), thread_([this] { run(); }) {}

PathProbe::~PathProbe() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void PathProbe::run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    const bool was_broken = broken();
    failures_ = answers() ? 0 : failures_ + 1;
    if (broken() && !was_broken)
      log_warn("status", "nothing answers at " + origin_ + ", where trainers report: no job counts as hung meanwhile");
    if (!broken() && was_broken) log_info("status", "reports can reach " + origin_ + " again");
    lock.lock();
    wake_.wait_for(lock, interval_, [this] { return stopping_; });
  }
}

bool PathProbe::answers() const {
  try {
    httplib::Client client(origin_);
    if (!client.is_valid()) return false;  // no address that anybody could be reached at
    const time_t seconds = timeout_.count() / 1000;
    const time_t micros = timeout_.count() % 1000 * 1000;
    client.set_connection_timeout(seconds, micros);
    client.set_read_timeout(seconds, micros);
    client.set_write_timeout(seconds, micros);
    client.enable_server_certificate_verification(false);
    return static_cast<bool>(client.Get("/healthz"));
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace trireme::telemetry
