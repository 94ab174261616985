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

// `generation`: what the ranks do besides training; empty: nothing.
void print_memory(std::ostream& out, const LayoutPlan& plan, const PlanOptions& options,
                  const std::string& generation) {
  const bool generates = !generation.empty();
  const MemoryParts &train = plan.memory.training, &generate = plan.memory.generation;
  const std::string dtype = options.element_bytes == 4 ? "float32" : "bfloat16";
  const std::string where = plan.layout.pp > 1 ? ", stage " + std::to_string(plan.memory.stage) : "";
  out << "memory of the fullest rank" << where << ", GiB\n" << memory_row("", "training", generation, "");
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

std::string tail_text(double tail) {
  return ", of it " + time_text(tail) + " with at most " + std::to_string(kTailSamples) + " samples alive";
}

std::string percent(double share) { return format_fixed(100 * share, 0) + " %"; }

void print_time(std::ostream& out, const PlannedTime& time, bool engines) {
  const auto add = [&](const std::string& what, double value, const std::string& note = "") {
    if (value > 0) print_line(out, "  " + what, time_text(value) + note);
  };
  add("refit", time.refit);
  add("waiting for engines", time.idle);
  add("prefill", time.prefill);
  add("decode", time.decode, tail_text(time.tail));
  add("keys computed again", time.again, ", of responses that go on with new weights");
  const auto under = [](double seconds) {
    return seconds > 0 ? ", of it " + time_text(seconds) + " under generation, which takes as much longer"
                       : std::string();
  };
  add("reward model", time.scores, under(time.scores_under));
  add("reference log-probs", time.reference, under(time.reference_under));
  add("previous log-probs", time.previous,
      time.older > 0 ? ", of the " + percent(time.older) + " of a step's samples that older weights drew" : "");
  add("values of the critic", time.values,
      engines && time.values_under > 0 ? ", of it " + time_text(time.values_under) + " while engines are waited for"
                                       : under(time.values_under));
  add("training of the critic", time.value_training);
  add("training", time.training, under(time.training_under));
  add("bubble of both", time.bubble);
  add("optimizer", time.optimizer);
  add("exchanges while decoding", time.decode_exchanges);
  add("exchanges of passes", time.pass_exchanges);
  add("gradients and weights", time.gradient_exchanges);
  add("weights still on their way", time.weight_sync, ", to engines, before the optimizer writes them");
}

int64_t mean_tokens(const Workload& work) {
  int64_t tokens = 0;
  for (const int64_t length : work.outputs) tokens += length;
  const auto of_prompt = static_cast<int64_t>(work.outputs.size() / work.prompts.size());
  for (const int64_t length : work.prompts) tokens += length * of_prompt;
  return std::max<int64_t>(1, tokens / static_cast<int64_t>(work.outputs.size()));
}

std::string cache_text(int64_t rows, const Workload& work) {
  return counted(rows, "token") + ": " + counted(rows / work.longest, "sample") + " of the longest, " +
         std::to_string(rows / mean_tokens(work)) + " of the mean length";
}

void print_engines(std::ostream& out, const EnginesPlan& engines, double step, const Workload& work,
                   const PlanDevices& devices) {
  const MemoryParts& memory = engines.memory;
  if (engines.layout.world() == 1)
    out << "memory of an engine, of " << engines.count << ", GiB\n";
  else
    out << "memory of an engine's device, of " << engines_text(engines.count, engines.layout) << ", GiB\n";
  const auto row = [&](const std::string& what, int64_t bytes, const std::string& note = "") {
    if (bytes > 0) out << memory_row(what, "", gib(bytes), note);
  };
  row("weights", memory.weights);
  row("second buffer", memory.copy, "new weights, while it decodes");
  row("activations", memory.activations);
  row("logits", memory.logits);
  row("exchange buffers", memory.exchange);
  row("cache", memory.cache);
  row("in all", memory.total(), gib(devices.rates.outside_bytes) + " besides, of " + gib(devices.memory()));
  if (!engines.second_buffer) print_line(out, "  second buffer", "no memory for it: decoding stops for a transfer");
  print_line(out, "cache of an engine", cache_text(engines.cache_rows, work));
  print_line(out, "generation of an engine", time_text(engines.generation()) + " a step");
  const auto add = [&](const std::string& what, double value, const std::string& note = "") {
    if (value > 0) print_line(out, "  " + what, time_text(value) + note);
  };
  add("prefill", engines.prefill);
  add("decode", engines.decode, tail_text(engines.tail));
  add("exchanges while decoding", engines.exchanges);
  add("keys computed again", engines.again, ", of responses that go on with new weights");
  add("new weights", engines.stall, ", that decoding stops for them");
  print_line(out, "weights to engines",
             time_text(engines.transfer) + " for " + gib(memory.weights) + " GiB " +
                 (engines.layout.world() > 1 ? "a device" : "each") +
                 (engines.sources > 1 ? " from " + std::to_string(engines.sources) + " ranks" : "") + ", " +
                 (work.engines_near ? "within the node" : "between nodes") + ", a rate nobody measured for them");
  const double waits = std::max(0.0, step - engines.generation());
  print_line(out, "generation and training",
             work.age == 0
                 ? "in turn: a step is their sum"
                 : "beside each other: " + std::string("engines wait ") + time_text(waits) + " a step for weights");
}

}  // namespace

void print_line(std::ostream& out, const std::string& what, const std::string& value) {
  char text[64];
  std::snprintf(text, sizeof text, "%-34s ", what.c_str());
  out << text << value << "\n";
}

std::string engines_text(int64_t engines, const Layout& engine) {
  const int64_t devices = engine.world();
  return counted(engines, "engine") + (devices > 1 ? " of " + counted(devices, "device") : "");
}

void print_plan(std::ostream& out, const LayoutPlan& plan, const ModelShape& shape, const Workload& work,
                const PlanOptions& options, const PlanDevices& devices) {
  print_memory(out, plan, options, !work.generates ? "" : plan.engines ? "validation" : "generation");
  print_line(out, "of a device",
             gib(plan.memory.peak()) + " GiB of tensors, " + gib(devices.rates.outside_bytes) + " besides, of " +
                 gib(devices.memory()));
  if (work.generates) print_line(out, "cache of a replica", cache_text(plan.memory.cache_rows, work));
  print_line(out, "micro-batches of an optimizer step", std::to_string(plan.memory.micro_batches) + " on a rank");
  for (const std::string& problem : plan.problems) print_line(out, "does not fit", problem);
  print_line(out, "a step", time_text(plan.time.step()) + (devices.rates.measured ? "" : ", by rates nobody measured"));
  print_time(out, plan.time, plan.engines.has_value());
  if (plan.engines) print_engines(out, *plan.engines, plan.time.step(), work, devices);
  if (const int64_t etp = plan.layout.etp; shape.experts > 0 && plan.layout.ep * etp > 1)
    print_line(out, "experts of a rank",
               std::to_string(shape.experts / plan.layout.ep) + " of each layer's " + std::to_string(shape.experts) +
                   (etp > 1 ? ", 1/" + std::to_string(etp) + " of each" : ""));
}

namespace {

std::string beside_text(const LayoutPlan& plan) {
  return plan.engines ? " with " + engines_text(plan.engines->count, plan.engines->layout) : "";
}

// "3", or "3x2" of two devices each.
std::string engines_column(const EnginesPlan& engines) {
  const int64_t devices = engines.layout.world();
  return std::to_string(engines.count) + (devices > 1 ? "x" + std::to_string(devices) : "");
}

bool lacks_memory(const LayoutPlan& plan, const PlanDevices& devices) { return plan.least_memory > devices.memory(); }

std::string refusal(const LayoutPlan& plan, const PlanDevices& devices) {
  return lacks_memory(plan, devices) ? "wants " + gib(plan.least_memory) + " GiB at the least"
                                     : join(plan.problems, "; ");
}

}  // namespace

std::string nearest_text(const LayoutPlan& plan, const PlanDevices& devices) {
  const std::string layout = to_string(plan.layout);
  return lacks_memory(plan, devices) ? layout + " wants least, " + gib(plan.least_memory) + " GiB a device"
                                     : layout + ": " + join(plan.problems, "; ");
}

void print_plans(std::ostream& out, const std::vector<RankedPlan>& plans, const PlanDevices& devices) {
  const bool engines = std::any_of(plans.begin(), plans.end(), [](const RankedPlan& r) { return r.plan.engines; });
  char text[256];
  std::snprintf(text, sizeof text, "%-38s %s%9s %9s %9s %9s %9s %8s %8s %9s %s\n", "layout",
                engines ? "engines   waiting " : "", "step s", "generate", "reference", "training", "exchange",
                "bubble", "GiB", "cache", "runs");
  out << text;
  size_t refused = 0;
  for (const auto& [plan, runs] : plans) {
    if (!plan.fits()) {
      ++refused;
      continue;
    }
    const PlannedTime& t = plan.time;
    char beside[64] = "";
    if (plan.engines)
      std::snprintf(beside, sizeof beside, "%7s %9.2f ", engines_column(*plan.engines).c_str(), t.idle + t.weight_sync);
    const double generation = plan.engines ? plan.engines->generation() : t.prefill + t.decode + t.again;
    const int64_t cache = plan.engines ? plan.engines->cache_rows : plan.memory.cache_rows;
    std::snprintf(text, sizeof text, "%-38s %s%9.2f %9.2f %9.2f %9.2f %9.2f %8.2f %8.1f %9lld %s\n",
                  to_string(plan.layout).c_str(), beside, t.step(), generation,
                  t.reference + t.previous + t.scores + t.values, t.training + t.optimizer + t.value_training,
                  t.exchanges(), t.bubble, static_cast<double>(plan.memory.peak()) / kGiB,
                  static_cast<long long>(cache), runs ? "yes" : "not yet");
    out << text;
  }
  if (refused == 0) return;
  out << "refused: " << refused << " of " << plans.size() << "\n";
  for (size_t i = plans.size() - refused; i < std::min(plans.size(), plans.size() - refused + kRefusedShown); ++i)
    print_line(out, "  " + to_string(plans[i].plan.layout) + beside_text(plans[i].plan),
               refusal(plans[i].plan, devices));
  if (refused > kRefusedShown) out << "  and " << refused - kRefusedShown << " that want as much memory or more\n";
}

}  // namespace trireme
