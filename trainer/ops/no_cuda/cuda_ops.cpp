// cuda_ops.h in builds without CUDA. Nobody comes here: there is no tensor on a device.
#include "trainer/ops/cuda_ops.h"

#include "base/error.h"

namespace trireme::cuda {
namespace {

[[noreturn]] void none() { fail_internal("this build has no CUDA"); }

}  // namespace

bool built() { return false; }

at::Tensor rms_norm(const at::Tensor&, const at::Tensor&, double, int64_t) { none(); }
NormResult add_rms_norm(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t) { none(); }
at::Tensor swiglu(const at::Tensor&, const at::Tensor&) { none(); }
at::Tensor swiglu_halves(const at::Tensor&) { none(); }
at::Tensor ordered_sum(const at::Tensor&) { none(); }
at::Tensor embed_part(const at::Tensor&, const at::Tensor&, const EmbeddingPart&) { none(); }
at::Tensor embed(const at::Tensor&, const at::Tensor&) { none(); }
void throw_on_bad_ids(at::Device) { none(); }
Qkv split_qkv(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
              const QkvLayout&) {
  none();
}
at::Tensor split_qkv_cached(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&, const QkvLayout&, const at::Tensor&, const at::Tensor&,
                            const CachePlan&) {
  none();
}
at::Tensor device_addresses(const std::vector<at::Tensor>&) { none(); }
void copy_arena_rows(const at::Tensor&, int64_t, const std::vector<std::array<int64_t, 3>>&, bool) { none(); }

at::Tensor linear_forward(const at::Tensor&, const at::Tensor&, const at::Tensor&) { none(); }
void linear_forward_into(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) { none(); }
at::Tensor gate_up_swiglu(const at::Tensor&, const at::Tensor&) { none(); }
at::Tensor linear_backward_input(const at::Tensor&, const at::Tensor&) { none(); }
void linear_backward_input_into(const at::Tensor&, const at::Tensor&, const at::Tensor&) { none(); }
void linear_backward_weight(const at::Tensor&, const at::Tensor&, const at::Tensor&) { none(); }
int64_t own_rows_limit() { none(); }
void set_own_rows_limit(int64_t) { none(); }
DecodeScope::DecodeScope() : before_(false) { none(); }
DecodeScope::~DecodeScope() = default;

Routes route(const at::Tensor&, const at::Tensor&, const ExpertShape&, bool, at::Tensor*) { none(); }
at::Tensor gather_rows_by(const at::Tensor&, const at::Tensor&) { none(); }
at::Tensor gather_part(const at::Tensor&, const at::Tensor&, const at::Tensor&) { none(); }
at::Tensor combine(const at::Tensor&, const Routes&, const ExpertShape&) { none(); }
at::Tensor block_sums(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) { none(); }
at::Tensor sum_blocks(const at::Tensor&, const at::Tensor&, const at::Tensor&) { none(); }
at::Tensor part_block_sums(const at::Tensor&, const Routes&, const ExpertShape&, int64_t, int64_t) { none(); }
at::Tensor sum_in_order(const at::Tensor&) { none(); }
at::Tensor grouped_part(const at::Tensor&, const at::Tensor&, const at::Tensor&, bool) { none(); }
bool grouped_part_supported(int64_t, int64_t, int64_t, int64_t) { return false; }
at::Tensor sum_places(const at::Tensor&, const at::Tensor&) { none(); }
ExpertGradients expert_gradients(const at::Tensor&, const at::Tensor&, const Routes&) { none(); }
at::Tensor grouped_linear(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t) { none(); }
at::Tensor grouped_gate_up_swiglu(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t) { none(); }
at::Tensor grouped_backward_input(const at::Tensor&, const at::Tensor&, const at::Tensor&) { none(); }
std::function<at::Tensor()> offsets_on_host(const at::Tensor&) { none(); }
at::Tensor grouped_backward_weight(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&) {
  none();
}
bool grouped_rows_are_exact(int64_t, int64_t, int64_t, at::Device) { none(); }

at::Tensor attention_packed(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::vector<int64_t>&,
                            const std::vector<int64_t>&, double) {
  none();
}
at::Tensor attention_runs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                          const std::shared_ptr<const AttentionRuns>&, double) {
  none();
}
CachePlan make_cache_plan(std::vector<CacheRun>, int64_t, at::Device) { none(); }
at::Tensor attention_cached(const at::Tensor&, const at::Tensor&, const at::Tensor&, const CachePlan&, double) {
  none();
}
void append_cached(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const CachePlan&) {
  none();
}

int64_t vocabulary_chunk_rows(int64_t, int64_t) { none(); }
LogprobResult token_logprobs(const at::Tensor&, const at::Tensor&, const at::Tensor&, const LogprobOptions&, bool,
                             const SplitLogits*) {
  none();
}
DeviceSamples sample_tokens_on_device(const at::Tensor&, const at::Tensor&, const DeviceSampling&, const SplitLogits*) {
  none();
}
SampleResult sample_tokens(const at::Tensor&, const at::Tensor&, const std::vector<SampleRow>&) { none(); }

}  // namespace trireme::cuda
