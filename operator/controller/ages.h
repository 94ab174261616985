// Ages: how long the states that a plan asks about have lasted, on the clock of whoever asks. Pure.
#pragma once

#include <map>
#include <string>

#include "operator/controller/observed.h"

namespace trireme::controller {

class Ages final {
 public:
  // Fills in every duration of `observed` but those of nodes, reports and rejections. States that do not hold any more
  // are forgotten. `now_ms`: a clock that never goes back.
  void fill(Observed& observed, int64_t now_ms);

 private:
  std::map<std::string, int64_t> since_;
};

}  // namespace trireme::controller
