#include "trainer/cli/plan_report.h"

#include <algorithm>
#include <cstdio>

#include "base/text.h"

namespace trireme {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr size_t kRefusedShown = 12;

std::string gib(int64_t bytes) { return format_fixed(static_cast<double>(bytes) / kGiB, 1); }
std::string time_text(double value) { return format_fixed(value, value < 10 ? 2 : 1) + " s"; }
std::string counted(int64_t number, const std::string& word) {
  return std::to_string(number) + " " + word + (number == 1 ? "" : "s");
}

std::string memory_row(const std::string& what, const std::string& first, const std::string& second,
                       const std::string& note) {
  char text[256];
  std::snprintf(text, sizeof text, "  %-20s %10s %11s%s%s\n", what.c_str(), first.c_str(), second.c_str(),
                note.empty() ? "" : "  ", note.c_str());
  return text;
}

void print_memory(std::ostream& out, const LayoutPlan& plan, const PlanOptions& options, bool generates) {
  const MemoryParts &train = plan.memory.training, &generate = plan.memory.generation;
  const std::string dtype = options.element_bytes == 4 ? "float32" : "bfloat16";
  const std::string where = plan.layout.pp > 1 ? ", stage " + std::to_string(plan.memory.stage) : "";
  out << "memory of the fullest rank" << where << ", GiB\n"
      << memory_row("", "training", generates ? "generation" : "", "");
  const auto add = [&](const std::string& what, int64_t first, int64_t second, const std::string& note = "") {
    if (first > 0 || second > 0) out << memory_row(what, gib(first), generates ? gib(second) : "", note);
  };
  const auto& m = plan.memory;
  add("weights", train.weights, generate.weights, dtype);
  add("reference model", train.reference, generate.reference);
  add("copy for generation", train.copy, generate.copy);
  add("gradients", train.gradients, generate.gradients,
      (options.gradient_bytes == 4 ? "float32" : dtype) +
          std::string(train.gradients > 0 && plan.layout.dp * plan.layout.cp > 1 ? ", with their sum over ranks" : ""));
  add("optimizer", train.optimizer, generate.optimizer, to_string(options.sharding));
  add("critic", train.critic, generate.critic, "weights, gradients, optimizer");
  add("reward model", train.reward_model, generate.reward_model);
  std::string again = counted(m.kept.whole, "layer") + " whole";
  if (m.kept.cheap > 0) again += ", " + std::to_string(m.kept.cheap) + " without norms and SwiGLU";
  if (m.kept.experts > 0) again += ", " + std::to_string(m.kept.experts) + " without experts' gate and up either";
  if (m.kept.input > 0) again += ", " + std::to_string(m.kept.input) + " computed again";
  add("activations", train.activations, generate.activations,
      again + (plan.layout.pp > 1 ? ", " + std::to_string(m.in_flight) + " in flight" : ""));
  add("logits", train.logits, generate.logits);
  add("exchange buffers", train.exchange, generate.exchange);
  add("cache", m.lends_cache ? 0 : generate.cache, generate.cache, m.lends_cache ? "lent to training" : "");
  add("in all", train.total() + (m.lends_cache ? 0 : generate.cache), generate.total());
  if (m.early > 0) out << memory_row("early gradients", "", gib(m.early), "generation with them, in all");
  if (m.critic_turn > 0) out << memory_row("critic's training", gib(m.critic_turn), "", "with what stays beside it");
}

void print_time(std::ostream& out, const PlannedTime& time) {
  const auto add = [&](const std::string& what, double value, const std::string& note = "") {
    if (value > 0) print_line(out, "  " + what, time_text(value) + note);
  };
  add("refit", time.refit);
  add("prefill", time.prefill);
  add("decode", time.decode,
      ", of it " + time_text(time.tail) + " with at most " + std::to_string(kTailSamples) + " samples alive");
  add("reward model", time.scores);
  const auto under = [](double seconds) {
    return seconds > 0 ? ", of it " + time_text(seconds) + " under generation, which takes as much longer"
                       : std::string();
  };
  add("reference log-probs", time.reference, under(time.reference_under));
  add("values of the critic", time.values);
  add("training of the critic", time.value_training);
  add("training", time.training, under(time.training_under));
  add("bubble of both", time.bubble);
  add("optimizer", time.optimizer);
  add("exchanges while decoding", time.decode_exchanges);
  add("exchanges of passes", time.pass_exchanges);
  add("gradients and weights", time.gradient_exchanges);
}

}  // namespace

void print_line(std::ostream& out, const std::string& what, const std::string& value) {
  char text[64];
  std::snprintf(text, sizeof text, "%-34s ", what.c_str());
  out << text << value << "\n";
}

void print_plan(std::ostream& out, const LayoutPlan& plan, const ModelShape& shape, const Workload& work,
                const PlanOptions& options, const PlanDevices& devices) {
  print_memory(out, plan, options, work.generates);
  print_line(out, "of a device",
             gib(plan.memory.peak()) + " GiB of tensors, " + gib(devices.rates.outside_bytes) + " besides, of " +
                 gib(devices.memory()));
  if (work.generates) {
    int64_t tokens = 0;
    for (const int64_t length : work.outputs) tokens += length;
    const auto of_prompt = static_cast<int64_t>(work.outputs.size() / work.prompts.size());
    for (const int64_t length : work.prompts) tokens += length * of_prompt;
    const int64_t mean = std::max<int64_t>(1, tokens / static_cast<int64_t>(work.outputs.size()));
    print_line(out, "cache of a replica",
               counted(plan.memory.cache_rows, "token") + ": " +
                   counted(plan.memory.cache_rows / work.longest, "sample") + " of the longest, " +
                   std::to_string(plan.memory.cache_rows / mean) + " of the mean length");
  }
  print_line(out, "micro-batches of an optimizer step", std::to_string(plan.memory.micro_batches) + " on a rank");
  for (const std::string& problem : plan.problems) print_line(out, "does not fit", problem);
  print_line(out, "a step", time_text(plan.time.step()) + (devices.rates.measured ? "" : ", by rates nobody measured"));
  print_time(out, plan.time);
  if (const int64_t etp = plan.layout.etp; shape.experts > 0 && plan.layout.ep * etp > 1)
    print_line(out, "experts of a rank",
               std::to_string(shape.experts / plan.layout.ep) + " of each layer's " + std::to_string(shape.experts) +
                   (etp > 1 ? ", 1/" + std::to_string(etp) + " of each" : ""));
}

namespace {

std::string refusal(const LayoutPlan& plan, const PlanDevices& devices) {
  const bool memory = plan.least_memory > devices.memory();
  return memory ? "wants " + gib(plan.least_memory) + " GiB at the least" : join(plan.problems, "; ");
}

}  // namespace

void print_plans(std::ostream& out, const std::vector<RankedPlan>& plans, const PlanDevices& devices) {
  char text[256];
  std::snprintf(text, sizeof text, "%-38s %9s %9s %9s %9s %9s %8s %8s %9s %s\n", "layout", "step s", "generate",
                "reference", "training", "exchange", "bubble", "GiB", "cache", "runs");
  out << text;
  size_t refused = 0;
  for (const auto& [plan, runs] : plans) {
    if (!plan.fits()) {
      ++refused;
      continue;
    }
    const PlannedTime& t = plan.time;
    std::snprintf(text, sizeof text, "%-38s %9.2f %9.2f %9.2f %9.2f %9.2f %8.2f %8.1f %9lld %s\n",
                  to_string(plan.layout).c_str(), t.step(), t.prefill + t.decode, t.reference + t.scores + t.values,
                  t.training + t.optimizer + t.value_training, t.exchanges(), t.bubble,
                  static_cast<double>(plan.memory.peak()) / kGiB, static_cast<long long>(plan.memory.cache_rows),
                  runs ? "yes" : "not yet");
    out << text;
  }
  if (refused == 0) return;
  out << "refused: " << refused << " of " << plans.size() << "\n";
  for (size_t i = plans.size() - refused; i < std::min(plans.size(), plans.size() - refused + kRefusedShown); ++i)
    print_line(out, "  " + to_string(plans[i].plan.layout), refusal(plans[i].plan, devices));
  if (refused > kRefusedShown) out << "  and " << refused - kRefusedShown << " that want as much memory or more\n";
}

}  // namespace trireme
