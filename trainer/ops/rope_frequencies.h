// How fast each pair of a head's elements turns, under every kind of scaling.
#pragma once

#include <vector>

#include "trainer/ops/ops.h"

namespace trireme {

// Radians a position of each pair of elements [head_dim / 2], rounded to float32 where Hugging Face's code does
// (transformers, modeling_rope_utils).
std::vector<float> rope_frequencies(const RopeOptions& options);

// What cos and sin are multiplied by under YaRN where the configuration does not say: 0.1 mscale ln(factor) + 1, over
// the same with mscale_all_dim where both are given (neither 0).
double yarn_attention_factor(double factor, double mscale, double mscale_all_dim);

}  // namespace trireme
