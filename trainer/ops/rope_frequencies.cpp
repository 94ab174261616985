#include "trainer/ops/rope_frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace trireme {
namespace {

float llama3_frequency(float frequency, const RopeOptions& options) {
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  const double original = static_cast<double>(options.original_max_position);
  if (wavelength > original / options.low_freq_factor) return static_cast<float>(frequency / options.factor);
  if (wavelength < original / options.high_freq_factor) return frequency;
  const double smooth =
      (original / wavelength - options.low_freq_factor) / (options.high_freq_factor - options.low_freq_factor);
  return static_cast<float>((1.0 - smooth) * frequency / options.factor + smooth * frequency);
}

// Pairs up to `low` keep their frequency, those from `high` on are interpolated, between them in proportion.
struct YarnRange {
  double low, high;
};
YarnRange yarn_range(const RopeOptions& options) {
  const double dim = static_cast<double>(options.head_dim);
  const auto pair_that_turns = [&](double rotations) {
    const double positions_a_radian =
        static_cast<double>(options.original_max_position) / (rotations * 2.0 * std::numbers::pi);
    return dim * std::log(positions_a_radian) / (2.0 * std::log(options.theta));
  };
  double low = pair_that_turns(options.beta_fast), high = pair_that_turns(options.beta_slow);
  if (options.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1.0);
  return {low, low == high ? high + 0.001 : high};
}

float yarn_frequency(int64_t pair, float power, const YarnRange& range, double factor) {
  const float ramp = std::clamp(
      (static_cast<float>(pair) - static_cast<float>(range.low)) / static_cast<float>(range.high - range.low), 0.0f,
      1.0f);
  const float kept = 1.0f - ramp;
  const float interpolated = 1.0f / (static_cast<float>(factor) * power), plain = 1.0f / power;
  return interpolated * (1.0f - kept) + plain * kept;
}

}  // namespace

std::vector<float> rope_frequencies(const RopeOptions& options) {
  using Scaling = RopeOptions::Scaling;
  const YarnRange range = options.scaling == Scaling::kYarn ? yarn_range(options) : YarnRange{0, 1};
  std::vector<float> frequencies;
  for (int64_t i = 0; i < options.head_dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(options.head_dim);
    const float power = static_cast<float>(std::pow(options.theta, static_cast<double>(exponent)));
    float frequency = 1.0f / power;
    if (options.scaling == Scaling::kLinear) frequency /= static_cast<float>(options.factor);
    if (options.scaling == Scaling::kLlama3) frequency = llama3_frequency(frequency, options);
    if (options.scaling == Scaling::kYarn) frequency = yarn_frequency(i, power, range, options.factor);
    frequencies.push_back(frequency);
  }
  return frequencies;
}

double yarn_attention_factor(double factor, double mscale, double mscale_all_dim) {
  const auto scale = [&](double m) { return factor <= 1.0 ? 1.0 : 0.1 * m * std::log(factor) + 1.0; };
  return mscale != 0.0 && mscale_all_dim != 0.0 ? scale(mscale) / scale(mscale_all_dim) : scale(1.0);
}

}  // namespace trireme
