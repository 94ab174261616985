// Steps that overlap: free places that are filled (carry-over, engines in flight), and what ranks and engines wait for
// each other. Of several replicas or engines the one that takes longest over a step by itself counts.
#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>

#include "base/error.h"
#include "topology/combine_blocks.h"
#include "topology/exactness.h"
#include "topology/plan_decode.h"
#include "topology/plan_parts.h"

namespace trireme::planning {
namespace {

// Above it nothing changes any more: places are full long before.
constexpr int64_t kMostAge = 32;

int64_t age_of(const Case& c) { return std::min(c.work.age, kMostAge); }
// So many steps lead in, and as many are measured: whole cycles, since what begins in a step ends within the next ones.
int64_t rounds_of(int64_t age) { return 4 * (age + 1); }

// A replica whose places take the responses of one step after the other, each step's the same, in their order. Time
// goes by its decode steps.
class FilledReplica final {
 public:
  // `c` and `steps` outlive it.
  FilledReplica(const Case& c, const DecodeSteps& steps, Rollout rollout)
      : c_(c), steps_(steps), rollout_(std::move(rollout)) {}

  // Begins what there are places for, of steps up to `last` (from 1), by weights of `version`, which a step's are if
  // that is its number less one. Returns how many responses.
  int64_t fill(int64_t last, int64_t version) {
    int64_t begun = 0;
    for (; alive_.size() < rollout_.places && next_step_ <= last; ++begun) {
      const Response& response = rollout_.responses[next_];
      alive_.push_back({now_ + response.output, response.prompt + response.output, next_step_, version});
      std::push_heap(alive_.begin(), alive_.end(), std::greater<>());
      context_ += response.prompt;
      if (++next_ < rollout_.responses.size()) continue;
      next_ = 0;
      ++next_step_;
    }
    return begun;
  }
  bool idle() const { return alive_.empty(); }
  double alive() const { return real(static_cast<int64_t>(alive_.size())); }
  // Until the first response ends.
  double steps_to_end() const { return alive_.front().end - now_; }
  // Of so many steps, in which none ends before the last.
  double seconds(double run) const {
    const double lanes = lanes_of(), of_lane = alive() / lanes;
    const double keys = run * context_ + alive() * run * (run - 1) / 2;
    return run * steps_.seconds(of_lane, together() / lanes) + steps_.keys_seconds(keys / lanes);
  }
  double exchange_seconds(double run) const { return run * steps_.exchange_seconds(alive() / lanes_of()); }
  double whole_seconds(double run) const { return seconds(run) + exchange_seconds(run); }
  void advance(double run) {
    now_ += run;
    context_ += alive() * run;
    while (!alive_.empty() && alive_.front().end <= now_) {
      const Alive& ended = alive_.front();
      context_ -= ended.tokens;
      const auto step = static_cast<size_t>(ended.step);
      if (ended_.size() <= step) ended_.resize(step + 1), older_.resize(step + 1);
      ++ended_[step];
      if (ended.version < ended.step - 1) ++older_[step];
      std::pop_heap(alive_.begin(), alive_.end(), std::greater<>());
      alive_.pop_back();
    }
  }
  bool has_all(int64_t step) const {
    const auto of = static_cast<size_t>(step);
    return of < ended_.size() && ended_[of] == rollout_.responses.size();
  }
  // Of a step that it has all of.
  double older(int64_t step) const {
    return real(static_cast<int64_t>(older_[static_cast<size_t>(step)])) /
           real(static_cast<int64_t>(rollout_.responses.size()));
  }
  // Keys and values of what is unfinished, computed again. Each response has a prompt of its own there.
  double again_seconds() const {
    PassWork work;
    for (const Alive& one : alive_) {
      const double tokens = one.tokens - (one.end - now_);
      work.tokens += tokens;
      work.pairs += tokens * (tokens + 1) / 2;
    }
    return work.tokens > 0 ? prefill_seconds(c_, work) : 0;
  }

 private:
  struct Alive {
    double end, tokens;  // the step behind its last, its tokens by then
    int64_t step, version;
    bool operator>(const Alive& other) const { return end > other.end; }
  };
  double lanes_of() const {
    const int64_t lanes = c_.options.lanes > 0 ? std::min(c_.options.lanes, c_.layout.pp) : c_.layout.pp;
    return std::min(real(lanes), alive());
  }
  double together() const { return alive() * real(std::min(replicas_in_step(c_), c_.replicas())); }

  const Case& c_;
  const DecodeSteps& steps_;
  const Rollout rollout_;
  std::vector<Alive> alive_;  // a heap, the first that ends in front
  double now_ = 0, context_ = 0;
  size_t next_ = 0;
  int64_t next_step_ = 1;
  std::vector<size_t> ended_, older_;  // by step
};

}  // namespace

// A step's generation goes on until it has all of its responses; then all stop where they are.
void plan_carry_over(const Case& c, int64_t cache_rows, PlannedTime& time) {
  const DecodeSteps steps(c);
  FilledReplica replica(c, steps, plan_rollout(c, cache_rows, time));
  const int64_t age = age_of(c), rounds = rounds_of(age);
  PlannedTime sum;
  for (int64_t step = 1; step <= 2 * rounds; ++step) {
    if (step == rounds + 1) sum = {};
    // A step that is complete already begins nothing, and computes nothing again.
    if (step > 1 && c.work.recomputes_keys && !replica.has_all(step)) sum.again += replica.again_seconds();
    while (!replica.has_all(step)) {
      replica.fill(step + age, step - 1);
      const double run = replica.steps_to_end(), spent = replica.seconds(run);
      sum.decode += spent;
      if (replica.alive() <= real(kTailSamples)) sum.tail += spent;
      sum.decode_exchanges += replica.exchange_seconds(run);
      replica.advance(run);
    }
    sum.older += replica.older(step);
  }
  const double each = 1 / real(rounds);
  time.decode = sum.decode * each;
  time.tail = sum.tail * each;
  time.shared = 0;
  time.decode_exchanges = sum.decode_exchanges * each;
  time.again = sum.again * each;
  time.older = sum.older * each;
}

namespace {

// What is between ranks and engines.
struct Ways {
  double arrival = 0;   // from the end of a step's training until an engine has the weights beside it
  double stall = 0;     // then decoding stands still
  double prefill = 0;   // of a step's prompts, on the engine
  double previous = 0;  // of the ranks, if older weights drew all samples of a step
};

struct Overlap {
  double period = 0;  // of a step
  double decode = 0, exchanges = 0, again = 0, stall = 0, tail = 0;
  double older = 0;
};

// Engines that change their weights with nothing unfinished. Step s is generated by the weights behind step s - 1 - age
// and by no others, one step after the other, and trained behind that: three rings of what waits for what.
Overlap run_in_versions(const Case& c, const Ways& ways, const PlannedTime& rollout, double training) {
  const double age = real(c.work.age);
  Overlap overlap{.decode = rollout.decode,
                  .exchanges = rollout.decode_exchanges,
                  .stall = ways.stall,
                  .tail = rollout.tail,
                  .older = age > 0 ? 1.0 : 0.0};
  const double trained = training + overlap.older * ways.previous;
  const double generated = ways.prefill + rollout.decode + rollout.decode_exchanges + ways.stall;
  overlap.period = std::max({trained, generated, (trained + ways.arrival + generated) / (age + 1)});
  return overlap;
}

// Engines that take new weights between two steps. While step s is trained steps up to s + age are generated.
Overlap run_in_flight(const Case& engine, const Rollout& rollout, const Ways& ways, double training) {
  const DecodeSteps steps(engine);
  const int64_t age = age_of(engine), rounds = rounds_of(age);
  const double begin_s = ways.prefill / real(static_cast<int64_t>(rollout.responses.size()));
  FilledReplica replica(engine, steps, rollout);
  Overlap sum;
  std::deque<double> arrivals;  // of the weights behind the steps from `fetched` + 1 on
  int64_t fetched = 0;
  double now = 0, trained = 0, measured_from = 0;
  for (int64_t next = 1; next <= 2 * rounds;) {
    for (; !arrivals.empty() && arrivals.front() <= now; arrivals.pop_front(), ++fetched) {
      const double again = engine.work.recomputes_keys ? replica.again_seconds() : 0;
      now += ways.stall + again;
      sum.stall += ways.stall;
      sum.again += again;
    }
    now += begin_s * real(replica.fill(fetched + 1 + age, fetched));
    if (replica.idle()) {
      TRIREME_CHECK(!arrivals.empty(), "engines wait for weights that nobody trains");
      now = arrivals.front();
      continue;
    }
    double run = replica.steps_to_end();
    if (!arrivals.empty() && now + replica.whole_seconds(run) > arrivals.front()) {
      double least = 1;  // steps behind which they have come
      for (double most = run; least < most;) {
        const double middle = std::floor((least + most) / 2);
        now + replica.whole_seconds(middle) >= arrivals.front() ? most = middle : least = middle + 1;
      }
      run = least;
    }
    const double spent = replica.seconds(run);
    now += replica.whole_seconds(run);
    sum.decode += spent;
    sum.exchanges += replica.exchange_seconds(run);
    if (replica.alive() <= real(kTailSamples)) sum.tail += spent;
    replica.advance(run);
    for (; next <= 2 * rounds && replica.has_all(next); ++next) {
      const double begun = std::max(now, trained);
      if (next == rounds) {
        sum = {};
        measured_from = begun;
      }
      sum.period = begun - measured_from;
      const double older = replica.older(next);
      if (next > rounds) sum.older += older;
      trained = begun + training + older * ways.previous;
      arrivals.push_back(trained + ways.arrival);
    }
  }
  for (double* part : {&sum.period, &sum.decode, &sum.exchanges, &sum.again, &sum.stall, &sum.tail, &sum.older})
    *part /= real(rounds);
  return sum;
}

// In how many blocks ranks of that training combine experts, which engines do too; 0: there are none.
int64_t blocks_of(const Case& c) {
  return c.shape.experts > 0 ? combine_blocks(c.shape.experts, c.options.combine_blocks, c.layout.ep) : 0;
}

// Why no engine can be so beside that training; nothing where it can.
std::optional<std::string> engine_problem(const Case& c) {
  const Layout& engine = c.work.engine;
  if (const int64_t node = c.devices.engine_node; node > 0 && engine.world() > node)
    return "its " + std::to_string(engine.world()) + " devices must share a node, which has " + std::to_string(node);
  const LayoutReport report = check_layout(engine, {.world = engine.tp, .shape = &c.shape});
  if (!report.ok()) return report.errors.front();
  if (const int64_t blocks = blocks_of(c); blocks % engine.ep != 0)
    return "ep " + std::to_string(engine.ep) + " does not divide the " + std::to_string(blocks) +
           " blocks that training combines experts in";
  return std::nullopt;
}

// Whether some rank that trains has the same of the model as each of the engine's (weight_plan).
bool is_split_alike(const Layout& training, const Layout& engine) {
  return training.pp == 1 && training.tp == engine.tp && training.ep == engine.ep;
}

// Whether all samples have a pass for the log-probs that training gives them, whatever weights drew them.
bool has_other_bits(const Case& c) {
  const auto of = [&](const Layout& layout) {
    return Arithmetic{.tp = layout.tp, .etp = layout.etp, .combine_blocks = blocks_of(c)};
  };
  return !exactness(of(c.work.engine), of(c.layout)).equal;
}

}  // namespace

void plan_engines(const Case& c, bool values_wait, LayoutPlan& plan) {
  if (const auto problem = engine_problem(c)) {
    plan.problems.push_back("an engine in " + to_string(c.work.engine) + " cannot be: " + *problem);
    return;
  }
  EnginesPlan& engines = plan.engines.emplace();
  engines.count = c.work.engines;
  engines.layout = c.work.engine;
  engines.alike = is_split_alike(c.layout, c.work.engine);
  engines.sources = engines.alike ? 1 : group_size(c.layout, Axis::kCopyPp);
  Layout layout = c.work.engine;
  layout.dp = c.work.engines;
  PlanOptions options = c.options;
  options.stages = {};
  options.lanes = 0;
  options.combine_blocks = blocks_of(c);
  PlanDevices devices = c.devices;
  devices.of_node = 0;  // an engine's ranks are on one, and exchange with nobody else
  const Case engine{c.shape, layout, c.work, options, devices};
  plan_engine_memory(engine, engines, plan.problems);
  plan.least_memory = std::max(plan.least_memory, engines.least_memory);
  PlannedTime rollout;
  const Rollout of_engine = plan_rollout(engine, engines.cache_rows, rollout);
  engines.prefill = rollout.prefill;
  engines.transfer =
      weight_transfer_seconds(c.layout, c.work.engines * c.work.engine.world(), engines.memory.weights,
                              c.work.engines_near ? c.devices.rates.in_node : c.devices.rates.between_nodes);
  engines.stall = engines.second_buffer ? 2 * real(engines.memory.weights) / c.devices.rates.copy : engines.transfer;

  PlannedTime& time = plan.time;
  const double ranks = real(c.layout.world());
  Ways ways{
      .arrival = engines.second_buffer ? engines.transfer : 0, .stall = engines.stall, .prefill = rollout.prefill};
  const bool other_bits = has_other_bits(c);
  const LogprobPass pass = logprob_pass(c, 1);
  const double previous = pass.working + pass.waiting + pass.exchanges;
  if (c.work.previous_pass && c.work.age > 0 && !other_bits) ways.previous = previous;
  const double training = time.step() + (other_bits ? previous : 0);
  const auto overlap_of = [&](double trained) {
    return c.work.in_flight && c.work.age > 0 ? run_in_flight(engine, of_engine, ways, trained)
                                              : run_in_versions(c, ways, rollout, trained);
  };
  Overlap overlap = overlap_of(training);
  const auto waits = [&](double trained) {
    return std::max(0.0, overlap.period - trained - overlap.older * ways.previous);
  };
  // Rank 0 computes values of what has come while it waits; of what is left each rank computes its share.
  if (values_wait) time.values_under = std::min(time.values, waits(training) / ranks);
  if (time.values_under > 0) overlap = overlap_of(training - time.values_under);
  time.idle = waits(training);
  time.older = overlap.older;
  if (c.work.previous_pass || other_bits) add_previous_pass(c, other_bits ? 1 : overlap.older, time);
  engines.decode = overlap.decode;
  engines.exchanges = overlap.exchanges;
  engines.again = overlap.again;
  engines.tail = overlap.tail;
  engines.stall = overlap.stall;
  // Who reads the weights ends before they are written, or shared again.
  const bool shared = c.options.sharding == StateSharding::kWeights && c.layout.world() > 1;
  const double passes = time.reference + time.previous + time.scores + time.values + time.value_training;
  const double first = shared ? 0 : (time.training + time.bubble + time.pass_exchanges) / real(c.work.optimizer_steps);
  time.weight_sync = std::max(0.0, engines.transfer - time.idle - passes - first);
}

}  // namespace trireme::planning

namespace trireme {

double weight_transfer_seconds(const Layout& training, int64_t readers, int64_t bytes, const LinkRates& link) {
  const int64_t sources = group_size(training, Axis::kCopyPp);
  const int64_t of_copy = planning::up(readers, training.world() / sources);
  return link.seconds(planning::real(std::max(bytes, planning::up(of_copy * bytes, sources))));
}

}  // namespace trireme
