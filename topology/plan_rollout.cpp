// Seconds of a rollout: what is alive when, from the lengths of the responses.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>

#include "topology/plan_parts.h"
#include "topology/refit.h"

namespace trireme::planning {
namespace {

// Replicas whose steps are one, since ranks of theirs share experts.
int64_t replicas_in_step(const Case& c) {
  const int64_t tp = c.layout.tp;
  return c.shape.experts > 0 ? std::lcm(tp, c.layout.ep * c.layout.etp) / tp : 1;
}

// What steps of a replica cost.
class DecodeSteps final {
 public:
  explicit DecodeSteps(const Case& c) : c_(c), element_(real(c.options.element_bytes)) {
    for (int64_t layer = 0; layer < c.shape.layers; ++layer) sparse_ += c.shape.has_experts(layer) ? 1 : 0;
    const ModelShape& m = c.shape;
    const double experts = sparse_ * real(m.experts) * real(3 * m.hidden * m.moe_intermediate);
    const double table = m.tied ? 0 : real(m.vocab * m.hidden);
    dense_bytes_ = (real(parameter_count(m)) - experts - table) * element_ / real(c.layout.tp);
    expert_bytes_ = experts * element_ / real(c.layout.ep * c.layout.etp);
    sent_ = expert_rows(c);
    reach_ = std::max(1.0, real(c.layout.ep * c.layout.etp) / real(c.layout.tp)) / real(replicas_in_step(c));
    tensor_link_ = link(c, Axis::kTp);
    stage_link_ = link(c, Axis::kPp);
    expert_link_ = link(c, Axis::kEtpEp);
    token_bytes_ = real(2 * m.layers * m.kv_heads * m.head_dim) * element_ / real(c.layout.tp);
  }

  // Of one step with `alive` samples and `together` of all replicas in it, without their keys and values.
  double seconds(double alive, double together) const {
    const DeviceRates& rates = c_.devices.rates;
    const double layers = real(c_.shape.layers) * (rates.decode_layer_s + rates.decode_sample_s * alive);
    return (dense_bytes_ + read_share(together) * expert_bytes_) / rates.decode_read + layers +
           sparse_ * rates.decode_experts_s;
  }
  double keys_seconds(double tokens) const { return tokens * token_bytes_ / c_.devices.rates.decode_read; }

  // Between ranks: sums over tensor ranks behind attention and MLP, embedding and head; from stage to stage and the
  // tokens back; rows to experts and back.
  double exchange_seconds(double alive) const {
    const Layout& l = c_.layout;
    const double row = real(c_.shape.hidden) * element_;
    double seconds = 0;
    if (l.tp > 1) {
      const double bytes = 2 * alive * row * real(l.tp - 1) / real(l.tp);
      seconds += real(2 * c_.shape.layers + 2) * tensor_link_.seconds(bytes);
    }
    if (l.pp > 1) seconds += real(l.pp) * stage_link_.seconds(alive * row / real(l.tp));
    if (const int64_t ranks = l.ep * l.etp; ranks > 1) {
      const double away = alive / real(l.tp) * row * real(ranks - 1) / real(ranks);
      seconds += sparse_ * (expert_link_.seconds(away * sent_.out) + expert_link_.seconds(away * sent_.back));
    }
    return seconds;
  }

 private:
  // Of a rank's experts, the share that any sample of its group chooses.
  double read_share(double together) const {
    if (c_.shape.experts == 0) return 0;
    const double unchosen = 1 - real(c_.shape.experts_per_token) / real(c_.shape.experts);
    return 1 - std::pow(unchosen, together * reach_);
  }

  const Case& c_;
  double element_ = 0, sparse_ = 0;
  double reach_ = 1;  // of the samples in a step, those whose rows may come to a rank's experts
  double dense_bytes_ = 0, expert_bytes_ = 0, token_bytes_ = 0;
  ExpertRows sent_;
  LinkRates tensor_link_, stage_link_, expert_link_;  // found once: that looks at all groups
};

struct Response {
  double prompt = 0, output = 0;
};

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

void plan_rollout(const Case& c, int64_t cache_rows, PlannedTime& time) {
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
  const size_t in_step = std::min(static_cast<size_t>(replicas_in_step(c)), replicas);
  for (size_t first = 0; first < replicas; first += in_step) {
    const auto begin = dealt.begin() + static_cast<std::ptrdiff_t>(first);
    const auto end = dealt.begin() + static_cast<std::ptrdiff_t>(std::min(replicas, first + in_step));
    const RolloutTime one = decode_all(steps, {begin, end}, places, real(lanes));
    if (one.total() > slowest.total()) slowest = one;
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
  for (int64_t stage = 0; stage < c.layout.pp; ++stage) {
    const LocalShape local = shape_of(c, stage);
    for (const Range& piece : layers_of(c, stage)) {
      for (int64_t layer = piece.begin; layer < piece.end; ++layer)
        time.prefill += forward_seconds(c, local, layer, prefill);
    }
  }
}

bool has_background(const Case& c) {
  return c.work.generates && c.work.background_processors > 0 && c.layout.world() == c.layout.dp &&
         c.layout.ep * c.layout.etp == 1 && c.options.sharding != StateSharding::kWeights;
}

bool has_early_gradients(const Case& c) {
  return c.work.early_gradients && has_background(c) && c.options.sharding < StateSharding::kGradients;
}

// Who shares the device shares its memory too: that nothing is gained by it, so that generation ends as much later as
// passes get done meanwhile, is nearer to what was measured (half to four fifths of it) than that it is free.
void plan_background(const Case& c, PlannedTime& time) {
  if (!has_background(c)) return;
  const int64_t all = c.devices.rates.processors;
  const double share = real(std::min(c.work.background_processors, all / 2)) / real(all);
  // In t seconds of the tail, its own and those added, share * t of the passes.
  const double most = time.shared * share / (1 - share);
  time.reference_under = std::min(most, time.reference);
  if (has_early_gradients(c))
    time.training_under = std::min(most - time.reference_under, time.training / real(c.work.optimizer_steps));
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
