// Checkpoints that are copied from the device beside what it computes.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "base/fs.h"
#include "tests/gpu/device.h"
#include "tests/unit/model/tiny.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/parallel/device.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

using CheckpointOnGpu = testing::GpuTest;

// Some 40 million parameters: 0.6 GB of weights and state.
ModelConfig config() {
  ModelConfig config = test::tiny_config({.vocab = 8192,
                                          .hidden = 1024,
                                          .intermediate = 3072,
                                          .layers = 2,
                                          .heads = 8,
                                          .kv_heads = 4,
                                          .head_dim = 128,
                                          .positions = 512,
                                          .tied = false});
  config.dtype = "bfloat16";
  return config;
}

struct DeviceRun {
  DeviceRun(const fs::path& dir, int64_t staging_bytes, int64_t block_bytes)
      : model(config(), options()), optimizer(model, context.data_parallel(), {}) {
    seed_gpu(3);
    model.flat_parameters().detach().normal_(0, 0.02);
    optimizer.reset_master_from_weights();
    CheckpointOptions checkpoint;
    checkpoint.directory = dir;
    checkpoint.keep_top_k = 0;
    checkpoint.staging_bytes = staging_bytes;
    checkpoint.staging_block_bytes = block_bytes;
    manager = std::make_unique<CheckpointManager>(checkpoint, nlohmann::json::object(), context);
    optimizer.before_update = [this] { manager->wait_copied(); };
  }
  static void seed_gpu(uint64_t seed) { testing::seed_gpu(seed); }
  static ModelOptions options() {
    ModelOptions options;
    options.device = testing::gpu();
    options.dtype = at::kBFloat16;
    return options;
  }
  void step() {
    model.flat_gradients().normal_(0, 0.01);
    optimizer.step(0.01, 0.01, 1);
  }
  std::vector<at::Tensor> state() const {
    std::vector<at::Tensor> all = {model.flat_parameters().detach().clone()};
    for (const auto& [name, tensor] : optimizer.saved().tensors) all.push_back(tensor.clone());
    return all;
  }

  ParallelContext context;
  Model model;
  DistributedAdamW optimizer;
  std::unique_ptr<CheckpointManager> manager;
};

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(testing::equal_bits(a[i], b[i])) << i;
}

class Copies : public testing::GpuTest, public ::testing::WithParamInterface<int64_t> {};

// With memory for all, and with two small blocks that go round.
TEST_P(Copies, AreOfTheMomentOfTheCallWhateverComesBehind) {
  const TemporaryDirectory dir, plain;
  DeviceRun run(dir.path(), GetParam(), int64_t{4} << 20);
  for (int i = 0; i < 3; ++i) run.step();
  const std::vector<at::Tensor> saved = run.state();  // queued as the last step is, perhaps not done yet
  run.manager->begin_save(5, run.model, run.optimizer, {}, {}, "");
  for (int i = 0; i < 3; ++i) run.step();
  run.manager->finish();
  const std::vector<at::Tensor> end = run.state();
  EXPECT_FALSE(testing::equal_bits(end[0], saved[0]));
  DeviceRun loaded(dir.path(), 0, int64_t{64} << 20);
  ASSERT_TRUE(loaded.manager->load_latest(loaded.model, loaded.optimizer));
  expect_equal(loaded.state(), saved);
  // The bytes are those that the plain writers write of the same state.
  const fs::path policy = dir.path() / "step_5" / "policy";
  loaded.optimizer.save(plain.path());
  save_model(loaded.model, plain.path(), {});
  EXPECT_TRUE(read_file(policy / "optimizer" / "rank_00000.safetensors") ==
              read_file(plain.path() / "rank_00000.safetensors"));
  EXPECT_TRUE(read_file(policy / "weights" / "model.safetensors") == read_file(plain.path() / "model.safetensors"));
}
INSTANTIATE_TEST_SUITE_P(Memory, Copies, ::testing::Values(int64_t{0}, int64_t{1}));

// Graphs are captured by the engine while a copy runs: as it does, thread by thread.
TEST_F(CheckpointOnGpu, CapturesOfGraphsGoOnBesideACopy) {
  const TemporaryDirectory dir;
  DeviceRun run(dir.path(), 1, int64_t{1} << 20);
  run.step();
  const std::vector<at::Tensor> saved = run.state();
  at::Tensor x = at::ones({1024, 1024}, at::TensorOptions().device(testing::gpu()));
  const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool(false, 0);
  synchronize(testing::gpu());
  run.manager->begin_save(1, run.model, run.optimizer, {}, {}, "");
  {
    const c10::cuda::CUDAStreamGuard guard(side);
    for (int round = 0; round < 20; ++round) {
      at::cuda::CUDAGraph graph;
      graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
      at::Tensor y = x + 1;
      x.copy_(y);
      graph.capture_end();
      graph.replay();
    }
    side.synchronize();
  }
  run.step();
  run.manager->finish();
  EXPECT_EQ(x[0][0].item<float>(), 21);
  DeviceRun loaded(dir.path(), 0, int64_t{64} << 20);
  ASSERT_TRUE(loaded.manager->load_latest(loaded.model, loaded.optimizer));
  expect_equal(loaded.state(), saved);
}

TEST_F(CheckpointOnGpu, MemoryIsPinnedUpToTheLimit) {
  StagingPool pool(testing::gpu(), int64_t{8} << 20, int64_t{2} << 20);
  pool.reserve(int64_t{1} << 30);
  pool.wait_reserved();
  const std::atomic<bool> cancelled{false};
  std::vector<uint8_t*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(pool.acquire(cancelled));
  for (uint8_t* block : blocks) {
    cudaPointerAttributes attributes{};
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, block), cudaSuccess);
    EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
    pool.release(block);
  }
}

}  // namespace
}  // namespace trireme
