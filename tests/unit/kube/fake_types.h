// What tests hand to and get from the fake apiserver, and the one way to wait.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.h"
#include "operator/kube/certificates.h"

namespace trireme::kube::testing {

// Polls until the condition holds; false after the bound, which only a broken program reaches.
inline bool eventually(const std::function<bool()>& condition, Milliseconds bound = Milliseconds(60000)) {
  const Deadline deadline = Deadline::after(bound);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(Milliseconds(5));
  }
  return true;
}

struct FakeOptions {
  std::optional<KeyPair> tls = std::nullopt;  // serve HTTPS
  std::string client_ca_pem = "";             // with tls: clients must show a certificate of this CA
  std::string token = "";                     // when set, other bearer tokens get 401
  Milliseconds bookmark_interval{200};
  bool graceful_pods = false;  // deleting a pod only sets deletionTimestamp; erase() is the kubelet's last word
  int port = 0;                // 0: the system chooses
};

struct Fault {
  std::string method = "";     // "" any
  std::string path_part = "";  // part of "path?query"; "" any
  int status = 503;
  std::string reason = "";  // of the Status body
  int retry_after_s = -1;
  bool apply_first = false;  // the request takes effect before it fails (a lost answer)
  bool cut = false;          // send the start of an answer and close the connection instead of `status`
  int times = 1;             // < 0: for ever
  Milliseconds delay{0};     // before the request is looked at
};

struct RecordedRequest {
  std::string method;
  std::string path;   // without query
  std::string query;  // decoded "a=b&c=d" in the order of names
  std::string body;
  std::string content_type;
  std::string authorization;
  std::string accept;
  int status = 0;  // 0 while it runs
};

}  // namespace trireme::kube::testing
