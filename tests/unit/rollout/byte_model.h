// The model of the engine's and its host's tests: of bytes, and of weights large enough that samples depend on them.
#pragma once

#include <memory>

#include "tests/unit/model/tiny.h"
#include "trainer/ops/linear.h"

namespace trireme::test {

inline std::unique_ptr<Model> byte_model(uint64_t seed = 1, ModelFamily family = ModelFamily::kQwen3) {
  auto model = tiny_model({.family = family,
                           .vocab = kByteVocabSize,
                           .hidden = 48,
                           .intermediate = 80,
                           .layers = 2,
                           .head_dim = 16,
                           .positions = 512,
                           .initializer_range = 0.2},
                          seed);
  choose_linear_mode(model->config().linear_shapes(), at::kFloat);
  return model;
}

}  // namespace trireme::test
