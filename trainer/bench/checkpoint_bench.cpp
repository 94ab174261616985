#include "trainer/bench/checkpoint_bench.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "base/atomic_file.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/device.h"

namespace trireme::bench {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kRows = 64;  // of a forward pass: it takes the time of reading the weights, as a decode step does

// A disk of a given rate that keeps nothing.
class ImaginedFile final : public ByteSink {
 public:
  explicit ImaginedFile(double bytes_per_second) : rate_(bytes_per_second) {}
  void write(const void*, size_t bytes) override {
    bytes_ += static_cast<double>(bytes);
    const double ahead = bytes_ / rate_ - watch_.seconds();
    if (ahead > 0) std::this_thread::sleep_for(std::chrono::duration<double>(ahead));
  }
  void finish() override {}

 private:
  const double rate_;
  double bytes_ = 0;
  Stopwatch watch_;
};

struct Save {
  double begin_seconds = 0;    // in which no step ran
  double wait_seconds = 0;     // of the optimizer step
  double written_seconds = 0;  // until the checkpoint had its name
  double pass_seconds = 0;     // of a forward pass beside it

  double stall() const { return begin_seconds + wait_seconds; }
};

class CheckpointBench final {
 public:
  CheckpointBench(const CheckpointBenchOptions& options, ParallelContext& context)
      : options_(options), context_(context), target_(resolve(options.common)) {
    seconds_ = options.generation_seconds > 0 ? options.generation_seconds : target_.device.is_cuda() ? 20 : 1;
    ModelOptions trainable = target_.model_options(/*trainable=*/true);
    trainable.gradient_dtype = parse_dtype(options.gradient_dtype);
    model_ = make_random_model(target_.config, trainable, options.common.seed);
    AdamWOptions adam;
    adam.reduce_in_fp32 = trainable.gradient_dtype == at::kFloat;
    optimizer_ = std::make_unique<DistributedAdamW>(*model_, context.data_parallel(), adam);
    std::vector<int32_t> ids(kRows);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i) % 256;
    const PackedBatch batch = PackedBatch::from_sequences({ids});
    batch_ = batch;
    batch_.ids = batch.ids.to(target_.device);
    batch_.positions = batch.positions.to(target_.device);
    make_manager();
  }

  nlohmann::json run(std::ostream& out) {
    context_.set_phase("benchmark");
    // A step first: it makes the buffers of collectives and moments that are not zero.
    model_->flat_gradients().fill_(1e-4);
    optimizer_->step(1e-6, 0.01, 1.0);
    manager_->open(*model_, *optimizer_);
    Stopwatch reserving;
    manager_->wait_reserved();
    const double reserved = worst(reserving.seconds());
    (void)passes();
    const double quiet = worst(passes());
    const Save first = one_save(1);
    std::vector<Save> saves;
    for (int64_t r = 0; r < options_.common.repeats; ++r) saves.push_back(one_save(r + 2));
    remove_written();
    std::error_code ignored;
    if (context_.is_main()) fs::remove_all(folder_, ignored);
    return report(reserved, quiet, first, saves, out);
  }

 private:
  void make_manager() {
    if (context_.is_main() && options_.directory.empty()) scratch_ = std::make_unique<TemporaryDirectory>();
    std::string folder;
    if (context_.is_main())
      folder = (scratch_ ? scratch_->path() : fs::path(options_.directory) / ("bench-" + random_owner())).string();
    folder_ = context_.world().all_gather_bytes(folder).front();
    CheckpointOptions checkpoint;
    checkpoint.directory = folder_;
    checkpoint.keep_top_k = 0;
    checkpoint.staging_bytes = static_cast<int64_t>(options_.staging_gib * static_cast<double>(1 << 30));
    if (options_.disk_gigabytes_per_second > 0) {
      checkpoint.open_file = [rate = options_.disk_gigabytes_per_second * 1e9](const fs::path&) {
        return std::make_unique<ImaginedFile>(rate);
      };
    }
    manager_ = std::make_unique<CheckpointManager>(checkpoint, nlohmann::json::object(), context_);
  }

  double worst(double own) { return context_.world().all_reduce_max(own); }

  // Seconds of one forward pass, of as many as go into generation_seconds.
  double passes() {
    const c10::NoGradGuard no_grad;
    synchronize(target_.device);
    Stopwatch watch;
    int64_t count = 0;
    while (watch.seconds() < seconds_) {
      (void)model_->forward(batch_);
      synchronize(target_.device);
      ++count;
    }
    return watch.seconds() / static_cast<double>(count);
  }

  // No second checkpoint beside the last: the disk need not hold two.
  void remove_written() {
    if (context_.is_main()) {
      std::error_code ignored;
      for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
        if (starts_with(entry.path().filename().string(), "step_")) fs::remove_all(entry.path(), ignored);
      }
    }
    context_.world().barrier();
  }

  Save one_save(int64_t step) {
    remove_written();
    synchronize(target_.device);
    context_.world().barrier();
    Save save;
    Stopwatch watch;
    manager_->begin_save(step, *model_, *optimizer_, nlohmann::json::object(), {}, "");
    save.begin_seconds = watch.seconds();
    save.pass_seconds = worst(passes());
    model_->flat_gradients().fill_(1e-4);
    optimizer_->before_update = [this, &save] {
      Stopwatch wait;
      manager_->wait_copied();
      save.wait_seconds = wait.seconds();
    };
    optimizer_->step(1e-6, 0.01, 1.0);
    optimizer_->before_update = nullptr;
    save.wait_seconds = worst(save.wait_seconds);
    manager_->finish();
    const std::optional<SavedCheckpoint> saved = manager_->take_saved();
    bytes_ = context_.data_parallel().all_reduce_sum(saved ? saved->bytes : int64_t{0});
    save.written_seconds = worst(saved ? saved->seconds : 0);
    save.begin_seconds = worst(save.begin_seconds);
    return save;
  }

  nlohmann::json report(double reserved, double quiet, const Save& first, const std::vector<Save>& saves,
                        std::ostream& out) {
    std::vector<double> stalls, written, beside;
    for (const Save& save : saves) {
      stalls.push_back(save.stall());
      written.push_back(save.written_seconds);
      beside.push_back(save.pass_seconds);
    }
    const double stall = median(stalls), seconds = median(written), pass = median(beside);
    const double bytes = static_cast<double>(bytes_);
    nlohmann::json json = report_header("checkpoint", options_.common, target_);
    json.update({{"ranks", context_.world_size()},
                 {"bytes", bytes_},
                 {"generation_seconds", seconds_},
                 {"staging_gib", options_.staging_gib},
                 {"disk_gigabytes_per_second", options_.disk_gigabytes_per_second},
                 {"reserve_seconds", reserved},
                 {"stall_seconds", stall},
                 {"stall_seconds_of_repeats", stalls},
                 {"first_stall_seconds", first.stall()},
                 {"written_seconds", seconds},
                 {"written_seconds_of_repeats", written},
                 {"bytes_per_second", bytes / seconds},
                 {"forward_seconds", quiet},
                 {"forward_seconds_beside", pass}});
    if (!context_.is_main()) return json;
    Table table({"checkpoint " + options_.common.shape + ", " + std::to_string(context_.world_size()) + " ranks",
                 "seconds", ""});
    table.add({"stall of a step", format_fixed(stall, 3), "the first " + format_fixed(first.stall(), 3)});
    table.add(
        {"written, synced and renamed", format_fixed(seconds, 2), format_fixed(bytes / seconds / 1e9, 2) + " GB/s"});
    table.add({"a forward pass of " + std::to_string(kRows) + " tokens", format_fixed(quiet, 5), ""});
    table.add({"  beside the save", format_fixed(pass, 5), percent(pass, quiet)});
    table.add({"host memory made ready, once", format_fixed(reserved, 2), ""});
    table.print(out);
    out << "bytes of a checkpoint: " << format_bytes(static_cast<uint64_t>(bytes_)) << "\n";
    if (options_.disk_gigabytes_per_second > 0) out << "the disk was imagined: its rate is what was asked for\n";
    write_report(options_.common, json);
    return json;
  }

  const CheckpointBenchOptions& options_;
  ParallelContext& context_;
  const Target target_;
  double seconds_ = 0;
  std::unique_ptr<Model> model_;
  std::unique_ptr<DistributedAdamW> optimizer_;
  PackedBatch batch_;
  std::unique_ptr<TemporaryDirectory> scratch_;  // rank 0
  std::string folder_;
  std::unique_ptr<CheckpointManager> manager_;
  int64_t bytes_ = 0;  // of all ranks' weights and state
};

}  // namespace

nlohmann::json bench_checkpoint(const CheckpointBenchOptions& options, ParallelContext& context, std::ostream& out) {
  return CheckpointBench(options, context).run(out);
}

}  // namespace trireme::bench
