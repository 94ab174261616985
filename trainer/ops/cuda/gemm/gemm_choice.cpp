#include "trainer/ops/cuda/gemm/gemm_choice.h"

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/log.h"
#include "trainer/ops/cuda/device/stream.h"
#include "trainer/ops/sms.h"

namespace trireme::cuda {

namespace {

using Kernel = GemmChoice::Kernel;

bool capturing(int device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream_of(device), &status));
  return status != cudaStreamCaptureStatusNone;
}

// Operands of trials, taken in turn, so that a trial finds its weight and its rows in no cache as decoding does.
class TrialOperands {
 public:
  // Of a weight that is cold by itself, the given one is read and no copy made.
  TrialOperands(int device, const SkinnyGemmArgs& args)
      : device_(device),
        given_(args.weight),
        weight_rows_(skinny_gemm::weight_rows(args)),
        weight_stride_(args.weight_stride),
        in_(args.in),
        copies_(std::clamp<int64_t>(kColdBytes / (2 * weight_rows_ * weight_stride_), 1, kMostCopies)),
        options_(at::TensorOptions().dtype(at::kBFloat16).device(at::kCUDA, static_cast<c10::DeviceIndex>(device))) {
    const at::Generator generator = at::cuda::detail::createCUDAGenerator(static_cast<c10::DeviceIndex>(device));
    if (copies_ > 1) weights_ = at::randn({copies_, weight_rows_, weight_stride_}, generator, options_);
    rows_ = at::randn({kRowCopies, args.rows, in_}, generator, options_);
    result = at::empty({args.rows, args.out}, options_);
    C10_CUDA_CHECK(cudaEventCreate(&from_));
    C10_CUDA_CHECK(cudaEventCreate(&to_));
  }
  ~TrialOperands() {
    (void)cudaEventDestroy(from_);
    (void)cudaEventDestroy(to_);
  }
  TrialOperands(const TrialOperands&) = delete;
  TrialOperands& operator=(const TrialOperands&) = delete;

  // Microseconds of a launch(x, weight) and the short kernel ahead of it, the mean of some; infinity where it returns
  // false.
  template <class Launch>
  double microseconds(const GemmTrial& trial, bool ours, const Launch& launch) {
    using Clock = std::chrono::steady_clock;
    constexpr int64_t kLaunches = 8;
    constexpr double kCyclesPerSecond = 2e9;
    const cudaStream_t stream = stream_of(device_);
    // Queued behind a pause, so that the host's time to launch is not in it.
    at::cuda::sleep(static_cast<int64_t>(1.5 * queueing_ * kCyclesPerSecond));
    const Clock::time_point start = Clock::now();
    C10_CUDA_CHECK(cudaEventRecord(from_, stream));
    for (int64_t i = 0; i < kLaunches; ++i, ++turn_) {
      const at::Tensor x = rows_.select(0, turn_ % kRowCopies);
      trial.before(x, ours);
      if (!launch(x, weight(turn_ % copies_))) return std::numeric_limits<double>::infinity();
    }
    C10_CUDA_CHECK(cudaEventRecord(to_, stream));
    queueing_ = std::clamp(std::chrono::duration<double>(Clock::now() - start).count(), 5e-5, 1e-3);
    C10_CUDA_CHECK(cudaEventSynchronize(to_));
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, from_, to_));
    return milliseconds * 1e3 / static_cast<double>(kLaunches);
  }

  at::Tensor result;

 private:
  static constexpr int64_t kColdBytes = 240'000'000;
  static constexpr int64_t kMostCopies = 64;  // a small weight's trials must end soon
  static constexpr int64_t kRowCopies = 8;

  at::Tensor weight(int64_t copy) const {
    if (copies_ > 1) return weights_.select(0, copy).narrow(1, 0, in_);
    return at::from_blob(const_cast<void*>(given_), {weight_rows_, in_}, {weight_stride_, 1}, options_);
  }

  int device_;
  const void* given_;
  int64_t weight_rows_, weight_stride_, in_, copies_;
  at::TensorOptions options_;
  at::Tensor weights_, rows_;
  int64_t turn_ = 0;        // of operands
  double queueing_ = 2e-4;  // seconds that the last round took to queue
  cudaEvent_t from_ = nullptr, to_ = nullptr;
};

// Ours, of each kernel at most so many, the lowest predicted times first; skinny_gemm_mma first of all.
std::vector<GemmChoice> candidates(const SkinnyGemmArgs& args, size_t most_mma, size_t most_wgmma) {
  std::vector<GemmChoice> all;
  const auto add = [&](auto plans, size_t most, Kernel kernel, auto GemmChoice::*plan) {
    std::stable_sort(plans.begin(), plans.end(),
                     [](const auto& a, const auto& b) { return a.predicted_us < b.predicted_us; });
    if (plans.size() > most) plans.resize(most);
    for (const auto& p : plans) {
      GemmChoice choice;
      choice.kernel = kernel;
      choice.*plan = p;
      all.push_back(choice);
    }
  };
  if (args.rows <= kMostMmaRows) add(skinny_gemm_mma_plans(args), most_mma, Kernel::kSkinnyGemmMma, &GemmChoice::mma);
  constexpr int64_t kTooFewForGroups = 16;  // of 64 tokens
  if (args.rows > kTooFewForGroups)
    add(skinny_gemm_wgmma_plans(args), most_wgmma, Kernel::kSkinnyGemmWgmma, &GemmChoice::wgmma);
  return all;
}

std::string text(const GemmChoice& c) {
  switch (c.kernel) {
    case Kernel::kSkinnyGemmMma:
      return "mma, columns " + std::to_string(c.mma.columns) + "/" + std::to_string(c.mma.fragments) + "/" +
             std::to_string(c.mma.tokens) + ", cluster " + std::to_string(c.mma.cluster) + " x " +
             std::to_string(c.mma.clusters) + ", slabs " + std::to_string(c.mma.slabs) + ", stages " +
             std::to_string(c.mma.stages);
    case Kernel::kSkinnyGemmWgmma:
      return "wgmma, columns " + std::to_string(c.wgmma.columns) + ", across " + std::to_string(c.wgmma.across) +
             ", along " + std::to_string(c.wgmma.along) + (c.wgmma.clustered ? ", clusters " : ", teams ") +
             std::to_string(c.wgmma.teams) + ", slabs " + std::to_string(c.wgmma.slabs) + ", stages " +
             std::to_string(c.wgmma.stages);
    case Kernel::kLibrary:
      break;
  }
  return "the library";
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// All once or twice, then the best ones again and again by turns, so that what drifts hits them alike.
// Nothing where the memory is not there.
std::optional<GemmChoice> tried(int device, SkinnyGemmArgs args, const GemmTrial& trial) {
  constexpr size_t kMostMmaTrials = 120, kMostWgmmaTrials = 48, kFinalists = 8;
  constexpr int kFinalRounds = 11;
  constexpr double kPromising = 1.15;
  const std::vector<GemmChoice> all = candidates(args, kMostMmaTrials, kMostWgmmaTrials);
  if (all.empty()) return GemmChoice();
  try {
    TrialOperands operands(device, args);
    args.x_stride = args.in;
    args.y = operands.result.mutable_data_ptr();
    args.bias = nullptr;
    args.overlap = true;
    const auto measure = [&](const GemmChoice& choice) {
      const bool ours = choice.kernel != Kernel::kLibrary;
      return operands.microseconds(trial, ours, [&](const at::Tensor& x, const at::Tensor& weight) {
        if (!ours) {
          trial.library(x, weight);
          return true;
        }
        args.weight = weight.const_data_ptr();
        args.x = x.const_data_ptr();
        return launch_gemm(args, choice, stream_of(device)) == cudaSuccess;
      });
    };
    struct Candidate {
      GemmChoice choice;
      double us = 0;
      std::vector<double> finals;
    };
    std::vector<Candidate> tries;
    if (trial.library) tries.push_back({});
    for (const GemmChoice& choice : all) tries.push_back({choice, 0, {}});
    (void)measure(tries.front().choice);  // warms up
    double least = std::numeric_limits<double>::infinity();
    for (Candidate& c : tries) {
      c.us = measure(c.choice);
      if (c.us < kPromising * least) c.us = std::min(c.us, measure(c.choice));
      least = std::min(least, c.us);
    }
    const std::string library = trial.library ? std::to_string(tries.front().us) + " us" : "not tried";
    std::stable_sort(tries.begin(), tries.end(), [](const Candidate& a, const Candidate& b) { return a.us < b.us; });
    tries.resize(std::min(tries.size(), kFinalists));
    for (int round = 0; round < kFinalRounds; ++round) {
      for (Candidate& c : tries) c.finals.push_back(measure(c.choice));
    }
    for (Candidate& c : tries) c.us = median(c.finals);
    const Candidate& best = *std::min_element(tries.begin(), tries.end(),
                                              [](const Candidate& a, const Candidate& b) { return a.us < b.us; });
    log_debug("ops", "GEMM of " + std::to_string(args.rows) + " rows, " + std::to_string(args.in) + " to " +
                         std::to_string(args.out) + (args.swiglu ? " with the activation" : "") + ": " +
                         text(best.choice) + ", " + std::to_string(best.us) +
                         " us with a short kernel ahead; the library's " + library);
    return std::isfinite(best.us) ? best.choice : GemmChoice();
  } catch (const c10::OutOfMemoryError&) {
    return std::nullopt;
  }
}

}  // namespace

GemmChoice choose_gemm(int device, const SkinnyGemmArgs& given, const GemmTrial* trial) {
  static std::mutex mutex;
  struct Kept {
    GemmChoice choice;
    bool made = false, tried = false;
  };
  static std::map<std::tuple<int, int, int64_t, int64_t, int64_t, bool, bool>, Kept> choices;
  SkinnyGemmArgs args = given;
  const int64_t unit = args.rows <= kMostMmaRows ? 16 : 32;
  args.rows = (args.rows + unit - 1) / unit * unit;
  const std::lock_guard<std::mutex> lock(mutex);
  Kept& kept =
      choices[{device, sm_limit(), args.rows, args.in, args.out, args.swiglu, trial != nullptr && trial->library}];
  if (trial != nullptr && !kept.tried) {
    const std::optional<GemmChoice> best = capturing(device) ? std::nullopt : tried(device, args, *trial);
    if (best) {
      kept.choice = *best;
      kept.made = kept.tried = true;
    } else if (trial->library) {
      return {};  // until it can be tried
    }
  }
  if (!kept.made) {
    const std::vector<GemmChoice> best = candidates(args, 1, 1);
    if (!best.empty()) kept.choice = best.front();
    kept.made = true;
  }
  return kept.choice;
}

cudaError_t launch_gemm(const SkinnyGemmArgs& args, const GemmChoice& choice, cudaStream_t stream) {
  switch (choice.kernel) {
    case Kernel::kSkinnyGemmMma:
      return skinny_gemm_mma(args, choice.mma, stream);
    case Kernel::kSkinnyGemmWgmma:
      return skinny_gemm_wgmma(args, choice.wgmma, stream);
    case Kernel::kLibrary:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace trireme::cuda
