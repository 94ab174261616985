// The model of the checkpoints' tests.
#pragma once

#include "tests/unit/model/tiny.h"

namespace trireme {

inline ModelConfig tiny(int64_t hidden = 16) {
  return test::tiny_config(
      {.vocab = 50, .hidden = hidden, .intermediate = 24, .heads = 2, .kv_heads = 1, .positions = 64});
}

}  // namespace trireme
