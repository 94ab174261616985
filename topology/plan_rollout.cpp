// Seconds of a rollout: what is alive when, from the lengths of the responses.
#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>

#include "topology/plan_decode.h"
#include "topology/plan_parts.h"
#include "topology/refit.h"

namespace trireme::planning {
namespace {

struct RolloutTime {
  double decode = 0, tail = 0, shared = 0, exchanges = 0;
  double total() const { return decode + exchanges; }
};

// All responses of each replica through `places`, in their order: whenever one ends the next begins. The replicas step
// together until all have ended, each step as long as that of the one with most to do. Over stages in as many lanes:
// all have their step while each stage takes one of every lane.
RolloutTime decode_all(const DecodeSteps& steps, const std::vector<std::vector<Response>>& replicas, size_t places,
                       double most_lanes) {
  struct Alive {
    double end, tokens;  // the step behind its last, its tokens by then
    bool operator>(const Alive& other) const { return end > other.end; }
  };
  struct Replica {
    std::priority_queue<Alive, std::vector<Alive>, std::greater<>> alive;
    double context = 0;  // tokens of all that are alive
    size_t next = 0;
    double count() const { return static_cast<double>(alive.size()); }
  };
  std::vector<Replica> all(replicas.size());
  RolloutTime time;
  for (double now = 0;;) {
    double most = 0, together = 0, end = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < all.size(); ++i) {
      Replica& own = all[i];
      for (; own.next < replicas[i].size() && own.alive.size() < places; ++own.next) {
        const Response& begun = replicas[i][own.next];
        own.alive.push({now + begun.output, begun.prompt + begun.output});
        own.context += begun.prompt;
      }
      if (own.alive.empty()) continue;
      most = std::max(most, own.count());
      together += own.count();
      end = std::min(end, own.alive.top().end);
    }
    if (most == 0) return time;
    const double run = end - now, lanes = std::min(most_lanes, most), of_lane = most / lanes;
    double keys = 0;  // tokens, of all steps
    for (const Replica& own : all) keys = std::max(keys, run * own.context + own.count() * run * (run - 1) / 2);
    const double spent = run * steps.seconds(of_lane, together / lanes) + steps.keys_seconds(keys / lanes);
    time.decode += spent;
    if (most <= static_cast<double>(kTailSamples)) time.tail += spent;
    if (most <= static_cast<double>(kBackgroundSamples)) time.shared += spent;
    time.exchanges += run * steps.exchange_seconds(of_lane);
    now = end;
    for (Replica& own : all) {
      own.context += own.count() * run;
      for (; !own.alive.empty() && own.alive.top().end <= now; own.alive.pop()) own.context -= own.alive.top().tokens;
    }
  }
}

}  // namespace

double prefill_seconds(const Case& c, const PassWork& work) {
  double seconds = 0;
  for (int64_t stage = 0; stage < c.layout.pp; ++stage) {
    const LocalShape local = shape_of(c, stage);
    for (const Range& piece : layers_of(c, stage)) {
      for (int64_t layer = piece.begin; layer < piece.end; ++layer) seconds += forward_seconds(c, local, layer, work);
    }
  }
  return seconds;
}

Rollout plan_rollout(const Case& c, int64_t cache_rows, PlannedTime& time) {
  const Workload& work = c.work;
  const size_t of_prompt = work.outputs.size() / work.prompts.size(), replicas = static_cast<size_t>(c.replicas());
  std::vector<std::vector<Response>> dealt(replicas);
  double tokens = 0;
  for (size_t i = 0; i < work.outputs.size(); ++i) {
    const Response response{real(work.prompts[i / of_prompt]), real(work.outputs[i])};
    dealt[i % replicas].push_back(response);
    tokens += response.prompt + response.output;
  }
  // As many at once as the cache has room for in the mean.
  const double mean = tokens / real(static_cast<int64_t>(work.outputs.size()));
  const auto room = static_cast<int64_t>(real(cache_rows) / mean);
  const auto places = static_cast<size_t>(std::clamp<int64_t>(room, 1, work.places));
  const DecodeSteps steps(c);
  const int64_t lanes = c.options.lanes > 0 ? std::min(c.options.lanes, c.layout.pp) : c.layout.pp;
  RolloutTime slowest;
  size_t slowest_replica = 0;
  const size_t in_step = std::min(static_cast<size_t>(replicas_in_step(c)), replicas);
  for (size_t first = 0; first < replicas; first += in_step) {
    const auto begin = dealt.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = dealt.begin() + static_cast<std::ptrdiff_t>(std::min(replicas, first + in_step));
    const RolloutTime one = decode_all(steps, {begin, end}, places, real(lanes));
    if (one.total() <= slowest.total()) continue;
    slowest = one;
    slowest_replica = first;
  }
  time.decode = slowest.decode;
  time.tail = slowest.tail;
  time.shared = slowest.shared;
  time.decode_exchanges = slowest.exchanges;
  // A prompt is computed once on a replica that has responses to it.
  const auto prompts = real(static_cast<int64_t>(work.prompts.size()));
  const double own = std::max(1.0, prompts / real(c.replicas()));
  const double length = real(std::accumulate(work.prompts.begin(), work.prompts.end(), int64_t{0})) / prompts;
  const PassWork prefill{.tokens = own * length, .pairs = own * length * (length + 1) / 2};
  time.prefill = prefill_seconds(c, prefill);
  return {dealt[slowest_replica], places};
}

namespace {

// Nobody else has a part of it.
bool is_whole(const Layout& layout, StateSharding sharding) {
  return layout.world() == layout.dp && layout.ep * layout.etp == 1 &&
         (sharding != StateSharding::kWeights || layout.dp == 1);
}

}  // namespace

bool has_background(const Case& c) {
  return c.work.generates && c.work.background_processors > 0 && c.work.age == 0 && c.work.engines == 0 &&
         is_whole(c.layout, c.options.sharding);
}

bool has_early_gradients(const Case& c) {
  const bool shared = c.options.sharding >= StateSharding::kGradients && c.layout.dp > 1;
  return c.work.early_gradients && has_background(c) && !shared;
}

bool BesidePlan::critic_is_whole() const {
  return models_.critic && problem_.empty() && is_whole(layout_, options_.sharding);
}

// Who shares the device shares its memory too: that nothing is gained by it, so that generation ends as much later as
// passes get done meanwhile, is nearer to what was measured (half to four fifths of it) than that it is free. Each
// sample gets all numbers of the models that are there before the next one does: the model with most of them waiting
// comes next.
void plan_background(const Case& c, bool values, PlannedTime& time) {
  if (!has_background(c)) return;
  const int64_t all = c.devices.rates.processors;
  const double share = real(std::min(c.work.background_processors, all / 2)) / real(all);
  // In t seconds of the tail, its own and those added, share * t of the passes.
  const double most = time.shared * share / (1 - share);
  const double passes = time.reference + time.scores + (values ? time.values : 0);
  const double done = passes > most ? most / passes : 1;
  time.reference_under = done * time.reference;
  time.scores_under = done * time.scores;
  time.values_under = values ? done * time.values : 0;
  if (has_early_gradients(c) && passes < most)
    time.training_under = std::min(most - passes, time.training / real(c.work.optimizer_steps));
}

double refit_seconds(const Case& c, const Case& generation) {
  const RefitPlan plan = refit_plan(c.shape, model_parameters(c.shape),
                                    {.training = c.layout,
                                     .generation = generation.layout,
                                     .training_stages = c.options.stages,
                                     .generation_stages = generation.options.stages,
                                     .of_node = c.devices.of_node},
                                    c.options.element_bytes);
  std::vector<double> near(static_cast<size_t>(plan.ranks), 0), far(near);  // bytes that come to each rank
  const int64_t of_node = c.devices.of_node > 0 ? c.devices.of_node : plan.ranks;
  for (const RefitCopy& copy : plan.copies) {
    if (copy.from == copy.to) continue;
    (copy.from / of_node == copy.to / of_node ? near : far)[static_cast<size_t>(copy.to)] += real(copy.bytes());
  }
  double slowest = 0;
  for (size_t rank = 0; rank < near.size(); ++rank) {
    slowest = std::max(slowest, c.devices.rates.in_node.seconds(near[rank]) +
                                    (far[rank] > 0 ? c.devices.rates.between_nodes.seconds(far[rank]) : 0));
  }
  // Packed, unpacked, and the own part copied: each byte of the copy is read and written twice at the most.
  const double bytes = real(held(generation, 0).params * c.options.element_bytes);
  return slowest + 2 * bytes / c.devices.rates.copy;
}

}  // namespace trireme::planning
