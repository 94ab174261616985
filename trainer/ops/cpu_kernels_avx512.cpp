#include <cmath>
#include <cstdint>

#include "trainer/ops/cpu_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma")

namespace trireme {
namespace {

inline float log_of(float x) { return std::log(x); }
inline float sqrt_of(float x) { return std::sqrt(x); }

struct Avx512 {
  using T = float;
  static constexpr int kLanes = 16;
  __m512 v;

  static __mmask16 mask(int64_t count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }
  static Avx512 zero() { return {_mm512_setzero_ps()}; }
  static Avx512 all(float x) { return {_mm512_set1_ps(x)}; }
  static Avx512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Avx512 load(const float* p, int64_t count) { return {_mm512_maskz_loadu_ps(mask(count), p)}; }
  static Avx512 keep(Avx512 a, int64_t count) { return {_mm512_maskz_mov_ps(mask(count), a.v)}; }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p, int64_t count) const { _mm512_mask_storeu_ps(p, mask(count), v); }
  static Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Avx512 add(Avx512 a, Avx512 b) { return {_mm512_add_ps(a.v, b.v)}; }
  static Avx512 sub(Avx512 a, Avx512 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  static Avx512 mul(Avx512 a, Avx512 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static Avx512 div(Avx512 a, Avx512 b) { return {_mm512_div_ps(a.v, b.v)}; }
  static Avx512 max(Avx512 a, Avx512 b) { return {_mm512_max_ps(a.v, b.v)}; }

  // Cephes expf: 2^n times a polynomial, about 1 ulp; 0 below -87.3, infinity above 88.7, NaN stays.
  static Avx512 exp(Avx512 a) {
    // max and min give their second operand when one is NaN.
    const __m512 x = _mm512_min_ps(_mm512_set1_ps(88.8f), _mm512_max_ps(_mm512_set1_ps(-87.33f), a.v));
    const __m512 n =
        _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    const __m512 y = _mm512_scalef_ps(p, n);
    const __mmask16 tiny = _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(-87.33f), _CMP_LT_OQ);
    return {_mm512_mask_mov_ps(y, tiny, _mm512_setzero_ps())};
  }

  template <int kHalf>
  static __m512 fold(__m512 a, __m512 b) {
    // Groups of 2 * kHalf lanes: their low halves of a then b, plus their high halves of a then b.
    alignas(64) static constexpr struct Index {
      int low[16];
      int high[16];
      constexpr Index() : low(), high() {
        int out = 0;
        for (int source = 0; source < 32; source += 2 * kHalf) {
          for (int lane = 0; lane < kHalf; ++lane, ++out) {
            low[out] = source + lane;
            high[out] = source + kHalf + lane;
          }
        }
      }
    } index;
    return _mm512_add_ps(_mm512_permutex2var_ps(a, _mm512_load_si512(index.low), b),
                         _mm512_permutex2var_ps(a, _mm512_load_si512(index.high), b));
  }

  static void reduce_add16(const Avx512* s, float* out) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) a[i] = fold<8>(s[2 * i].v, s[2 * i + 1].v);
    for (int i = 0; i < 4; ++i) b[i] = fold<4>(a[2 * i], a[2 * i + 1]);
    for (int i = 0; i < 2; ++i) c[i] = fold<2>(b[2 * i], b[2 * i + 1]);
    _mm512_storeu_ps(out, fold<1>(c[0], c[1]));
  }

  static float reduce_add(Avx512 a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_shuffle_ps(d, d, 1)));
  }
};

#include "trainer/ops/cpu_kernels_impl.h"

}  // namespace

const CpuKernels<float>& kernels_avx512() {
  static const CpuKernels<float> table = kernel_table<Avx512>("avx512");
  return table;
}

}  // namespace trireme
#pragma GCC pop_options
#else
namespace trireme {
const CpuKernels<float>& kernels_avx512() { return kernels_portable(); }
}  // namespace trireme
#endif
