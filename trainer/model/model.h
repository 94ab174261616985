// Model: one decoder for the Llama, Qwen2 and Qwen3 families and mixtures of experts of theirs (Qwen3-MoE, Mixtral);
// the same layer code trains, prefills and decodes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "topology/split.h"
#include "trainer/model/config.h"
#include "trainer/model/kv_arena.h"
#include "trainer/model/parameter_layout.h"
#include "trainer/model/row_names.h"
#include "trainer/model/sharded_units.h"
#include "trainer/ops/ops.h"

namespace trireme {

struct Activation;
class Communicator;
struct ContextRows;
class RouterError;
class ParallelContext;
struct Residual;
class RouterWatch;
class StageLinks;
struct WatchedRows;

// Flat tokens of whole sequences; no padding.
struct PackedBatch {
  at::Tensor ids;               // [tokens] int64
  at::Tensor positions;         // [tokens] int64, position of each token in its sequence
  std::vector<int64_t> starts;  // [sequences + 1]; first 0, last tokens
  // Empty, or for each sequence the earlier one whose tokens come before its own, -1: none (attention_shared).
  // Positions count from the first token of all.
  std::vector<int64_t> prefix;
  // One context parallel rank's part of a batch (context_part); null: whole sequences. Then starts are those of its
  // pieces, and prefix is empty.
  std::shared_ptr<const ContextRows> context;
  // Of each sequence (of a context rank's part: of the micro-batch's), for errors that name it; null: they name rows.
  std::shared_ptr<const std::vector<SequenceName>> names;

  // Sequences one after another, each at positions 0, 1, ...
  static PackedBatch from_sequences(const std::vector<std::vector<int32_t>>& sequences);
  int64_t tokens() const { return ids.size(0); }
};

// Flat new tokens of many sequences, `plan` saying where each run's keys live (make_cache_plan).
struct CachedBatch {
  at::Tensor ids;        // [tokens] int64
  at::Tensor positions;  // [tokens] int64 (past + i for token i of a run), below config().positions() on CUDA
  CachePlan plan;        // counts add up to tokens
  // With split experts: the ranks of their group have as many tokens each, so that the pass may take gathers_experts'
  // way.
  bool alike = false;
};

// A named slice of the flat buffers.
struct Parameter : PlacedParameter {
  at::Tensor tensor;  // [shape()], a leaf; a view of flat_parameters() without padding; requires_grad when trainable
  bool trainable = true;
  bool decay = true;  // false for norms and biases (one-dimensional): no weight decay
};
// A head of a vocabulary that is no multiple of so many is read, on CUDA, together with the rows of memory behind it
// that make one. There always are some: zeros, or the first layer where the head is tied.
inline constexpr int64_t kHeadRows = 8;

struct ModelOptions {
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  bool trainable = true;  // false: no gradient buffer, nothing requires grad (a reference model)
  // In which backward adds up gradients; the parameters' own when absent.
  std::optional<at::ScalarType> gradient_dtype;
  // Routers of experts: no gradients and no optimizer state (policy.megatron_cfg.freeze_moe_router).
  bool freeze_router = true;
  bool wide_router = true;     // their logits are summed in float64 (moe_router_dtype fp64), else in float32
  int64_t combine_blocks = 0;  // ExpertShape's; 0: derived
  // Hidden sizes and MLP widths that are no multiple of 8 are held padded (padded_width). Always so on CUDA.
  bool pad_widths = false;
  bool checkpoint_activations = false;  // recompute().whole_layers begins as all of them, not as none
  // What of the model this rank holds; nothing: all of it. `tensor`: the group of split->tp ranks, `links`: those of
  // split->pp stages, `experts` that of the split->ep x etp ranks that share each layer's experts, null where it is
  // one. They outlive the model. By their width on CPU only. set_split fills in all of it.
  std::optional<ModelSplit> split;
  Communicator* tensor = nullptr;
  StageLinks* links = nullptr;
  Communicator* experts = nullptr;
  // With split experts, whose rows meet in a layer: who makes passes with this rank (Axis::kPasses), and in generation
  // steps (Axis::kCopy). Expert groups may end inside of replicas, hence more than `experts`.
  Communicator* passes = nullptr;
  Communicator* steps = nullptr;
  // In training tensor ranks exchange rows beside the products that these stand between; false: each exchange is
  // awaited where it begins. The bits are the same.
  bool overlap_exchanges = true;
  // The ranks that each take a part of every micro-batch's rows (context_part), null where it is one. Packed passes
  // take parts and are collective over it; cached ones know nothing of it.
  Communicator* context = nullptr;
  // What ranks that hold the same share of it; not with several pipeline stages.
  Sharding sharding;
  // Its weights begin without memory, and have some between take_memory() and release_memory(): on CUDA at the same
  // addresses every time. Of one that is not trained, with no sharding.
  bool releasable = false;
  int64_t least_bytes = 0;  // its memory is no less
  // The gradients' memory may be elsewhere between steps (lend_gradients). Of a trained model that shares none.
  bool lends_gradients = false;
};

// What of a model of this shape the rank holds in its layout, and the groups that passes take: split and the pointers
// behind it. Collective where the model is a mixture of experts.
void set_split(ModelOptions& options, const ModelShape& shape, ParallelContext& ranks, const StageOptions& stages = {});

// Which activations backward computes again instead of keeping them. None of it changes a bit of a gradient. Layers are
// counted in each piece of a pipeline stage.
struct Recompute {
  int64_t whole_layers = 0;  // of the first so many layers only the input is kept
  int64_t cheap_layers = 0;  // of the first so many layers behind those, not kept are the results of:
  bool norms = true;         //   the two norms before the products
  bool swiglu = true;        //   SwiGLU
  // Of the first so many layers behind the whole ones experts keep no gate and up.
  int64_t expert_layers = 0;
};

// forward and forward_cached may run on several threads only with different arenas and with grad mode off; writing the
// parameters needs everything else still.
class Model final {
 public:
  // Collective over the pipeline's ranks where there are several on CUDA.
  Model(const ModelConfig& config, const ModelOptions& options);  // parameters are zero until loaded or initialised
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const { return config_; }
  const ModelOptions& options() const { return options_; }
  // Sizes of what this rank holds, padding included: whoever sizes tensors asks these, not the configuration's.
  const LocalShape& local() const { return local_; }
  // In how many blocks a layer's experts are combined, where there are any.
  int64_t expert_blocks() const;
  std::vector<LinearShape> linear_shapes() const { return config_.linear_shapes(local_); }  // of its products

  const Recompute& recompute() const { return recompute_; }
  // For the forward passes that follow. More layers than there are: all.
  void set_recompute(const Recompute& recompute) { recompute_ = recompute; }

  // Hidden states after the final norm [tokens, local().hidden]. Differentiable when grad mode is on and the model is
  // trainable. Split over tensor ranks: the same tokens and the same result on all of them; between products a rank has
  // every tp-th part of the rows only (sequence parallel), but in passes against an arena: there each has all rows, and
  // one exchange does for two; each part of the rows goes through a mixture's experts on its own rank. Gradients of
  // what all hold alike (norms, routers), and of experts, are of a rank's own rows: their sum over the ranks is the
  // parameter's. Of the result's gradient each rank gives a part: only logprobs and values may read it. Collective over
  // options().tensor.
  // Experts split over ranks change no bit (but for the width of each, split->etp), but then every pass, backward too,
  // is collective over options().experts: the ranks of options().passes make as many, with tokens of their own or none,
  // those of options().steps as many against an arena. Of a model with one pipeline stage; of several each rank calls
  // forward_piece for its own.
  at::Tensor forward(const PackedBatch& batch) const;
  // The same for new tokens against the arena (of local()), into which their keys and values are written. Row bits
  // equal forward's. No autograd. On the CPU router logits that are not finite are an error here (RouterError, by row
  // and layer) and in forward (by the batch's names), on the rank whose row it is.
  at::Tensor forward_cached(const CachedBatch& batch, KvArena& arena) const;

  // One piece of this rank's stage (split().layers), for all tokens of the batch. `input`: what the piece before gave,
  // of make_residual's sizes; undefined for the model's first piece, which embeds. The result is the residual stream
  // between two layers, rounded as the next norm rounds it, or, of the model's last piece, that of forward. With the
  // pieces in turn every row has forward's bits, and so has every gradient, given that of the piece's result.
  at::Tensor forward_piece(int64_t piece, const PackedBatch& batch, const at::Tensor& input) const;
  // The same of forward_cached. `arena` has the layers of all of the rank's pieces.
  at::Tensor forward_cached_piece(int64_t piece, const CachedBatch& batch, KvArena& arena,
                                  const at::Tensor& input) const;
  // For what a piece gives to the next: [residual_rows(tokens), hidden], not initialised.
  at::Tensor make_residual(int64_t tokens) const;
  // This rank's part of so many tokens' rows: tokens / tp rounded up.
  int64_t residual_rows(int64_t tokens) const;
  const ModelSplit& split() const { return split_; }

  // [local().vocab, hidden]: lm_head.weight, or model.embed_tokens.weight when tied. A last stage's, as the next two.
  // Of a value model score.weight [1, hidden].
  const at::Tensor& head_weight() const;

  // log p(targets[i] | hidden[i]) of rows of forward's result: token_logprobs over the head. Split over tensor ranks:
  // alike on all of them, and so must be what is computed from it.
  at::Tensor logprobs(const at::Tensor& hidden, const at::Tensor& targets, const LogprobOptions& options) const;
  // Of a value model, which has no other use of its head: a number [rows] float32 of each of some rows of forward's
  // result (token_values). Split over tensor ranks: alike on all of them, and so must be what is computed from it. Each
  // holds the whole head, whose gradient is of the rank's part of the rows, as a norm's.
  at::Tensor values(const at::Tensor& hidden) const;
  // A token for each of some rows of forward_cached's result; its log-prob has the bits of logprobs on the same row.
  // Split over tensor ranks: the same on all of them; collective, also without rows.
  SampleResult sample(const at::Tensor& hidden, const std::vector<SampleRow>& rows) const;
  // The same on CUDA without waiting for the host (sample_tokens_on_device); legal in stream capture where the tensor
  // ranks' devices see each other's memory (graphs_allowed).
  DeviceSamples sample_on_device(const at::Tensor& hidden, const DeviceSampling& rows) const;
  // Whether passes of so many tokens against an arena may be captured into graphs: where the devices of the tensor
  // ranks see each other's memory, and those of the experts' ranks too and there are few tokens. Collective over both
  // groups at the first call.
  bool graphs_allowed(int64_t tokens) const;

  // In the order of ParameterLayout.
  std::vector<Parameter>& parameters() { return parameters_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const Parameter* find(const std::string& name) const;  // null when absent

  // All parameters, one contiguous tensor, 64-byte aligned, gaps zero: trained_elements() that are trained, then frozen
  // ones. Write it under at::NoGradGuard.
  const at::Tensor& flat_parameters() const { return flat_parameters_; }
  int64_t trained_elements() const { return trained_elements_; }
  // [trained_elements()], in options().gradient_dtype; the parameters' .grad are views of it, so backward adds into it.
  // Undefined when not trainable. Where gradients are sharded it is the first alike_elements() only: the others go to
  // units()->on_gradients in every backward pass, in which all ranks of options().sharding take part.
  const at::Tensor& flat_gradients() const { return flat_gradients_; }
  // Null where nothing is sharded. Where weights are, flat_parameters() and the parameters' tensors may be read and
  // written while units()->whole(), and written ones count from cut() on.
  ShardedUnits* units() const { return units_.get(); }
  // Of a releasable one. What it gets is zeros; nothing when it has some, or none.
  void take_memory();
  void release_memory();
  // Of one that lends its gradients: without memory until they come back, zeros, at the same addresses on CUDA.
  // flat_gradients() may be neither read nor written meanwhile. Nothing where none are lent, or they are there.
  void lend_gradients();
  void return_gradients();
  int64_t lent_bytes() const;  // what lend_gradients() gives
  void zero_gradients();
  // The first so many elements of the flat buffers are what all tensor ranks hold alike: a parameter's gradient there
  // is the ranks' sum. 0 where the model is not split over them.
  int64_t alike_elements() const { return alike_elements_; }
  // From here to trained_elements() lie experts that the rank's expert data parallel group shares, which is not its
  // data parallel one; nothing where experts are not apart (ModelSplit).
  int64_t split_experts() const { return split_experts_; }

  // Called in the backward pass of every forward that began to record while it was set, from the thread of that pass:
  // no gradient at or behind element `from` of flat_gradients() will change any more in it. `from` falls layer by
  // layer; gradients before the first layer's (the embedding's) are complete when backward returns. May be empty.
  std::function<void(int64_t from)> on_gradients_final;
  // Called before forward and forward_cached read parameters before element `end` of flat_parameters(); `end` rises
  // layer by layer to all of them. May be empty. Not called where a captured graph is replayed.
  std::function<void(int64_t end)> before_reading;
  // Is told the routes of every packed pass that records gradients, of own rows. May be null.
  std::shared_ptr<RouterWatch> router_watch;

  // Copies another model's parameters (same configuration); dtypes may differ.
  void copy_parameters_from(const Model& other);

 private:
  struct Layer;
  struct Context;
  struct Again;
  void allocate_parameters();
  void bind_layers();
  void share_head();
  at::Tensor held(const std::string& name) const;  // with its padding; undefined when there is no such parameter
  // `held`: its shape in the flat buffers; `shape`: what of it, from the first elements on; empty: all.
  at::Tensor leaf(int64_t offset, const std::vector<int64_t>& held, bool trainable,
                  const std::vector<int64_t>& shape = {}) const;
  // Elements of a hidden state that a norm counts; 0: all.
  int64_t counted() const { return local_.hidden == config_.hidden_size ? 0 : config_.hidden_size; }
  at::Tensor embed_rows(const at::Tensor& ids, const Context& context) const;
  at::Tensor rope_rows(int64_t positions) const;
  int64_t rope_extent(const at::Tensor& positions, int64_t longest) const;
  Context packed_context(const PackedBatch& batch) const;
  [[noreturn]] void fail_at_router(const RouterError& error, int64_t layer, const Context& context) const;
  std::shared_ptr<const WatchedRows> watched_rows(const PackedBatch& batch, const Context& context) const;
  at::Tensor run(int64_t piece, const at::Tensor& ids, const Context& context, const at::Tensor& input) const;
  Again again_of(int64_t index, const Context& context) const;
  // A layer behind its first norm, whose results `x` holds.
  Residual run_layer(int64_t index, const NormResult& x, const Context& context, const Again& again) const;
  Residual run_layer_again(int64_t index, const NormResult& x, const Context& context) const;
  at::Tensor attention(int64_t index, const Activation& x, const Context& context) const;
  at::Tensor attend_pieces(const Qkv& parts, const ContextRows& rows) const;
  at::Tensor attend(int64_t index, const at::Tensor& qkv, const Context& context) const;
  at::Tensor mlp(int64_t index, const Activation& x, const Context& context, const Again& again) const;
  Range expert_rows(const Context& context) const;
  bool gathers_experts(int64_t rows) const;
  bool grouped_part_here(int64_t rows) const;
  at::Tensor experts(int64_t index, const Activation& x, const Context& context, const Again& again) const;
  at::Tensor whole_logits(const at::Tensor& hidden) const;
  NormResult next_norm(const Residual& x, const at::Tensor& scale, const Context& context) const;
  at::Tensor end_of_piece(const Residual& x, const Context& context) const;
  at::Tensor first_product(const Activation& x, const at::Tensor& weight, const at::Tensor& bias,
                           const Context& context) const;
  at::Tensor last_product(const Activation& x, const at::Tensor& weight, const at::Tensor& bias,
                          const Context& context) const;

  ModelConfig config_;
  ModelOptions options_;
  ModelSplit split_;
  LocalShape local_;
  Recompute recompute_;
  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, size_t> by_name_;
  std::vector<Layer> layers_;          // this rank's
  std::vector<Range> pieces_;          // of layers_
  std::vector<int64_t> layer_begins_;  // ParameterLayout's
  int64_t trained_elements_ = 0, alike_elements_ = 0, split_experts_ = 0;
  at::Tensor embedding_, final_norm_, head_;
  SplitLogits split_logits_;  // of a head that tensor ranks share
  at::Tensor flat_parameters_;
  at::Tensor flat_gradients_;
  std::unique_ptr<ShardedUnits> units_;
  std::unique_ptr<WholeMemory> memory_, gradient_memory_;  // of what comes and goes:
  UnitMemory values_, gradient_values_;
  mutable std::mutex rope_mutex_;
  mutable std::optional<bool> gathers_experts_;  // once it was asked
  mutable at::Tensor rope_cache_;                // [positions, 2, head_dim / 2], grown when a batch reaches further
};

// Reads config.json and (sharded or single) safetensors. Converts to options.dtype. Throws Error(kUser | kData) that
// names the file and the tensor: missing, unexpected, wrong shape, truncated, overlapping. Also runs
// choose_linear_mode.
// A value model's folder is refused.
std::unique_ptr<Model> load_model(const std::filesystem::path& dir, const ModelOptions& options);
// The same of a value or reward model. A causal model's folder gives its layers, under a head of zeros.
std::unique_ptr<Model> load_value_model(const std::filesystem::path& dir, const ModelOptions& options);

// Start-up self-test of every product of a rank's part (linear_rows_are_exact, grouped_rows_are_exact).
bool products_are_exact(const ModelConfig& config, const LocalShape& own, at::ScalarType dtype, at::Device device,
                        int64_t most_rows);

// Throws Error(kUser) that names `source` and the size where CUDA has no kernels for the shape, of which `etp` ranks
// share the width of experts. load_model asks it there, before any weight is read.
void require_cuda_kernels(const ModelConfig& config, const std::string& source, int64_t etp = 1);

// Overwrites `model`'s parameters from a folder of the same configuration; a value model's from that of a causal one
// too, then its head becomes zeros.
void load_parameters(Model& model, const std::filesystem::path& dir);

// A parameter of a split model, whole and on the host, on rank `to` of `holders`, the ranks that hold the model
// together (Axis::kCopyPp): those of the first stage, then of the next ones. Undefined on the others. Collective over
// `holders`.
at::Tensor gather_parameter(const Model& model, Communicator& holders, const std::string& name, int to);

struct SaveOptions {
  // Folder whose tokenizer files, generation_config.json and unknown keys of config.json go along; empty: none.
  std::filesystem::path source_dir;
  int64_t max_shard_bytes = int64_t{4} << 30;
  std::optional<at::ScalarType> dtype;  // as held in memory when absent
};
// A folder that Hugging Face reads. Every file is written under a temporary name, synced and renamed; the weights'
// index (or single file) comes last.
void save_model(const Model& model, const std::filesystem::path& dir, const SaveOptions& options);

// Random weights: normal(0, initializer_range), norms 1, biases 0. A value depends on (seed, parameter name, index)
// only.
void init_parameters(Model& model, uint64_t seed);
// The same distribution (with experts another one, so that rows choose evenly) drawn on the model's device, for
// measurements: seconds at 8 G parameters. Values depend on seed, shape, dtype and kind of device.
void draw_parameters(Model& model, uint64_t seed);
// Writes config.json, generation_config.json and random float32 (or config.dtype) weights into `dir`.
void init_model(const std::filesystem::path& dir, const ModelConfig& config, uint64_t seed);

// log p(ids[i] | ids[0..i)) for i >= 1 of each sequence (first entry of each result is for ids[1]).
std::vector<std::vector<float>> score(const Model& model, const std::vector<std::vector<int32_t>>& sequences,
                                      const LogprobOptions& options = {}, int64_t max_tokens_per_batch = 4096);

// "float32" | "bfloat16" | ... as in config.json. Throws Error(kUser) for others.
at::ScalarType parse_dtype(const std::string& name);
std::string dtype_name(at::ScalarType dtype);

}  // namespace trireme
