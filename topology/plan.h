// What a layout takes: memory of its fullest rank, time of a step. Counted from the model's shape and the work of a
// step; only rates.h is measured. trireme plan prints it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "topology/activations.h"
#include "topology/rates.h"
#include "topology/sharding.h"
#include "topology/topology.h"

namespace trireme {

// Of one step.
struct Workload {
  bool generates = true;   // GRPO; else the sequences are there
  bool reference = false;  // log-probs of a reference model
  // Response i belongs to prompt i / (outputs / prompts).
  std::vector<int64_t> prompts, outputs;  // tokens
  int64_t longest = 1;                    // tokens of a sample, at most: for which the cache must do
  int64_t optimizer_steps = 1;
  int64_t train_tokens = 1;    // rows of a micro-batch of training, at most
  int64_t logprob_tokens = 1;  // of a pass for log-probs
  int64_t train_samples = 0;   // instead, samples of a micro-batch; 0: by tokens
  int64_t logprob_samples = 0;
  bool share_prompts = false;  // a group's prompt is computed once a micro-batch
  int64_t places = 256;        // samples alive at once, of a replica
  int64_t prefill_tokens = 8192;
  // Of the device, as long as at most kBackgroundSamples are alive: they compute reference log-probs, values and scores
  // of finished samples and, where `early_gradients`, gradients of whole groups of the first optimizer step. 0: all
  // that follows generation. Counts for a policy that nobody shares (kWeights included) and what generates on its own
  // ranks for the step at hand alone; values for such a critic, gradients where ranks do not share them.
  int64_t background_processors = 0;
  bool early_gradients = false;
  // How steps follow each other (docs/running.md). With an age above 0 they overlap: on the ranks free places take
  // responses of the next steps (carry-over), elsewhere engines generate beside training.
  int64_t engines = 0;          // processes of their own that generate (trireme engine); 0: the ranks do
  Layout engine = {};           // of each: tensor ranks, one a device of one machine; ep divides them, the rest is 1
  bool engines_near = true;     // on the ranks' node
  int64_t age = 0;              // of a token, in steps, at most
  bool in_flight = false;       // engines take new weights between two decode steps, else with nothing unfinished
  bool recomputes_keys = true;  // of what goes on with new weights; else they are kept
  bool previous_pass = false;   // log-probs by the step's weights of samples that older ones drew
};
inline constexpr int64_t kBackgroundSamples = 32;
inline constexpr int64_t kBackgroundTokens = 4096;  // of a micro-batch there, or one sample

inline constexpr int64_t kEveryLayer = int64_t{1} << 20;

struct PlanOptions {
  int64_t element_bytes = 2;   // of weights and activations
  int64_t gradient_bytes = 4;  // as they are summed up and reduced
  StateSharding sharding = StateSharding::kOptimizer;
  StageOptions stages;
  std::string stage_section;  // before their keys in sentences (LayoutCheck)
  // What backward computes again: as little as fits, or whole layers and of the others norms and SwiGLU.
  bool fit_recompute = true;
  int64_t recomputed_layers = 0;
  bool cheap_recompute = false;
  bool expert_recompute = false;  // with the latter, experts' gate and up too
  int64_t cache_rows = 0;         // of a rank; 0: by the fraction
  double cache_fraction = 0.8;    // of what is free beside the rest
  bool keeps_cache = false;       // it stays where it is while training
  int64_t combine_blocks = 0;     // of experts; 0: derived
  int64_t lanes = 0;              // of generation over stages; 0: as many as stages
  // Of generation_layout: another one than training's has a second copy of the weights.
  int64_t generation_tp = 0;
  bool fold_pipeline = false;
};

struct PlanDevices {
  DeviceRates rates;
  int64_t memory_bytes = 0;  // 0: that of the rates
  int64_t of_node = 0;       // 0: one node
  int64_t engine_node = 0;   // of a node, which an engine's devices share; 0: as many as it wants
  int64_t memory() const { return memory_bytes > 0 ? memory_bytes : rates.memory_bytes; }
};

// Models beside the policy: they take their turn where the policy waits.
struct PlannedModel {
  ModelShape shape;  // with its value head
  Workload work;     // the samples whose values or scores it computes
  PlanOptions options;
  Layout layout = {};  // of a critic, whose dp follows from its ranks
};
struct PlannedBeside {
  std::optional<PlannedModel> critic;        // all ranks train it, in its own layout
  std::optional<PlannedModel> reward_model;  // whole on each rank, which scores its share
};

// What the ranks of a node map of each other's memory on a rank, for both layouts: receive buffers and mailboxes of
// tensor groups, lines between stages, receive buffers of those that share experts. No tensors, so no part of a
// measured peak of these; there from the first exchange to the end.
int64_t peer_buffer_bytes(const Layout& training, const Layout& generation);

// Bytes of tensors on a rank, and of buffers that others map.
struct MemoryParts {
  int64_t weights = 0, reference = 0;
  int64_t copy = 0;          // the weights in generation's own layout
  int64_t gradients = 0;     // and of the rank's own slices their sum over ranks
  int64_t optimizer = 0;     // master copy and moments
  int64_t activations = 0;   // of micro-batches in flight; of an engine step
  int64_t logits = 0;        // with the head's gradient; in training what they add, since layers' gradients come later
  int64_t exchange = 0;      // buffers of what goes between ranks, peer_buffer_bytes among them
  int64_t cache = 0;         // keys and values
  int64_t critic = 0;        // its weights, gradients and optimizer state; not in its own turn
  int64_t reward_model = 0;  // its weights
  int64_t total() const;
};

struct PlannedMemory {
  int64_t stage = 0;  // of the rank that is nearest to its end
  MemoryParts training, generation;
  bool lends_cache = false;   // the cache gives its memory back while training
  KeptLayers kept;            // of the layers (of one piece): what backward has of each
  int64_t in_flight = 1;      // pairs of piece and micro-batch whose activations are kept
  int64_t micro_batches = 1;  // of an optimizer step, on a rank
  int64_t cache_rows = 0;     // tokens: the least of all ranks
  int64_t early = 0;          // while gradients are computed under generation: of the rank, in all
  int64_t critic_turn = 0;    // while the critic trains, with what of the policy stays: of the rank, in all
  // The largest phase: they do not add up. Without what is outside of tensors.
  int64_t peak() const;
};

// Seconds of a step on the rank that has most to do. The parts add up to it.
struct PlannedTime {
  double refit = 0;  // the weights into generation's own layout
  double prefill = 0, decode = 0;
  double again = 0;   // keys and values of what goes on with new weights
  double tail = 0;    // of decode: with at most kTailSamples alive
  double shared = 0;  // with at most kBackgroundSamples
  double reference = 0;
  double previous = 0;                    // log-probs of samples that older weights drew, or another layout
  double training = 0;                    // forward and backward, with what is computed again
  double bubble = 0;                      // that stages wait for each other there
  double optimizer = 0;                   // the update itself
  double scores = 0;                      // of a reward model
  double values = 0, value_training = 0;  // of a critic; the latter with its updates
  // Of these: what runs under generation, whose phase is taken to be longer by as much; with engines the values that
  // are computed while the ranks wait for them, and `idle` is without.
  double reference_under = 0, training_under = 0, scores_under = 0, values_under = 0;
  double idle = 0;         // that the ranks wait for engines
  double weight_sync = 0;  // that the optimizer waits until engines have the weights
  // Between ranks; none is taken to be hidden but gathered weights (kWeights).
  double decode_exchanges = 0, pass_exchanges = 0, gradient_exchanges = 0;
  double exchanges() const { return decode_exchanges + pass_exchanges + gradient_exchanges; }
  double older = 0;  // the share of a step's samples that older weights drew, wholly or in part
  double generation() const { return prefill + decode + again + decode_exchanges; }
  double step() const {
    return refit + generation() + reference + previous + training + bubble + optimizer + pass_exchanges +
           gradient_exchanges + scores + values + value_training + idle + weight_sync;
  }
};
inline constexpr int64_t kTailSamples = 16;

// Engines that generate for the ranks, each a whole model on the devices of its own ranks, without optimizer.
struct EnginesPlan {
  int64_t count = 0;
  Layout layout;               // of each
  bool alike = false;          // each of its ranks has the same of the model as one of training, which sends it all
  int64_t sources = 1;         // else ranks of training that send a part of its weights to each of its ranks, at most
  MemoryParts memory;          // of a device; `copy`: the second buffer, into which weights come while it decodes
  bool second_buffer = false;  // there is memory for it; else decoding stops for a transfer
  int64_t cache_rows = 0;
  int64_t least_memory = 0;  // of a device
  // Seconds of a step, of the engine with most to do: a rollout by itself, or with free places filled (in flight).
  double prefill = 0, decode = 0, again = 0;
  double tail = 0;       // of decode: with at most kTailSamples alive
  double exchanges = 0;  // between its ranks, while it decodes
  double transfer = 0;   // of the weights, to all engines
  double stall = 0;      // that decoding stops for it
  double generation() const { return prefill + decode + exchanges + again + stall; }
};

// Seconds until each of `readers` ranks of engines has `bytes` of weights from ranks that train in this layout: they
// read from its copies of the weights in turn, and the ranks of a copy send their parts to all of its readers at once.
double weight_transfer_seconds(const Layout& training, int64_t readers, int64_t bytes, const LinkRates& link);

struct LayoutPlan {
  Layout layout;
  PlannedMemory memory;
  PlannedTime time;
  std::optional<EnginesPlan> engines;
  int64_t least_memory = 0;           // of a device on which it would fit
  std::vector<std::string> problems;  // why it cannot be: one sentence each; empty: it fits
  bool fits() const { return problems.empty(); }
};

// The layout must be legal for the shape (check_layout).
LayoutPlan plan_layout(const ModelShape& shape, const Layout& layout, const Workload& work, const PlanOptions& options,
                       const PlanDevices& devices, const PlannedBeside& beside = {});

// Of a critic on ranks of its own, in a layout of theirs that is legal for its shape. The time is that of its values
// and its training, which run beside the actor, and of their exchanges.
LayoutPlan plan_critic(const PlannedModel& critic, const Layout& layout, const PlanDevices& devices);

// Those that fit first, the fastest first; then those that do not, the one that wants least memory first.
std::vector<LayoutPlan> rank_layouts(const ModelShape& shape, const std::vector<Layout>& layouts, const Workload& work,
                                     const PlanOptions& options, const PlanDevices& devices,
                                     const PlannedBeside& beside = {});
// In the same order.
void rank_plans(std::vector<LayoutPlan>& plans);

}  // namespace trireme
