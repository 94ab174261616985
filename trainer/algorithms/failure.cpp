#include "trainer/algorithms/failure.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <csignal>
#include <exception>
#include <limits>
#include <new>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/parallel/device.h"

namespace trireme {
namespace {

// What stands between `before` and the first of `after` behind it; empty when it is not there.
std::string between(const std::string& text, const std::string& before, const std::string& after) {
  const size_t at = text.find(before);
  if (at == std::string::npos) return {};
  const size_t from = at + before.size(), to = text.find(after, from);
  return to == std::string::npos ? std::string() : text.substr(from, to - from);
}

std::string remedy(const std::string& phase) {
  const std::string cache = "policy.generation.kv_cache_tokens (or kv_cache_memory_fraction)";
  const std::string checkpointing =
      "switch activation checkpointing on (policy.activation_checkpointing, or that of megatron_cfg or dtensor_cfg)";
  if (phase == "generation") {
    return "lower " + cache + ", policy.generation.max_running_samples or policy.generation.prefill_chunk_tokens";
  }
  if (phase == "refit") {
    return "generation has a second copy of the weights: lower " + cache +
           ", or leave policy.generation.tensor_parallel_size and policy.generation.fold_pipeline out";
  }
  if (phase == "logprobs") {
    return "lower the micro-batch of log-prob passes (policy.sequence_packing.logprob_mb_tokens, "
           "policy.dynamic_batching.logprob_mb_tokens or policy.logprob_batch_size) or " +
           cache;
  }
  return "lower the micro-batch (policy.sequence_packing.train_mb_tokens, policy.dynamic_batching.train_mb_tokens or "
         "policy.train_micro_batch_size), " +
         checkpointing + ", or lower " + cache;
}

bool is_echo(const std::exception& error) {
  const auto* ours = dynamic_cast<const Error*>(&error);
  return ours != nullptr && (ours->kind() == ErrorKind::kUnavailable || ours->kind() == ErrorKind::kTimeout);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

std::string place(const ParallelContext& context) { return context.name() + " on " + host_name(); }

template <typename E>
[[noreturn]] void throw_on(ParallelContext& context, const E& error) {
  context.leaves_by(std::make_exception_ptr(error));
  throw error;
}

[[noreturn]] void stand_still() {
  while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
}

}  // namespace

std::optional<std::string> describe_memory_shortage(const std::exception& error, const std::string& phase) {
  const std::string text = error.what();
  const bool host = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                    text.find("DefaultCPUAllocator: can't allocate memory") != std::string::npos;
  const bool device = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
                      text.find("CUDA error: out of memory") != std::string::npos;
  if (!host && !device) return std::nullopt;
  std::string asked, rest;
  if (host) {
    const auto bytes = parse_int(between(text, "you tried to allocate ", " bytes"));
    if (bytes) asked = format_bytes(static_cast<uint64_t>(*bytes));
    rest = "of the machine's memory";
  } else {
    asked = between(text, "Tried to allocate ", ". ");
    const std::string total = between(text, "has a total capacity of ", " of which ");
    const std::string free = between(text, " of which ", " is free");
    rest = total.empty() || free.empty() ? "of the GPU's memory"
                                         : "where " + free + " of the GPU's " + total + " were free";
  }
  std::string sentence = "out of memory";
  if (!phase.empty()) sentence += " in phase " + phase;
  sentence +=
      asked.empty() ? ": more " + rest + " was asked for than is left" : ": " + asked + " were asked for " + rest;
  return sentence + "; " + remedy(phase);
}

void run_and_report(ParallelContext& context, const std::function<void()>& loop) {
  try {
    loop();
  } catch (const std::exception& error) {
    if (is_echo(error)) {
      context.leaving();
      context.leaves_by(std::current_exception());
      throw;
    }
    const std::string phase = context.phase();
    const std::optional<std::string> shortage = describe_memory_shortage(error, phase);
    const auto* ours = dynamic_cast<const Error*>(&error);
    std::string what = shortage ? *shortage : error.what();
    if (context.job_size() > 1) {
      what = place(context) + (shortage ? ": " : " in phase " + phase + ": ") + what;
      context.report_failure(first_line(what));
    }
    if (shortage) throw_on(context, Error(ErrorKind::kIo, what));
    if (ours != nullptr) throw_on(context, Error(ours->kind(), what));
    if (context.job_size() == 1) throw;
    throw_on(context, std::runtime_error(what));
  }
}

Fault parse_fault(const std::string& text) {
  Fault fault;
  if (text.empty()) return fault;
  const size_t at = text.find('@');
  const std::string kind = text.substr(0, at);
  const std::vector<std::string> rest = split(at == std::string::npos ? "" : text.substr(at + 1), ':');
  const auto number = [&](size_t i) { return parse_int(rest[i]).value_or(-1); };
  const int64_t step = rest.empty() ? -1 : number(0), rank = rest.size() > 1 ? number(1) : 0;
  if (kind == "nan") fault.kind = Fault::Kind::kNan;
  if (kind == "memory") fault.kind = Fault::Kind::kMemory;
  if (kind == "hang") fault.kind = Fault::Kind::kHang;
  if (kind == "stay") fault.kind = Fault::Kind::kStay;
  if (kind == "device-hang") fault.kind = Fault::Kind::kDeviceHang;
  if (kind == "kill") fault.kind = Fault::Kind::kKill;
  const bool phase = rest.size() == 3 && kind == "kill" && !rest[2].empty();
  if (fault.kind == Fault::Kind::kNone || step < 1 || rank < 0 || (rest.size() > 2 && !phase)) {
    fail_user("the fault '" + text +
              "' is not KIND@STEP:RANK with a kind of nan, memory, hang, device-hang, stay, nor kill@STEP:RANK:PHASE");
  }
  fault.step = step;
  fault.rank = static_cast<int>(rank);
  if (phase) fault.phase = rest[2];
  return fault;
}

void cause_stay(const Fault& fault, const ParallelContext& context) {
  if (fault.kind == Fault::Kind::kStay && fault.rank == context.job_rank() && std::uncaught_exceptions() > 0)
    stand_still();
}

void cause_kill(const Fault& fault, int64_t step, const std::string& phase, const ParallelContext& context) {
  if (fault.kind != Fault::Kind::kKill || fault.step != step || fault.rank != context.job_rank() ||
      fault.phase != phase)
    return;
  log_warn("fault", "is killed on purpose in phase " + phase + " of step " + std::to_string(step));
  (void)std::raise(SIGKILL);
}

void cause_fault(const Fault& fault, int64_t step, const ParallelContext& context, Model& policy) {
  if (fault.kind == Fault::Kind::kNone || fault.kind == Fault::Kind::kKill) return;
  if (fault.step != step || fault.rank != context.job_rank()) return;
  log_warn("fault", "fails on purpose before the training of step " + std::to_string(step));
  const c10::NoGradGuard no_grad;
  switch (fault.kind) {
    case Fault::Kind::kNone:
    case Fault::Kind::kKill:
      return;
    case Fault::Kind::kNan:
      if (policy.options().sharding.weights) {
        policy.units()->parts().fill_(std::numeric_limits<double>::quiet_NaN());
        return;
      }
      policy.flat_parameters().detach().narrow(0, 0, 1).fill_(std::numeric_limits<double>::quiet_NaN());
      // The first element may belong to no token of the batch: this rank's last norm reaches all.
      for (auto parameter = policy.parameters().rbegin(); parameter != policy.parameters().rend(); ++parameter) {
        if (!ends_with(parameter->name, "layernorm.weight") && parameter->name != "model.norm.weight") continue;
        policy.flat_parameters()
            .detach()
            .narrow(0, parameter->offset, parameter->size)
            .fill_(std::numeric_limits<double>::quiet_NaN());
        return;
      }
      return;
    case Fault::Kind::kMemory: {
      const at::Tensor never = at::empty({int64_t{1} << 50}, policy.flat_parameters().options().dtype(at::kByte));
      fail_internal("a pebibyte was allocated: " + std::to_string(never.numel()));
    }
    case Fault::Kind::kDeviceHang:
      if (queue_call(policy.options().device, [](void*) { stand_still(); })) return;
      stand_still();
    case Fault::Kind::kHang:
      stand_still();
    case Fault::Kind::kStay:
      fail_data("an error on purpose, behind which a destructor waits for ever");
  }
}

}  // namespace trireme
