// CPU kernels on raw rows, one table per instruction set, chosen once at start-up. Deterministic bit for bit: an output
// element is a fixed sequence of operations on its own inputs, whatever tile, thread or batch computes it; AVX2 and
// AVX-512 give the same bits, the portable build (no fused multiply-add) others.
#pragma once

#include <cstdint>

namespace trireme {

// Query rows of one key head. Row r sees keys 0 .. n[r]; n must be ascending.
template <class T>
struct AttendRows {
  int64_t rows = 0;
  const T* const* q = nullptr;  // [rows] -> [head_dim]
  T* const* out = nullptr;      // [rows] -> [head_dim]
  T* lse = nullptr;             // [rows] natural log of the sum of exp(scale * score); may be null
  const int64_t* n = nullptr;   // [rows], each >= 1
  const T* k = nullptr;         // key j at k + j * stride
  const T* v = nullptr;
  int64_t stride = 0;
  int64_t head_dim = 0;
  T scale = 0;
  T* scratch = nullptr;  // attend_scratch(n[rows - 1]) elements
};

template <class T>
struct AttendBackwardRows {
  int64_t rows = 0;
  const T* const* q = nullptr;
  const T* const* dout = nullptr;
  const T* lse = nullptr;    // [rows]
  const T* delta = nullptr;  // [rows] dot(dout, out)
  T* const* dq = nullptr;    // written
  const int64_t* n = nullptr;
  const T* k = nullptr;
  const T* v = nullptr;
  T* dk = nullptr;  // added to, same stride
  T* dv = nullptr;
  int64_t stride = 0;
  int64_t head_dim = 0;
  T scale = 0;
  T* scratch = nullptr;  // 2 * attend_scratch(n[rows - 1]) elements
};

// Four rows of scores, each rounded up to whole tiles.
constexpr int64_t attend_scratch(int64_t n) { return 4 * ((n + 15) / 16 * 16); }

template <class T>
struct CpuKernels {
  const char* name;
  // out[r * ldo + c] = bias[c] (if any) + sum over k of a[r * lda + i] * b[c * ldb + i].
  void (*gemm_nt)(const T* a, int64_t lda, int64_t m, const T* b, int64_t ldb, int64_t n, int64_t k, const T* bias,
                  T* out, int64_t ldo);
  void (*attend)(const AttendRows<T>& rows);
  void (*attend_backward)(const AttendBackwardRows<T>& rows);
  T (*dot)(const T* a, const T* b, int64_t n);
  T (*max)(const T* x, int64_t n);
  // out[i] = exp(x[i] - shift); returns their sum. In place allowed.
  T (*exp_sum)(const T* x, T shift, T* out, int64_t n);
  void (*scale)(const T* x, T factor, T* out, int64_t n);
  // out[i] = e[i] * (a + b * z[i]).
  void (*gated_line)(const T* e, const T* z, T a, T b, T* out, int64_t n);
  void (*add_to)(T* acc, const T* x, int64_t n);
  // y = x * inv * w with inv = 1 / sqrt(mean(x^2) + eps), which is returned.
  T (*rms_norm)(const T* x, const T* w, T eps, T* y, int64_t n);
  // dx (written), dw (added to; null: not wanted).
  void (*rms_norm_backward)(const T* x, const T* w, const T* dy, T inv, T* dx, T* dw, int64_t n);
  void (*swiglu)(const T* gate, const T* up, T* y, int64_t n);
  void (*swiglu_backward)(const T* gate, const T* up, const T* dy, T* dgate, T* dup, int64_t n);
  // First and second half of a head: y1 = x1 c - x2 s, y2 = x2 c + x1 s; sign -1 turns back.
  void (*rotate)(const T* x, const T* cos, const T* sin, T sign, T* y, int64_t half);
};

template <class T>
const CpuKernels<T>& cpu_kernels();
template <>
const CpuKernels<float>& cpu_kernels<float>();
template <>
const CpuKernels<double>& cpu_kernels<double>();

// The tables. Call those of AVX only on a machine that has it (tests compare their bits).
const CpuKernels<float>& kernels_avx512();
const CpuKernels<float>& kernels_avx2();
const CpuKernels<float>& kernels_portable();
const CpuKernels<double>& kernels_portable_f64();

}  // namespace trireme
