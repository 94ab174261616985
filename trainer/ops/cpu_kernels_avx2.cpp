#include <cmath>
#include <cstdint>

#include "trainer/ops/cpu_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace trireme {
namespace {

inline float log_of(float x) { return std::log(x); }
inline float sqrt_of(float x) { return std::sqrt(x); }

// Sixteen lanes as two registers, so that the bits are those of AVX-512.
struct Avx2 {
  using T = float;
  static constexpr int kLanes = 16;
  __m256 lo, hi;

  static __m256i mask(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count < 0   ? 0
                                                                 : count > 8 ? 8
                                                                             : count)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Avx2 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Avx2 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Avx2 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Avx2 load(const float* p, int64_t count) {
    if (count >= 16) return load(p);
    if (count >= 8) return {_mm256_loadu_ps(p), _mm256_maskload_ps(p + 8, mask(count - 8))};
    return {_mm256_maskload_ps(p, mask(count)), _mm256_setzero_ps()};
  }
  static Avx2 keep(Avx2 a, int64_t count) {
    return {_mm256_and_ps(a.lo, _mm256_castsi256_ps(mask(count))),
            _mm256_and_ps(a.hi, _mm256_castsi256_ps(mask(count - 8)))};
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  void store(float* p, int64_t count) const {
    if (count >= 16) return store(p);
    if (count >= 8) {
      _mm256_storeu_ps(p, lo);
      _mm256_maskstore_ps(p + 8, mask(count - 8), hi);
    } else {
      _mm256_maskstore_ps(p, mask(count), lo);
    }
  }
  static Avx2 fma(Avx2 a, Avx2 b, Avx2 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static Avx2 add(Avx2 a, Avx2 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static Avx2 sub(Avx2 a, Avx2 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static Avx2 mul(Avx2 a, Avx2 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static Avx2 div(Avx2 a, Avx2 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  static Avx2 max(Avx2 a, Avx2 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }

  // The steps of Avx512::exp.
  static __m256 exp8(__m256 a) {
    const __m256 x = _mm256_min_ps(_mm256_set1_ps(88.8f), _mm256_max_ps(_mm256_set1_ps(-87.33f), a));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    // 2^n in two factors: n = 128 alone is no float.
    const __m256i i = _mm256_cvtps_epi32(n);
    const __m256i half = _mm256_srai_epi32(i, 1);
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23));
    const __m256 y = _mm256_mul_ps(_mm256_mul_ps(p, first), second);
    const __m256 result = _mm256_andnot_ps(_mm256_cmp_ps(a, _mm256_set1_ps(-87.33f), _CMP_LT_OQ), y);
    return _mm256_blendv_ps(result, a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
  static Avx2 exp(Avx2 a) { return {exp8(a.lo), exp8(a.hi)}; }

  static __m128 quarter(Avx2 a) {
    const __m256 h = _mm256_add_ps(a.lo, a.hi);
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  }
  static void reduce_add16(const Avx2* s, float* out) {
    for (int i = 0; i < 16; i += 4) {
      __m128 a = quarter(s[i]), b = quarter(s[i + 1]), c = quarter(s[i + 2]), d = quarter(s[i + 3]);
      _MM_TRANSPOSE4_PS(a, b, c, d);  // a: lane 0 of the four sums, b: lane 1, ...
      _mm_storeu_ps(out + i, _mm_add_ps(_mm_add_ps(a, c), _mm_add_ps(b, d)));
    }
  }
  static float reduce_add(Avx2 a) {
    const __m128 q = quarter(a);
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
  }
};

#include "trainer/ops/cpu_kernels_impl.h"

}  // namespace

const CpuKernels<float>& kernels_avx2() {
  static const CpuKernels<float> table = kernel_table<Avx2>("avx2");
  return table;
}

}  // namespace trireme
#pragma GCC pop_options
#else
namespace trireme {
const CpuKernels<float>& kernels_avx2() { return kernels_portable(); }
}  // namespace trireme
#endif
