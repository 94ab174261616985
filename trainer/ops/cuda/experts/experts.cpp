// Mixtures of experts on a device: LibTorch's tensors around expert_kernels.h, and which grouped GEMM computes what.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/_grouped_mm.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "trainer/ops/cuda/device/stream.h"
#include "trainer/ops/cuda/experts/expert_kernels.h"
#include "trainer/ops/cuda/gemm/linear.h"
#include "trainer/ops/cuda_ops.h"

namespace trireme::cuda {
namespace {

// What grouped_rows_are_exact found: which of the two have the bits of linear. The library's serves where there are
// many rows, or where ours does not; ours where there are few, or where the library's does not.
std::atomic<bool> ours_is_exact{true}, library_is_exact{true};

// Up to so many rows of an expert our kernel is asked first.
constexpr int64_t kFewRows = 256;
// Sorted rows of all ranks that share experts, where each gathers and sorts them all: of more it is less work to send
// each rank its own. Eight ranks with 256 samples each of 8 experts a row.
constexpr int64_t kMostPartRows = int64_t{1} << 14;

bool ours_first(int64_t most) { return ours_is_exact && (most <= kFewRows || !library_is_exact); }

const Bf16* elements_of(const at::Tensor& x) { return static_cast<const Bf16*>(x.const_data_ptr()); }
Bf16* mutable_elements_of(const at::Tensor& x) { return static_cast<Bf16*>(x.mutable_data_ptr()); }
const int32_t* ints_of(const at::Tensor& x) { return x.const_data_ptr<int32_t>(); }

void check_launched() { C10_CUDA_CHECK(cudaGetLastError()); }

int64_t experts_of(const at::Tensor& offsets) { return offsets.size(0) - 1; }

at::Tensor matrices(const at::Tensor& weight, const at::Tensor& offsets) {
  return weight.view({experts_of(offsets), weight.size(0) / experts_of(offsets), weight.size(1)});
}

struct Group {  // an expert that has rows
  at::Tensor matrix;
  int64_t first = 0, count = 0;
};
// `offsets` lie on the host.
std::vector<Group> groups_of(const at::Tensor& weight, const at::Tensor& offsets) {
  const at::Tensor all = matrices(weight, offsets);
  const int32_t* offset = ints_of(offsets);
  std::vector<Group> groups;
  for (int64_t e = 0; e < experts_of(offsets); ++e) {
    if (offset[e + 1] > offset[e]) groups.push_back({all[e], offset[e], offset[e + 1] - offset[e]});
  }
  return groups;
}

at::Tensor by_grouped_mm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets) {
  return at::_grouped_mm(x, matrices(weight, offsets).transpose(1, 2), offsets.narrow(0, 1, experts_of(offsets)));
}

// What the others are compared with. Waits for the device.
at::Tensor one_by_one(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets) {
  at::Tensor y = at::empty({x.size(0), weight.size(0) / experts_of(offsets)}, x.options());
  for (const Group& group : groups_of(weight, offsets.cpu())) {
    y.narrow(0, group.first, group.count)
        .copy_(linear_forward(x.narrow(0, group.first, group.count), group.matrix, {}));
  }
  return y;
}

// Undefined: not a shape for our kernel.
at::Tensor by_our_kernel(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, int64_t most,
                         bool swiglu) {
  GroupedGemmArgs args;
  args.x = x.const_data_ptr();
  args.weight = weight.const_data_ptr();
  args.offsets = ints_of(offsets);
  args.rows = x.size(0);
  args.experts = experts_of(offsets);
  args.in = x.size(1);
  args.out = weight.size(0) / args.experts / (swiglu ? 2 : 1);
  args.most = most;
  args.swiglu = swiglu;
  args.early = may_begin_early();
  if (!grouped_gemm_supported(args)) return {};
  at::Tensor y = at::empty({args.rows, args.out}, x.options());
  args.y = y.mutable_data_ptr();
  C10_CUDA_CHECK(grouped_gemm(args, stream_of(x)));
  return y;
}

at::Tensor grouped_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, int64_t most) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (x.size(0) == 0) return at::empty({0, weight.size(0) / experts_of(offsets)}, x.options());
  if (ours_first(most)) {
    if (at::Tensor y = by_our_kernel(x, weight, offsets, most, /*swiglu=*/false); y.defined()) return y;
  }
  return by_grouped_mm(x, weight, offsets);
}

}  // namespace

Routes route(const at::Tensor& x, const at::Tensor& router, const ExpertShape& shape, bool probabilities,
             at::Tensor* sorted) {
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t rows = x.size(0), k = shape.per_token, experts = shape.experts;
  TRIREME_CHECK(experts <= kMostExperts && k <= kMostPerToken && x.size(1) % 64 == 0 && x.is_contiguous(),
                "route: a shape without kernels");
  const auto ints = x.options().dtype(at::kInt), floats = x.options().dtype(at::kFloat);
  const at::Tensor logits = at::empty({rows, experts}, floats);
  Routes routes{at::empty({rows, k}, ints),     at::empty({rows, k}, floats),
                at::empty({experts + 1}, ints), at::empty({rows * k}, ints),
                at::empty({rows, k}, ints),     probabilities ? at::empty({rows, experts}, floats) : at::Tensor()};
  if (sorted != nullptr) *sorted = at::empty({rows * k, x.size(1)}, x.options());
  if (rows == 0) {
    routes.offsets.zero_();
    return routes;
  }
  const at::Tensor scratch = at::empty({sort_scratch_bytes(rows, experts)}, x.options().dtype(at::kByte));
  const cudaStream_t stream = stream_of(x);
  const bool early = may_begin_early();
  router_logits(elements_of(x), elements_of(router), rows, x.size(1), experts, shape.wide_router,
                logits.mutable_data_ptr<float>(), stream, early);
  const RoutePlace to{routes.experts.mutable_data_ptr<int32_t>(),
                      routes.weights.mutable_data_ptr<float>(),
                      probabilities ? routes.probabilities.mutable_data_ptr<float>() : nullptr,
                      routes.offsets.mutable_data_ptr<int32_t>(),
                      routes.rows.mutable_data_ptr<int32_t>(),
                      routes.places.mutable_data_ptr<int32_t>()};
  SortedRows gathered;
  if (sorted != nullptr) gathered = {elements_of(x), x.size(1), mutable_elements_of(*sorted)};
  choose_and_sort(logits.const_data_ptr<float>(), rows, experts, k, shape.normalize, to, gathered,
                  scratch.mutable_data_ptr(), stream, early);
  check_launched();
  return routes;
}

at::Tensor gather_rows_by(const at::Tensor& x, const at::Tensor& rows) {
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor out = at::empty({rows.size(0), x.size(1)}, x.options());
  gather_rows(elements_of(x.contiguous()), ints_of(rows), rows.size(0), x.size(1), mutable_elements_of(out),
              stream_of(x), may_begin_early());
  check_launched();
  return out;
}

at::Tensor gather_part(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& offsets) {
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor out = at::empty({rows.size(0), x.size(1)}, x.options());
  gather_part(elements_of(x.contiguous()), ints_of(rows), ints_of(offsets), ints_of(offsets) + experts_of(offsets),
              rows.size(0), x.size(1), mutable_elements_of(out), stream_of(x), may_begin_early());
  check_launched();
  return out;
}

at::Tensor combine(const at::Tensor& y, const Routes& routes, const ExpertShape& shape) {
  const c10::cuda::CUDAGuard guard(y.device());
  at::Tensor out = at::empty({routes.experts.size(0), y.size(1)}, y.options());
  combine_rows(elements_of(y), ints_of(routes.experts), routes.weights.const_data_ptr<float>(), ints_of(routes.places),
               out.size(0), shape.per_token, shape.experts / shape.combine_blocks, y.size(1), mutable_elements_of(out),
               stream_of(y), may_begin_early());
  check_launched();
  return out;
}

at::Tensor block_sums(const at::Tensor& y, const at::Tensor& places, const at::Tensor& weights,
                      const at::Tensor& begins) {
  const c10::cuda::CUDAGuard guard(y.device());
  at::Tensor out = at::empty({begins.size(0) - 1, y.size(1)}, y.options());
  weighted_sums(elements_of(y), ints_of(places), weights.const_data_ptr<float>(), ints_of(begins), out.size(0),
                y.size(1), mutable_elements_of(out), stream_of(y));
  check_launched();
  return out;
}

at::Tensor sum_blocks(const at::Tensor& blocks, const at::Tensor& places, const at::Tensor& begins) {
  const c10::cuda::CUDAGuard guard(blocks.device());
  at::Tensor out = at::empty({begins.size(0) - 1, blocks.size(1)}, blocks.options());
  plain_sums(elements_of(blocks), ints_of(places), ints_of(begins), out.size(0), blocks.size(1),
             mutable_elements_of(out), stream_of(blocks));
  check_launched();
  return out;
}

at::Tensor part_block_sums(const at::Tensor& y, const Routes& routes, const ExpertShape& shape, int64_t first_block,
                           int64_t blocks) {
  const c10::cuda::CUDAGuard guard(y.device());
  at::Tensor out = at::empty({routes.experts.size(0), blocks, y.size(1)}, y.options());
  part_sums(elements_of(y), ints_of(routes.experts), routes.weights.const_data_ptr<float>(), ints_of(routes.places),
            {.rows = out.size(0),
             .per_token = shape.per_token,
             .of_block = shape.experts / shape.combine_blocks,
             .first_block = first_block,
             .blocks = blocks,
             .width = y.size(1)},
            mutable_elements_of(out), stream_of(y), may_begin_early());
  check_launched();
  return out;
}

at::Tensor sum_in_order(const at::Tensor& blocks) {
  const c10::cuda::CUDAGuard guard(blocks.device());
  const at::Tensor in = blocks.contiguous();
  at::Tensor out = at::empty({in.size(0), in.size(2)}, in.options());
  sums_in_order(elements_of(in), in.size(0), in.size(1), in.size(2), mutable_elements_of(out), stream_of(in),
                may_begin_early());
  check_launched();
  return out;
}

at::Tensor sum_places(const at::Tensor& y, const at::Tensor& places) {
  const c10::cuda::CUDAGuard guard(y.device());
  at::Tensor out = at::empty({places.size(0), y.size(1)}, y.options());
  sum_rows_of_places(elements_of(y), ints_of(places), places.size(0), places.size(1), y.size(1),
                     mutable_elements_of(out), stream_of(y));
  check_launched();
  return out;
}

ExpertGradients expert_gradients(const at::Tensor& gate_up, const at::Tensor& upstream, const Routes& routes) {
  const c10::cuda::CUDAGuard guard(gate_up.device());
  const int64_t rows = gate_up.size(0), width = upstream.size(1);
  const at::Tensor place = routes.places.flatten().to(at::kLong);
  const at::Tensor of_rows =
      at::empty({rows}, routes.weights.options()).index_copy_(0, place, routes.weights.flatten());
  ExpertGradients result{at::empty({rows, width}, gate_up.options()), at::empty_like(gate_up), {}};
  const at::Tensor dots = at::empty_like(of_rows);
  expert_gradient_rows(elements_of(gate_up), elements_of(upstream), of_rows.const_data_ptr<float>(), rows, width,
                       mutable_elements_of(result.weighted), mutable_elements_of(result.gate_up),
                       dots.mutable_data_ptr<float>(), stream_of(gate_up));
  check_launched();
  result.weights = dots.index_select(0, place).view(routes.weights.sizes());
  return result;
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, int64_t most) {
  return grouped_product(x, weight, offsets, most);
}

at::Tensor grouped_gate_up_swiglu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets,
                                  int64_t most) {
  const c10::cuda::CUDAGuard guard(x.device());
  if (x.size(0) > 0 && ours_first(most)) {
    if (at::Tensor y = by_our_kernel(x, weight, offsets, most, /*swiglu=*/true); y.defined()) return y;
  }
  return swiglu_halves(grouped_product(x, weight, offsets, most));
}

at::Tensor grouped_part(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offsets, bool swiglu) {
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor y = by_our_kernel(x, weight, offsets, std::min(x.size(0), kFewRows), swiglu);
  TRIREME_CHECK(y.defined(), "grouped_part: more rows than our kernel takes, or another shape");
  return y;
}

bool grouped_part_supported(int64_t sorted_rows, int64_t experts, int64_t hidden, int64_t width) {
  GroupedGemmArgs gate_up{.rows = sorted_rows, .experts = experts, .in = hidden, .out = width, .swiglu = true};
  GroupedGemmArgs down{.rows = sorted_rows, .experts = experts, .in = width, .out = hidden};
  return ours_is_exact && sorted_rows <= kMostPartRows && grouped_gemm_supported(gate_up) &&
         grouped_gemm_supported(down);
}

at::Tensor grouped_backward_input(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& offsets) {
  const c10::cuda::CUDAGuard guard(dy.device());
  if (dy.size(0) == 0) return at::empty({0, weight.size(1)}, dy.options());
  return at::_grouped_mm(dy, matrices(weight, offsets), offsets.narrow(0, 1, experts_of(offsets)));
}

std::function<at::Tensor()> offsets_on_host(const at::Tensor& offsets) {
  const c10::cuda::CUDAGuard guard(offsets.device());
  const at::Tensor host = at::empty(offsets.sizes(), at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  host.copy_(offsets, /*non_blocking=*/true);
  const auto copied = std::make_shared<at::cuda::CUDAEvent>();
  copied->record();
  return [host, copied] {
    copied->synchronize();
    return host;
  };
}

at::Tensor grouped_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& offsets,
                                   const at::Tensor& weight, const at::Tensor& accumulator) {
  const c10::cuda::CUDAGuard guard(dy.device());
  const at::Tensor target = accumulator.defined() ? accumulator : at::zeros_like(weight);
  const std::vector<Group> groups = groups_of(target, offsets);
  beside_each_other(dy.device(), static_cast<int64_t>(groups.size()), [&](int64_t index) {
    const Group& group = groups[static_cast<size_t>(index)];
    linear_backward_weight(dy.narrow(0, group.first, group.count), x.narrow(0, group.first, group.count), group.matrix);
  });
  return target;
}

namespace {

bool same_bits(const at::Tensor& a, const at::Tensor& b) { return at::equal(a.view(at::kShort), b.view(at::kShort)); }

// Numbers of mixed size: another order of additions shows in the last bits.
at::Tensor mixed_numbers(int64_t rows, int64_t columns, double step, at::Device device) {
  return at::arange(rows * columns, at::TensorOptions().dtype(at::kDouble).device(device))
      .mul_(step)
      .sin_()
      .mul_(3.0)
      .to(at::kBFloat16)
      .view({rows, columns});
}

at::Tensor offsets_of(const std::vector<int64_t>& sizes, at::Device device) {
  std::vector<int32_t> offsets{0};
  for (const int64_t size : sizes) offsets.push_back(offsets.back() + static_cast<int32_t>(size));
  return at::tensor(offsets, at::TensorOptions().dtype(at::kInt)).to(device);
}

}  // namespace

bool grouped_rows_are_exact(int64_t experts, int64_t hidden, int64_t width, at::Device device) {
  const c10::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(device);
  const std::vector<std::vector<int64_t>> cases = {
      {1, 0, 7, 16, 3, 0, 2, 5},  {17, 1, 0, 32, 2, 0, 9, 31},        {17, 64, 0, 33, 1, 48, 65, 31},
      {256, 0, 0, 0, 0, 0, 0, 0}, {1000, 130, 0, 7, 1, 2049, 16, 64}, {2049, 1000, 0, 700, 33, 1, 400, 65}};
  const auto tried = static_cast<int64_t>(cases.front().size());
  bool ours = true, library = true;
  for (const auto& [in, out, gate_up] : {std::tuple{hidden, 2 * width, true}, std::tuple{width, hidden, false}}) {
    const at::Tensor weight = mixed_numbers(tried * out, in, 0.4177, device);
    for (const std::vector<int64_t>& sizes : cases) {
      const at::Tensor offsets = offsets_of(sizes, device);
      const int64_t rows = offsets[tried].item<int32_t>(), most = *std::max_element(sizes.begin(), sizes.end());
      const at::Tensor x = mixed_numbers(rows, in, 0.7311, device), expected = one_by_one(x, weight, offsets);
      library = library && same_bits(by_grouped_mm(x, weight, offsets), expected);
      const at::Tensor plain = by_our_kernel(x, weight, offsets, most, false);
      ours = ours && (!plain.defined() || same_bits(plain, expected));
      if (!gate_up) continue;
      const at::Tensor active = by_our_kernel(x, weight, offsets, most, true);
      ours = ours && (!active.defined() || same_bits(active, swiglu_halves(expected)));
    }
  }
  // A process may hold several models: what one of them finds holds for all.
  ours = ours && grouped_gemm_in_use();
  library = library && library_grouped_gemm_in_use();
  set_grouped_gemms_in_use(ours, library);
  if (!ours)
    log_warn("ops", "our grouped GEMM has other bits than cublasLt on this machine; it is not used (slower decoding)");
  if (!library) {
    log_warn("ops", std::string("the library's grouped GEMM has other bits than cublasLt on this machine") +
                        (ours ? "; ours computes all products of experts (slower training)" : ""));
  }
  return ours || library;
}

bool grouped_gemm_in_use() { return ours_is_exact; }
bool library_grouped_gemm_in_use() { return library_is_exact; }
void set_grouped_gemms_in_use(bool ours, bool library) {
  ours_is_exact = ours;
  library_is_exact = library;
}

}  // namespace trireme::cuda
