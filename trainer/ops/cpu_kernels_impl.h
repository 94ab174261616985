// Bodies of the CPU kernels over a vector type V; included once per instruction set, inside that set's namespace, so it
// includes nothing itself. V provides: Element T, kLanes, zero, all, load, load(p, count), store, store(p, count), fma
// (a * b + c), add, sub, mul, div, max, exp, and reduce_add(V[16]) -> T[16], reduce_add(V) -> T with one fixed tree
// (lane i with i + lanes/2, then quarter, ...).

#define TRIREME_INLINE inline __attribute__((always_inline))

// Dot products of R rows and C columns, R * C == 16, into out[r * C + c]. Every product is one chain of fused
// multiply-adds over blocks of kLanes elements and one tree, so its bits do not depend on R, C or its place.
template <class V, int R, int C>
TRIREME_INLINE void dot_tile(const typename V::T* const* a, const typename V::T* const* b, int64_t k,
                             typename V::T* out) {
  static_assert(R * C == 16);
  V sum[16];
  for (int i = 0; i < 16; ++i) sum[i] = V::zero();
  int64_t at = 0;
  for (; at + V::kLanes <= k; at += V::kLanes) {
    V row[R];
    for (int r = 0; r < R; ++r) row[r] = V::load(a[r] + at);
    for (int c = 0; c < C; ++c) {
      const V column = V::load(b[c] + at);
      for (int r = 0; r < R; ++r) sum[r * C + c] = V::fma(row[r], column, sum[r * C + c]);
    }
  }
  if (at < k) {
    const int64_t rest = k - at;
    V row[R];
    for (int r = 0; r < R; ++r) row[r] = V::load(a[r] + at, rest);
    for (int c = 0; c < C; ++c) {
      const V column = V::load(b[c] + at, rest);
      for (int r = 0; r < R; ++r) sum[r * C + c] = V::fma(row[r], column, sum[r * C + c]);
    }
  }
  V::reduce_add16(sum, out);
}

// Rows and columns left over repeat the last one; their results are not stored.
template <class V, int R, int C>
TRIREME_INLINE void gemm_rows(const typename V::T* a, int64_t lda, int64_t rows, const typename V::T* b, int64_t ldb,
                              int64_t n, int64_t k, const typename V::T* bias, typename V::T* out, int64_t ldo) {
  using T = typename V::T;
  const T* row[R];
  for (int r = 0; r < R; ++r) row[r] = a + (r < rows ? r : rows - 1) * lda;
  for (int64_t c0 = 0; c0 < n; c0 += C) {
    const T* column[C];
    for (int c = 0; c < C; ++c) column[c] = b + (c0 + c < n ? c0 + c : n - 1) * ldb;
    alignas(64) T tile[16];
    dot_tile<V, R, C>(row, column, k, tile);
    if (bias == nullptr && n - c0 >= C) {
      for (int64_t r = 0; r < rows && r < R; ++r) __builtin_memcpy(out + r * ldo + c0, tile + r * C, C * sizeof(T));
      continue;
    }
    const int64_t columns = n - c0 < C ? n - c0 : C;
    for (int64_t r = 0; r < rows && r < R; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        out[r * ldo + c0 + c] = bias != nullptr ? tile[r * C + c] + bias[c0 + c] : tile[r * C + c];
      }
    }
  }
}

template <class V>
void gemm_nt(const typename V::T* a, int64_t lda, int64_t m, const typename V::T* b, int64_t ldb, int64_t n, int64_t k,
             const typename V::T* bias, typename V::T* out, int64_t ldo) {
  using T = typename V::T;
  if (m == 1) return gemm_rows<V, 1, 16>(a, lda, 1, b, ldb, n, k, bias, out, ldo);
  if (m == 2) return gemm_rows<V, 2, 8>(a, lda, 2, b, ldb, n, k, bias, out, ldo);
  // Four columns of b stay in the first-level cache while all rows pass.
  for (int64_t c0 = 0; c0 < n; c0 += 4) {
    const int64_t columns = n - c0 < 4 ? n - c0 : 4;
    const T* column_bias = bias != nullptr ? bias + c0 : nullptr;
    for (int64_t r = 0; r < m; r += 4) {
      gemm_rows<V, 4, 4>(a + r * lda, lda, m - r < 4 ? m - r : 4, b + c0 * ldb, ldb, columns, k, column_bias,
                         out + r * ldo + c0, ldo);
    }
  }
}

// scores[r * ld + j] = dot(a[r], b + j * stride) for j < n (rounded up to a tile; the surplus is rubbish but finite).
template <class V, int R>
TRIREME_INLINE void score_rows(const typename V::T* const* a, int64_t rows, const typename V::T* b, int64_t stride,
                               int64_t n, int64_t k, typename V::T* scores, int64_t ld) {
  using T = typename V::T;
  constexpr int C = 16 / R;
  const T* row[R];
  for (int r = 0; r < R; ++r) row[r] = a[r < rows ? r : rows - 1];
  for (int64_t j = 0; j < n; j += C) {
    const T* column[C];
    for (int c = 0; c < C; ++c) column[c] = b + (j + c < n ? j + c : n - 1) * stride;
    alignas(64) T tile[16];
    dot_tile<V, R, C>(row, column, k, tile);
    for (int r = 0; r < rows && r < R; ++r) __builtin_memcpy(scores + r * ld + j, tile + r * C, C * sizeof(T));
  }
}

// acc[r][0 .. width) += sum over j in [from, to) of w[r * ld + j] * x[j * stride + ...], one chain in the order of j.
template <class V, int R, int B>
TRIREME_INLINE void mix_block(const typename V::T* w, int64_t ld, const typename V::T* x, int64_t stride, int64_t from,
                              int64_t to, typename V::T* const* acc, int64_t at, int64_t width) {
  V sum[R][B];
  const bool whole = width >= B * V::kLanes;
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < B; ++i) sum[r][i] = whole ? V::load(acc[r] + at + i * V::kLanes) : V::load(acc[r] + at, width);
  }
  for (int64_t j = from; j < to; ++j) {
    V value[B];
    for (int i = 0; i < B; ++i) {
      value[i] = whole ? V::load(x + j * stride + at + i * V::kLanes) : V::load(x + j * stride + at, width);
    }
    for (int r = 0; r < R; ++r) {
      const V weight = V::all(w[r * ld + j]);
      for (int i = 0; i < B; ++i) sum[r][i] = V::fma(weight, value[i], sum[r][i]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < B; ++i) {
      if (whole) {
        sum[r][i].store(acc[r] + at + i * V::kLanes);
      } else {
        sum[r][i].store(acc[r] + at, width);
      }
    }
  }
}

template <class V, int R>
TRIREME_INLINE void mix_rows(const typename V::T* w, int64_t ld, const typename V::T* x, int64_t stride, int64_t from,
                             int64_t to, typename V::T* const* acc, int64_t width) {
  if (from >= to) return;
  int64_t at = 0;
  for (; at + 4 * V::kLanes <= width; at += 4 * V::kLanes) {
    mix_block<V, R, 4>(w, ld, x, stride, from, to, acc, at, 4 * V::kLanes);
  }
  for (; at + 2 * V::kLanes <= width; at += 2 * V::kLanes) {
    mix_block<V, R, 2>(w, ld, x, stride, from, to, acc, at, 2 * V::kLanes);
  }
  for (; at < width; at += V::kLanes) mix_block<V, R, 1>(w, ld, x, stride, from, to, acc, at, width - at);
}

// Rows of a group of up to four, each with its own number of keys (ascending): the common part together, the rest
// alone.
template <class V>
TRIREME_INLINE void mix_group(const typename V::T* w, int64_t ld, int64_t rows, const int64_t* n,
                              const typename V::T* x, int64_t stride, typename V::T* const* acc, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < width; ++i) acc[r][i] = 0;
  }
  const int64_t common = n[0];
  if (rows == 4) mix_rows<V, 4>(w, ld, x, stride, 0, common, acc, width);
  if (rows == 3) mix_rows<V, 3>(w, ld, x, stride, 0, common, acc, width);
  if (rows == 2) mix_rows<V, 2>(w, ld, x, stride, 0, common, acc, width);
  if (rows == 1) mix_rows<V, 1>(w, ld, x, stride, 0, common, acc, width);
  for (int64_t r = 0; r < rows; ++r) mix_rows<V, 1>(w + r * ld, ld, x, stride, common, n[r], acc + r, width);
}

template <class V>
typename V::T max_of(const typename V::T* x, int64_t n) {
  using T = typename V::T;
  // Lanes beyond n repeat element 0.
  V best = V::all(x[0]);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) best = V::max(best, V::load(x + i));
  alignas(64) T lanes[V::kLanes];
  best.store(lanes);
  for (; i < n; ++i) lanes[0] = lanes[0] > x[i] ? lanes[0] : x[i];
  T largest = lanes[0];
  for (int lane = 1; lane < V::kLanes; ++lane) largest = largest > lanes[lane] ? largest : lanes[lane];
  return largest;
}

template <class V>
typename V::T exp_sum(const typename V::T* x, typename V::T shift, typename V::T* out, int64_t n) {
  const V offset = V::all(shift);
  V sum = V::zero();
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    const V e = V::exp(V::sub(V::load(x + i), offset));
    e.store(out + i);
    sum = V::add(sum, e);
  }
  if (i < n) {
    const V e = V::keep(V::exp(V::sub(V::load(x + i, n - i), offset)), n - i);
    e.store(out + i, n - i);
    sum = V::add(sum, e);
  }
  return V::reduce_add(sum);
}

template <class V>
void scale_row(const typename V::T* x, typename V::T factor, typename V::T* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor;
}

template <class V>
void gated_line(const typename V::T* e, const typename V::T* z, typename V::T a, typename V::T b, typename V::T* out,
                int64_t n) {
  const V va = V::all(a), vb = V::all(b);
  for (int64_t i = 0; i < n; i += V::kLanes) {
    const int64_t count = n - i < V::kLanes ? n - i : V::kLanes;
    V::mul(V::load(e + i, count), V::fma(vb, V::load(z + i, count), va)).store(out + i, count);
  }
}

template <class V>
void add_to(typename V::T* acc, const typename V::T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] += x[i];
}

template <class V>
typename V::T dot_row(const typename V::T* a, const typename V::T* b, int64_t n) {
  V sum = V::zero();
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) sum = V::fma(V::load(a + i), V::load(b + i), sum);
  if (i < n) sum = V::fma(V::load(a + i, n - i), V::load(b + i, n - i), sum);
  return V::reduce_add(sum);
}

template <class V>
void attend(const AttendRows<typename V::T>& t) {
  using T = typename V::T;
  const int64_t ld = attend_scratch(t.n[t.rows - 1]) / 4;
  for (int64_t r0 = 0; r0 < t.rows; r0 += 4) {
    const int64_t rows = t.rows - r0 < 4 ? t.rows - r0 : 4;
    const int64_t last = t.n[r0 + rows - 1];
    T* scores = t.scratch;
    if (rows == 1) {
      score_rows<V, 1>(t.q + r0, rows, t.k, t.stride, last, t.head_dim, scores, ld);
    } else if (rows == 2) {
      score_rows<V, 2>(t.q + r0, rows, t.k, t.stride, last, t.head_dim, scores, ld);
    } else {
      score_rows<V, 4>(t.q + r0, rows, t.k, t.stride, last, t.head_dim, scores, ld);
    }
    T sums[4];
    for (int64_t r = 0; r < rows; ++r) {
      T* row = scores + r * ld;
      const int64_t n = t.n[r0 + r];
      scale_row<V>(row, t.scale, row, n);
      const T largest = max_of<V>(row, n);
      sums[r] = exp_sum<V>(row, largest, row, n);
      if (t.lse != nullptr) t.lse[r0 + r] = largest + log_of(sums[r]);
    }
    mix_group<V>(scores, ld, rows, t.n + r0, t.v, t.stride, t.out + r0, t.head_dim);
    for (int64_t r = 0; r < rows; ++r) scale_row<V>(t.out[r0 + r], 1 / sums[r], t.out[r0 + r], t.head_dim);
  }
}

// y[j * stride + ...] += sum over r of w[r * ld + j] * x[r][...].
template <class V, int R>
TRIREME_INLINE void spread_rows(const typename V::T* w, int64_t ld, const typename V::T* const* x, int64_t n,
                                typename V::T* y, int64_t stride, int64_t width) {
  for (int64_t at = 0; at < width; at += V::kLanes) {
    const int64_t count = width - at < V::kLanes ? width - at : V::kLanes;
    V row[R];
    for (int r = 0; r < R; ++r) row[r] = V::load(x[r] + at, count);
    for (int64_t j = 0; j < n; ++j) {
      typename V::T* target = y + j * stride + at;
      V sum = V::load(target, count);
      for (int r = 0; r < R; ++r) sum = V::fma(V::all(w[r * ld + j]), row[r], sum);
      sum.store(target, count);
    }
  }
}

template <class V>
void attend_backward(const AttendBackwardRows<typename V::T>& t) {
  using T = typename V::T;
  const int64_t ld = attend_scratch(t.n[t.rows - 1]) / 4;
  for (int64_t r0 = 0; r0 < t.rows; r0 += 4) {
    const int64_t rows = t.rows - r0 < 4 ? t.rows - r0 : 4;
    const int64_t last = t.n[r0 + rows - 1];
    T* p = t.scratch;
    T* ds = t.scratch + 4 * ld;
    score_rows<V, 4>(t.q + r0, rows, t.k, t.stride, last, t.head_dim, p, ld);
    score_rows<V, 4>(t.dout + r0, rows, t.v, t.stride, last, t.head_dim, ds, ld);
    for (int64_t r = 0; r < rows; ++r) {
      T* prow = p + r * ld;
      T* drow = ds + r * ld;
      const int64_t n = t.n[r0 + r];
      scale_row<V>(prow, t.scale, prow, n);
      exp_sum<V>(prow, t.lse[r0 + r], prow, n);
      const T delta = t.delta[r0 + r];
      for (int64_t j = 0; j < n; ++j) drow[j] = prow[j] * (drow[j] - delta) * t.scale;
      for (int64_t j = n; j < last; ++j) prow[j] = drow[j] = 0;
    }
    mix_group<V>(ds, ld, rows, t.n + r0, t.k, t.stride, t.dq + r0, t.head_dim);
    if (rows == 4) {
      spread_rows<V, 4>(ds, ld, t.q + r0, last, t.dk, t.stride, t.head_dim);
      spread_rows<V, 4>(p, ld, t.dout + r0, last, t.dv, t.stride, t.head_dim);
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        spread_rows<V, 1>(ds + r * ld, ld, t.q + r0 + r, last, t.dk, t.stride, t.head_dim);
        spread_rows<V, 1>(p + r * ld, ld, t.dout + r0 + r, last, t.dv, t.stride, t.head_dim);
      }
    }
  }
}

template <class V>
typename V::T rms_norm(const typename V::T* x, const typename V::T* w, typename V::T eps, typename V::T* y, int64_t n) {
  using T = typename V::T;
  const T inv = 1 / sqrt_of(dot_row<V>(x, x, n) / static_cast<T>(n) + eps);
  const V scale = V::all(inv);
  for (int64_t i = 0; i < n; i += V::kLanes) {
    const int64_t count = n - i < V::kLanes ? n - i : V::kLanes;
    V::mul(V::load(w + i, count), V::mul(V::load(x + i, count), scale)).store(y + i, count);
  }
  return inv;
}

template <class V>
void rms_norm_backward(const typename V::T* x, const typename V::T* w, const typename V::T* dy, typename V::T inv,
                       typename V::T* dx, typename V::T* dw, int64_t n) {
  using T = typename V::T;
  const V scale = V::all(inv);
  V sum = V::zero();
  for (int64_t i = 0; i < n; i += V::kLanes) {
    const int64_t count = n - i < V::kLanes ? n - i : V::kLanes;
    const V g = V::mul(V::load(dy + i, count), V::load(w + i, count));
    sum = V::fma(g, V::mul(V::load(x + i, count), scale), sum);
  }
  const V mean = V::all(V::reduce_add(sum) / static_cast<T>(n));
  for (int64_t i = 0; i < n; i += V::kLanes) {
    const int64_t count = n - i < V::kLanes ? n - i : V::kLanes;
    const V normal = V::mul(V::load(x + i, count), scale);
    const V out = V::load(dy + i, count);
    const V g = V::mul(out, V::load(w + i, count));
    V::mul(scale, V::sub(g, V::mul(normal, mean))).store(dx + i, count);
    if (dw != nullptr) V::fma(out, normal, V::load(dw + i, count)).store(dw + i, count);
  }
}

template <class V>
TRIREME_INLINE V sigmoid(V x) {
  return V::div(V::all(1), V::add(V::all(1), V::exp(V::sub(V::zero(), x))));
}

template <class V>
void swiglu(const typename V::T* gate, const typename V::T* up, typename V::T* y, int64_t n) {
  for (int64_t i = 0; i < n; i += V::kLanes) {
    const int64_t count = n - i < V::kLanes ? n - i : V::kLanes;
    const V g = V::load(gate + i, count);
    V::mul(V::mul(g, sigmoid(g)), V::load(up + i, count)).store(y + i, count);
  }
}

template <class V>
void swiglu_backward(const typename V::T* gate, const typename V::T* up, const typename V::T* dy, typename V::T* dgate,
                     typename V::T* dup, int64_t n) {
  for (int64_t i = 0; i < n; i += V::kLanes) {
    const int64_t count = n - i < V::kLanes ? n - i : V::kLanes;
    const V g = V::load(gate + i, count);
    const V out = V::load(dy + i, count);
    const V s = sigmoid(g);
    // d silu = s + g s (1 - s)
    const V slope = V::fma(V::mul(g, s), V::sub(V::all(1), s), s);
    V::mul(V::mul(out, V::load(up + i, count)), slope).store(dgate + i, count);
    V::mul(out, V::mul(g, s)).store(dup + i, count);
  }
}

template <class V>
void rotate(const typename V::T* x, const typename V::T* cos, const typename V::T* sin, typename V::T sign,
            typename V::T* y, int64_t half) {
  const V turn = V::all(sign);
  for (int64_t i = 0; i < half; i += V::kLanes) {
    const int64_t count = half - i < V::kLanes ? half - i : V::kLanes;
    const V c = V::load(cos + i, count);
    const V s = V::mul(turn, V::load(sin + i, count));
    const V x1 = V::load(x + i, count);
    const V x2 = V::load(x + half + i, count);
    V::sub(V::mul(x1, c), V::mul(x2, s)).store(y + i, count);
    V::add(V::mul(x2, c), V::mul(x1, s)).store(y + half + i, count);
  }
}

template <class V>
CpuKernels<typename V::T> kernel_table(const char* name) {
  return {name,        gemm_nt<V>,           attend<V>,    attend_backward<V>, dot_row<V>,
          max_of<V>,   exp_sum<V>,           scale_row<V>, gated_line<V>,      add_to<V>,
          rms_norm<V>, rms_norm_backward<V>, swiglu<V>,    swiglu_backward<V>, rotate<V>};
}
