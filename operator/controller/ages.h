// Ages: how long the states that a plan asks about have lasted, on the clock of whoever asks. Pure.
#pragma once

#include <map>
#include <set>
#include <string>

#include "operator/controller/observed.h"

namespace trireme::controller {

class Ages final {
 public:
  // Fills in every duration of `observed` but those of nodes, reports and rejections. States that do not hold any more
  // are forgotten. `now_ms`: a clock that never goes back.
  void fill(Observed& observed, int64_t now_ms);

 private:
  struct Failures {
    int64_t before = 0;  // counted in the status when we first looked
    std::set<std::string> uids;
  };
  std::map<std::string, int64_t> since_;
  int64_t attempt_ = -1;
  std::map<std::string, Failures> failures_;  // by role, of this attempt
};

// So many pods of the present attempt have a node; the gang is complete when it is total_pods().
int64_t placed_pods(const Observed& observed);

}  // namespace trireme::controller
