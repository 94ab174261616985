#include <cmath>
#include <cstdint>

#include "trainer/ops/cpu_kernels.h"

namespace trireme {
namespace {

inline float log_of(float x) { return std::log(x); }
inline float sqrt_of(float x) { return std::sqrt(x); }
inline double log_of(double x) { return std::log(x); }
inline double sqrt_of(double x) { return std::sqrt(x); }

// Plain loops; float64 (tests) always, float32 on machines without AVX2.
template <class Number, int kWidth>
struct Portable {
  using T = Number;
  static constexpr int kLanes = kWidth;
  T v[kWidth];

  template <class F>
  static Portable each(F f) {
    Portable out;
    for (int i = 0; i < kWidth; ++i) out.v[i] = f(i);
    return out;
  }
  static Portable zero() { return all(0); }
  static Portable all(T x) {
    return each([&](int) { return x; });
  }
  static Portable load(const T* p) {
    return each([&](int i) { return p[i]; });
  }
  static Portable load(const T* p, int64_t count) {
    return each([&](int i) { return i < count ? p[i] : T(0); });
  }
  static Portable keep(const Portable& a, int64_t count) {
    return each([&](int i) { return i < count ? a.v[i] : T(0); });
  }
  void store(T* p) const { store(p, kWidth); }
  void store(T* p, int64_t count) const {
    for (int i = 0; i < kWidth && i < count; ++i) p[i] = v[i];
  }
  static Portable fma(const Portable& a, const Portable& b, const Portable& c) {
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static Portable add(const Portable& a, const Portable& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static Portable sub(const Portable& a, const Portable& b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static Portable mul(const Portable& a, const Portable& b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static Portable div(const Portable& a, const Portable& b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static Portable max(const Portable& a, const Portable& b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Portable exp(const Portable& a) {
    return each([&](int i) { return std::exp(a.v[i]); });
  }
  static T reduce_add(Portable a) {
    for (int half = kWidth / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
    }
    return a.v[0];
  }
  static void reduce_add16(const Portable* s, T* out) {
    for (int i = 0; i < 16; ++i) out[i] = reduce_add(s[i]);
  }
};

#include "trainer/ops/cpu_kernels_impl.h"

}  // namespace

const CpuKernels<float>& kernels_portable() {
  static const CpuKernels<float> table = kernel_table<Portable<float, 16>>("portable");
  return table;
}

const CpuKernels<double>& kernels_portable_f64() {
  static const CpuKernels<double> table = kernel_table<Portable<double, 8>>("portable");
  return table;
}

template <>
const CpuKernels<float>& cpu_kernels<float>() {
#if defined(__x86_64__)
  static const CpuKernels<float>* const table = []() -> const CpuKernels<float>* {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw")) {
      return &kernels_avx512();
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kernels_avx2() : &kernels_portable();
  }();
  return *table;
#else
  return kernels_portable();
#endif
}

template <>
const CpuKernels<double>& cpu_kernels<double>() {
  return kernels_portable_f64();
}

}  // namespace trireme
