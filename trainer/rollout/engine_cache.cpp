// The memory of an engine: the KV cache, its size, and the lanes that share it.
#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/rollout/cache_size.h"
#include "trainer/rollout/engine_impl.h"

namespace trireme {

std::unique_ptr<KvArena> Engine::Impl::make_arena(int64_t rows, int64_t most) const {
  const int64_t scratch = on_cuda() ? kDeviceScratchRows : 0;
  return std::make_unique<KvArena>(model.local(), rows + scratch, model.options().dtype, model.options().device,
                                   most + scratch);
}

std::unique_ptr<StepRunner> Engine::Impl::make_runner(KvArena& over) const {
  if (on_cuda()) return make_device_runner(model, over, options.max_sequences, options.lanes, options.partition);
  return make_host_runner(model, over);
}

// Only when idle.
void Engine::Impl::make_lanes(int64_t rows) {
  TRIREME_CHECK(groups.empty(), "the cache's size was changed under samples");
  lanes.clear();
  for (const LaneShare& share : lane_shares(options.lanes, rows, options.max_sequences, options.max_total_length)) {
    scheduling.first_row = share.first_row;
    scheduling.cache_rows = share.rows;
    scheduling.max_sequences = share.max_sequences;
    lanes.emplace_back(scheduling);
  }
  cache_rows = rows;
  stats.lanes = static_cast<int64_t>(lanes.size());
}

void Engine::Impl::use_rows(int64_t rows) {
  if (rows != cache_rows) make_lanes(rows);
  if (stats.lanes < options.lanes && stats.lanes != fewer_lanes) {
    fewer_lanes = stats.lanes;
    log_info("rollout", "generation has " + std::to_string(stats.lanes) + " of " + std::to_string(options.lanes) +
                            " lanes: " + std::to_string(rows) + " cache rows and " +
                            std::to_string(options.max_sequences) + " places are for as many sequences of " +
                            std::to_string(options.max_total_length) + " tokens");
  }
  stats.cache_rows = rows;
}

void Engine::Impl::allocate() {
  if (on_cuda() && options.cache_rows == 0) return allocate_measured();
  int64_t rows = options.cache_rows;
  if (rows == 0) {
    rows = host_cache_rows(available_memory_bytes(), options.cache_memory_fraction, {row_bytes(), most_rows()});
  }
  rows = least_of_ranks(rows);
  auto made = make_arena(rows, rows);
  runner = make_runner(*made);
  arena = std::move(made);
  use_rows(rows);
}

void Engine::Impl::restore() {
  int64_t rows = cache_rows;
  if (on_cuda())
    log_debug("rollout", "the cache takes its memory again: " + to_string(device_memory(model.options().device)));
  if (measured_rows > 0) rows = least_of_ranks(rows_that_fit());
  arena->restore(rows + (on_cuda() ? kDeviceScratchRows : 0));
  use_rows(rows);
}

namespace {

std::string gibibytes(int64_t bytes) { return format_bytes(static_cast<uint64_t>(std::max<int64_t>(0, bytes))); }

}  // namespace

// Over a small arena with addresses for all the memory there could be, everything that takes memory besides happens
// first. Then the arena gets its share of what is left.
void Engine::Impl::allocate_measured() {
  const at::Device device = model.options().device;
  Stopwatch watch;
  empty_device_cache(device);
  const int64_t row_elements = model.local().key_width();
  const int64_t reachable = cuda::kAddressable / row_elements - 1 - kDeviceScratchRows;
  const int64_t most =
      least_of_ranks(mapped_cache_rows(device_memory(device).total, reachable, {row_bytes(), most_rows()}));
  const int64_t widest = std::min(most, options.prefill_chunk_tokens + options.max_sequences);
  auto made = make_arena(widest, most);
  auto steps = make_runner(*made);
  SampleRow like;
  like.options = sampling->logprob_options();
  steps->warm_up(options.prefill_chunk_tokens, like);
  const DeviceMemory memory = device_memory(device);
  made->release();
  const int64_t left = device_memory(device).free;
  const int64_t rows = least_of_ranks(device_cache_rows(left, options.cache_memory_fraction, {row_bytes(), most}));
  made->restore(rows + kDeviceScratchRows);
  log_info("rollout", "the largest step keeps " + gibibytes(memory.cached) + " and " + gibibytes(left) +
                          " of the GPU's memory are left beside it: the cache has " + std::to_string(rows) + " rows, " +
                          gibibytes(rows * row_bytes()) + " (" + format_fixed(watch.seconds(), 1) + " s)");
  runner = std::move(steps);
  arena = std::move(made);
  step_bytes = memory.cached;
  measured_rows = rows;
  use_rows(rows);
}

// As many as before, or what others have left.
int64_t Engine::Impl::rows_that_fit() {
  const at::Device device = model.options().device;
  const CacheLimits limits{row_bytes(), measured_rows};
  if (returning_cache_rows(device_memory(device).free, 0, limits) == measured_rows) return measured_rows;
  empty_device_cache(device);
  const DeviceMemory memory = device_memory(device);
  // What steps had of the allocator's went with it, but for the graphs' part.
  const int64_t rows = returning_cache_rows(memory.free, std::max<int64_t>(0, step_bytes - memory.cached), limits);
  if (rows < measured_rows && rows != cache_rows) {
    log_warn("rollout", "only " + gibibytes(memory.free) + " of the GPU's memory are free: the cache has " +
                            std::to_string(rows) + " rows instead of " + std::to_string(measured_rows) +
                            "; a lower policy.generation.kv_cache_memory_fraction leaves more to training");
  }
  return rows;
}

void Engine::Impl::take_cache() {
  if (arena == nullptr) {
    allocate();
  } else if (!arena->resident()) {
    restore();
  }
}

}  // namespace trireme
