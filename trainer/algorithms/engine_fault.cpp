#include "trainer/algorithms/engine_fault.h"

#include <algorithm>
#include <csignal>
#include <iterator>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr const char* kPhases[] = {"joining",    "fetching", "transfer", "applying",
                                   "generation", "rewards",  "bringing", "brought"};

bool is_phase(const std::string& word) {
  return std::find(std::begin(kPhases), std::end(kPhases), word) != std::end(kPhases);
}

}  // namespace

EngineFault parse_engine_fault(const std::string& text) {
  EngineFault fault;
  if (text.empty()) return fault;
  const size_t at = text.find('@');
  const std::string kind = text.substr(0, at);
  const std::vector<std::string> rest = split(at == std::string::npos ? "" : text.substr(at + 1), ':');
  const auto number = [&](size_t i) { return parse_int(rest[i]).value_or(-1); };
  fault.time = rest.empty() ? -1 : number(0);
  if (kind == "kill" && rest.size() == 2 && is_phase(rest[1])) {
    fault.kind = EngineFault::Kind::kKill;
    fault.phase = rest[1];
  } else if (kind == "cut" && rest.size() <= 2) {
    fault.kind = EngineFault::Kind::kCut;
    fault.phase = "transfer";
    if (rest.size() == 2) fault.in_row = number(1);
  }
  if (fault.kind == EngineFault::Kind::kNone || fault.time < 1 || fault.in_row < 1) {
    fail_user("the fault '" + text + "' of an engine is neither kill@TIME:PHASE with a phase of " +
              join({std::begin(kPhases), std::end(kPhases)}, ", ") + ", nor cut@TRANSFER or cut@TRANSFER:IN_ROW");
  }
  return fault;
}

void EngineFaults::begins(const std::string& phase) {
  if (fault_.kind == EngineFault::Kind::kNone || phase != fault_.phase) return;
  const std::lock_guard lock(mutex_);
  ++seen_;
  if (seen_ < fault_.time || seen_ >= fault_.time + fault_.in_row) return;
  if (fault_.kind == EngineFault::Kind::kCut)
    throw Error(ErrorKind::kUnavailable, "transfer " + std::to_string(seen_) + " is cut on purpose");
  log_warn("fault", "is killed on purpose in phase " + phase + ", time " + std::to_string(seen_));
  (void)std::raise(SIGKILL);
}

}  // namespace trireme
