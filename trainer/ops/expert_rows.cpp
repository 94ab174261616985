#include "trainer/ops/expert_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "trainer/ops/checks.h"
#include "trainer/ops/cpu_kernels.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/linear.h"
#include "trainer/ops/parallel.h"

namespace trireme {
namespace {

constexpr int64_t kGrainElements = 16'384;

int64_t grain_rows(int64_t width) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, width)); }

at::Tensor int_tensor(std::vector<int64_t> sizes) { return at::empty(sizes, at::TensorOptions().dtype(at::kInt)); }

// Logits of one row -> its choices, by ascending id, and their weights; `probabilities` [experts] is written.
template <class T>
void choose(const T* logits, const ExpertShape& shape, int32_t* experts, T* weights, T* probabilities,
            std::vector<int32_t>& order) {
  const T largest = *std::max_element(logits, logits + shape.experts);
  T sum = 0;
  for (int64_t e = 0; e < shape.experts; ++e) sum += probabilities[e] = std::exp(logits[e] - largest);
  for (int64_t e = 0; e < shape.experts; ++e) probabilities[e] /= sum;
  for (int64_t e = 0; e < shape.experts; ++e) order[static_cast<size_t>(e)] = static_cast<int32_t>(e);
  std::partial_sort(order.begin(), order.begin() + shape.per_token, order.end(),
                    [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
  std::copy_n(order.begin(), shape.per_token, experts);
  std::sort(experts, experts + shape.per_token);
  T chosen = 0;
  for (int64_t j = 0; j < shape.per_token; ++j) chosen += weights[j] = probabilities[experts[j]];
  for (int64_t j = 0; shape.normalize && j < shape.per_token; ++j) weights[j] /= chosen;
}

template <class T>
void choose_rows(const at::Tensor& logits, const ExpertShape& shape, Routes& routes, bool keep_probabilities) {
  const int64_t rows = logits.size(0), experts = shape.experts, k = shape.per_token;
  const T* from = logits.const_data_ptr<T>();
  for (int64_t i = 0; i < rows * experts; ++i) {
    if (!std::isfinite(from[i])) throw RouterError(i / experts);
  }
  int32_t* chosen = routes.experts.mutable_data_ptr<int32_t>();
  T* weights = routes.weights.mutable_data_ptr<T>();
  T* kept = keep_probabilities ? routes.probabilities.mutable_data_ptr<T>() : nullptr;
  parallel_tasks(rows, grain_rows(experts * 8), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> order(static_cast<size_t>(experts));
    std::vector<T> probabilities(static_cast<size_t>(experts));
    for (int64_t r = begin; r < end; ++r) {
      choose(from + r * experts, shape, chosen + r * k, weights + r * k,
             kept != nullptr ? kept + r * experts : probabilities.data(), order);
    }
  });
}

// f(expert, first sorted row, rows) of every expert that has any.
template <class F>
void for_groups(const at::Tensor& offsets, F&& f) {
  const int32_t* offset = offsets.const_data_ptr<int32_t>();
  for (int64_t e = 0; e + 1 < offsets.size(0); ++e) {
    if (offset[e + 1] > offset[e]) f(e, int64_t{offset[e]}, int64_t{offset[e + 1]} - offset[e]);
  }
}

at::Tensor matrix_of(const at::Tensor& weights, int64_t expert, const at::Tensor& offsets) {
  const int64_t out = weights.size(0) / (offsets.size(0) - 1);
  return weights.narrow(0, expert * out, out);
}

// One inner loop for combine and for its two steps: however a compiler adds, both get the same bits.
template <class T>
void add_weighted(T* sum, const T* row, T weight, int64_t width) {
  for (int64_t c = 0; c < width; ++c) sum[c] += weight * row[c];
}

template <class T>
T rounded(T value, bool to_bf16) {
  return to_bf16 ? static_cast<T>(static_cast<float>(c10::BFloat16(static_cast<float>(value)))) : value;
}

template <class T>
void combine_rows(const at::Tensor& y, const Routes& routes, const ExpertShape& shape, at::Tensor& out) {
  const int64_t rows = routes.experts.size(0), k = shape.per_token, width = y.size(1);
  const int64_t of_block = shape.experts / shape.combine_blocks;
  const bool round = out.scalar_type() == at::kBFloat16;
  const at::Tensor in = for_compute(y);
  at::Tensor sum = at::empty({rows, width}, in.options());
  const T* from = in.const_data_ptr<T>();
  const T* weights = routes.weights.const_data_ptr<T>();
  const int32_t* experts = routes.experts.const_data_ptr<int32_t>();
  const int32_t* places = routes.places.const_data_ptr<int32_t>();
  T* to = sum.mutable_data_ptr<T>();
  parallel_tasks(rows, grain_rows(width * k), [&](int64_t begin, int64_t end) {
    std::vector<T> block(static_cast<size_t>(width));
    for (int64_t r = begin; r < end; ++r) {
      T* total = to + r * width;
      std::fill_n(total, width, T{0});
      for (int64_t j = 0; j < k;) {
        const int64_t of = experts[r * k + j] / of_block;
        std::fill(block.begin(), block.end(), T{0});
        for (; j < k && experts[r * k + j] / of_block == of; ++j) {
          const T* row = from + places[r * k + j] * width;
          add_weighted(block.data(), row, weights[r * k + j], width);
        }
        for (int64_t c = 0; c < width; ++c) total[c] += rounded(block[static_cast<size_t>(c)], round);
      }
    }
  });
  out.copy_(sum);
}

}  // namespace

RouterError::RouterError(int64_t row, int64_t layer)
    : Error(ErrorKind::kData, "row " + std::to_string(row) + ": the router's logits are not finite" +
                                  (layer < 0 ? "" : " in layer " + std::to_string(layer))),
      row_(row),
      layer_(layer) {}

void sort_by_expert(Routes& routes, int64_t experts) {
  const int64_t rows = routes.experts.size(0), k = routes.experts.size(1);
  const int32_t* chosen = routes.experts.const_data_ptr<int32_t>();
  std::vector<int32_t> next(static_cast<size_t>(experts) + 1, 0);
  for (int64_t i = 0; i < rows * k; ++i) ++next[static_cast<size_t>(chosen[i]) + 1];
  for (size_t e = 1; e < next.size(); ++e) next[e] += next[e - 1];
  routes.offsets = int_tensor({experts + 1});
  std::copy(next.begin(), next.end(), routes.offsets.mutable_data_ptr<int32_t>());
  routes.rows = int_tensor({rows * k});
  routes.places = int_tensor({rows, k});
  int32_t* sorted = routes.rows.mutable_data_ptr<int32_t>();
  int32_t* places = routes.places.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < rows * k; ++i) {
    const int32_t place = next[static_cast<size_t>(chosen[i])]++;
    places[i] = place;
    sorted[place] = static_cast<int32_t>(i / k);
  }
}

at::Tensor block_sums(const at::Tensor& y, const at::Tensor& places, const at::Tensor& weights,
                      const at::Tensor& begins) {
  if (y.is_cuda()) return cuda::block_sums(y, places, weights, begins);
  const int64_t sums = begins.size(0) - 1, width = y.size(1);
  const at::Tensor in = for_compute(y);
  const at::Tensor out = at::zeros({sums, width}, in.options());
  const int32_t* place = places.const_data_ptr<int32_t>();
  const int32_t* begin = begins.const_data_ptr<int32_t>();
  with_compute_type(y, [&](auto zero) {
    using T = decltype(zero);
    const T* from = in.const_data_ptr<T>();
    const T* weight = weights.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    parallel_tasks(sums, grain_rows(width * 2), [&](int64_t first, int64_t last) {
      for (int64_t s = first; s < last; ++s) {
        for (int32_t i = begin[s]; i < begin[s + 1]; ++i)
          add_weighted(to + s * width, from + place[i] * width, weight[i], width);
      }
    });
  });
  return out.to(y.scalar_type());
}

at::Tensor sum_blocks(const at::Tensor& blocks, const at::Tensor& places, const at::Tensor& begins) {
  if (blocks.is_cuda()) return cuda::sum_blocks(blocks, places, begins);
  const int64_t rows = begins.size(0) - 1, width = blocks.size(1);
  const at::Tensor in = for_compute(blocks);
  const at::Tensor out = at::zeros({rows, width}, in.options());
  const int32_t* place = places.const_data_ptr<int32_t>();
  const int32_t* begin = begins.const_data_ptr<int32_t>();
  with_compute_type(blocks, [&](auto zero) {
    using T = decltype(zero);
    const T* from = in.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for (int64_t r = 0; r < rows; ++r) {
      for (int32_t i = begin[r]; i < begin[r + 1]; ++i) {
        for (int64_t c = 0; c < width; ++c) to[r * width + c] += from[place[i] * width + c];
      }
    }
  });
  return out.to(blocks.scalar_type());
}

at::Tensor part_block_sums(const at::Tensor& y, const Routes& routes, const ExpertShape& shape, int64_t first_block,
                           int64_t blocks) {
  if (y.is_cuda()) return cuda::part_block_sums(y, routes, shape, first_block, blocks);
  const int64_t rows = routes.experts.size(0), k = shape.per_token, width = y.size(1);
  const int64_t of_block = shape.experts / shape.combine_blocks;
  const at::Tensor in = for_compute(y);
  const at::Tensor out = at::zeros({rows, blocks, width}, in.options());
  const int32_t* experts = routes.experts.const_data_ptr<int32_t>();
  const int32_t* places = routes.places.const_data_ptr<int32_t>();
  with_compute_type(y, [&](auto zero) {
    using T = decltype(zero);
    const T* from = in.const_data_ptr<T>();
    const T* weights = routes.weights.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    parallel_tasks(rows, grain_rows(width * k), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * k; i < end * k; ++i) {
        const int64_t block = experts[i] / of_block - first_block;
        if (block < 0 || block >= blocks) continue;
        add_weighted(to + (i / k * blocks + block) * width, from + places[i] * width, weights[i], width);
      }
    });
  });
  return out.to(y.scalar_type());
}

at::Tensor sum_in_order(const at::Tensor& blocks) {
  if (blocks.is_cuda()) return cuda::sum_in_order(blocks);
  const int64_t rows = blocks.size(0), of_row = blocks.size(1);
  const at::Tensor places = at::arange(rows * of_row, at::TensorOptions().dtype(at::kInt));
  const at::Tensor begins = at::arange(rows + 1, places.options()).mul_(of_row);
  return sum_blocks(blocks.reshape({rows * of_row, blocks.size(2)}), places, begins);
}

at::Tensor grouped_part(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, bool swiglu) {
  if (x.is_cuda()) return cuda::grouped_part(x, weight, offsets, swiglu);
  const at::Tensor y = grouped_linear(x, weight, offsets, x.size(0));
  return swiglu ? swiglu_halves(y) : y;
}

Routes route(const at::Tensor& x, const at::Tensor& router, const ExpertShape& shape, bool probabilities,
             at::Tensor* sorted) {
  if (x.is_cuda()) return cuda::route(x, router, shape, probabilities, sorted);
  const at::ScalarType type = compute_type(x);
  const at::ScalarType wide = shape.wide_router ? at::kDouble : type;
  const at::Tensor logits = linear_by_rows(x.to(wide), router.to(wide), {}).to(type);
  Routes routes;
  routes.experts = int_tensor({x.size(0), shape.per_token});
  routes.weights = at::empty({x.size(0), shape.per_token}, at::TensorOptions().dtype(type));
  if (probabilities) routes.probabilities = at::empty_like(logits);
  with_compute_type(x, [&](auto zero) { choose_rows<decltype(zero)>(logits, shape, routes, probabilities); });
  sort_by_expert(routes, shape.experts);
  if (sorted != nullptr) *sorted = gather_rows_by(x, routes.rows);
  return routes;
}

at::Tensor gather_rows_by(const at::Tensor& x, const at::Tensor& rows) {
  return x.is_cuda() ? cuda::gather_rows_by(x, rows) : x.index_select(0, rows);
}

at::Tensor gather_part(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& offsets) {
  return x.is_cuda() ? cuda::gather_part(x, rows, offsets) : x.index_select(0, rows);
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, int64_t most) {
  if (x.is_cuda()) return cuda::grouped_linear(x, weight, offsets, most);
  at::Tensor y = at::empty({x.size(0), weight.size(0) / (offsets.size(0) - 1)}, x.options());
  for_groups(offsets, [&](int64_t expert, int64_t first, int64_t count) {
    y.narrow(0, first, count).copy_(linear_forward(x.narrow(0, first, count), matrix_of(weight, expert, offsets), {}));
  });
  return y;
}

at::Tensor combine(const at::Tensor& y, const Routes& routes, const ExpertShape& shape) {
  if (y.is_cuda()) return cuda::combine(y, routes, shape);
  at::Tensor out = at::empty({routes.experts.size(0), y.size(1)}, y.options());
  with_compute_type(y, [&](auto zero) { combine_rows<decltype(zero)>(y, routes, shape, out); });
  return out;
}

at::Tensor sum_places(const at::Tensor& y, const at::Tensor& places) {
  if (y.is_cuda()) return cuda::sum_places(y, places);
  at::Tensor sum = at::zeros({places.size(0), y.size(1)}, y.options().dtype(compute_type(y)));
  for (int64_t j = 0; j < places.size(1); ++j) sum += y.index_select(0, places.select(1, j));
  return sum.to(y.scalar_type());
}

ExpertGradients expert_gradients(const at::Tensor& gate_up, const at::Tensor& upstream, const Routes& routes) {
  if (gate_up.is_cuda()) return cuda::expert_gradients(gate_up, upstream, routes);
  const at::Tensor in = for_compute(gate_up), u = for_compute(upstream);
  const int64_t rows = in.size(0), width = u.size(1);
  const at::Tensor place = routes.places.flatten().to(at::kLong);
  at::Tensor weight = at::empty({rows}, routes.weights.options());  // of each sorted row
  weight.index_copy_(0, place, routes.weights.flatten());
  at::Tensor active = at::empty_like(u), dgate_up = at::empty_like(in), dot = at::empty_like(weight);
  const at::Tensor scaled = u * weight.unsqueeze(1);
  with_compute_type(gate_up, [&](auto zero) {
    using T = decltype(zero);
    const T* from = in.const_data_ptr<T>();
    const T* up_stream = u.const_data_ptr<T>();
    const T* dy = scaled.const_data_ptr<T>();
    T* act = active.mutable_data_ptr<T>();
    T* to = dgate_up.mutable_data_ptr<T>();
    T* sums = dot.mutable_data_ptr<T>();
    parallel_tasks(rows, grain_rows(width), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T *gate = from + 2 * r * width, *up = gate + width;
        T *dgate = to + 2 * r * width, *dup = dgate + width;
        cpu_kernels<T>().swiglu(gate, up, act + r * width, width);
        cpu_kernels<T>().swiglu_backward(gate, up, dy + r * width, dgate, dup, width);
        sums[r] = cpu_kernels<T>().dot(up_stream + r * width, act + r * width, width);
      }
    });
  });
  return {(active * weight.unsqueeze(1)).to(gate_up.scalar_type()), dgate_up.to(gate_up.scalar_type()),
          dot.index_select(0, place).view(routes.weights.sizes())};
}

at::Tensor router_gradient(const at::Tensor& weights_gradient, const Routes& routes, const ExpertShape& shape) {
  const at::Tensor& weights = routes.weights;
  const at::Tensor mean = (weights * weights_gradient).sum(1, /*keepdim=*/true);
  const at::Tensor chosen = routes.experts.to(at::kLong);
  // Normalised weights are a softmax over the chosen alone; else the probabilities of a softmax over all.
  if (shape.normalize) {
    const at::Tensor dlogits = at::zeros({weights.size(0), shape.experts}, weights.options());
    return dlogits.scatter_(1, chosen, weights * (weights_gradient - mean));
  }
  return (routes.probabilities * -mean).scatter_add_(1, chosen, weights * weights_gradient);
}

at::Tensor grouped_backward_input(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& offsets) {
  if (dy.is_cuda()) return cuda::grouped_backward_input(dy, weight, offsets);
  at::Tensor dx = at::empty({dy.size(0), weight.size(1)}, dy.options());
  for_groups(offsets, [&](int64_t expert, int64_t first, int64_t count) {
    dx.narrow(0, first, count).copy_(dy.narrow(0, first, count).mm(matrix_of(weight, expert, offsets)));
  });
  return dx;
}

std::function<at::Tensor()> offsets_on_host(const at::Tensor& offsets) {
  if (offsets.is_cuda()) return cuda::offsets_on_host(offsets);
  return [offsets] { return offsets; };
}

at::Tensor grouped_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& offsets,
                                   const at::Tensor& weight, const at::Tensor& accumulator) {
  if (dy.is_cuda()) return cuda::grouped_backward_weight(dy, x, offsets, weight, accumulator);
  at::Tensor gradient = at::zeros(weight.sizes(), weight.options());
  for_groups(offsets, [&](int64_t expert, int64_t first, int64_t count) {
    matrix_of(gradient, expert, offsets).copy_(dy.narrow(0, first, count).t().mm(x.narrow(0, first, count)));
  });
  return gradient;
}

bool grouped_rows_are_exact(int64_t experts, int64_t hidden, int64_t width, at::Device device) {
  // On the host a group is a call of linear.
  return device.is_cpu() || cuda::grouped_rows_are_exact(experts, hidden, width, device);
}

}  // namespace trireme
