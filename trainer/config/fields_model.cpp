// Keys of the models and their generation: policy, but for its back-ends, and value.
#include "trainer/config/field_table.h"

namespace trireme::config {

void add_policy(std::vector<Field>& table) {
  MODEL(model_name)
  ("a folder in Hugging Face format, a checkpoint directory (its newest step), or a Hub id in the local cache")
      .null_as("");
  KEY(policy.tokenizer.name)("folder or Hub id of the tokenizer").from("policy.model_name");
  KEY(policy.tokenizer.chat_template)
  ("template text or file; default or empty: the model's own; none or null: no template").null_as("none");
  KEY(policy.tokenizer.chat_template_kwargs)("variables for the template").null_default();
  MODEL(train_global_batch_size)("samples in one optimizer step").at_least(1);
  MODEL(train_micro_batch_size)("samples in one forward and backward pass").at_least(1);
  MODEL(logprob_batch_size)("samples in one log-prob pass").from("policy.train_micro_batch_size").at_least(1);
  MODEL(max_total_sequence_length)("tokens of prompt and response together, at most").at_least(2);
  MODEL(precision)("dtype of the live weights and activations").one_of({"bfloat16", "float32"});
  MODEL(max_grad_norm)("gradients are scaled down to this norm; 0 or null: never").at_least(0).null_as("0");
  MODEL(make_sequence_length_divisible_by)
  ("read by NeMo-RL's files; sequences are packed without padding, so there is no length to round up").at_least(1);
  KEY(policy.logprob_chunk_size)
  ("read by NeMo-RL's files; the vocabulary op chooses its own chunk of rows").at_least(1).null_default();
  KEY(policy.offload_optimizer_for_logprob)("optimizer state on the host during log-prob passes");
  OUR_MODEL(activation_checkpointing)
  ("keep only the input of each layer for backward; for runs with neither dtensor_cfg nor megatron_cfg");
  OUR_MODEL(recompute_layers)
  ("keep only the input of the first so many layers, for runs without megatron_cfg; -1: on CUDA as many as the memory "
   "asks for, "
   "after the norms and SwiGLU of all, on CPU none")
      .at_least(-1);
  OUR_MODEL(moe_combine_blocks)
  ("mixtures of experts: in so many runs of experts by id the results of a token are added up and rounded, then those; "
   "0: 8, or the most below it that divides the experts. Expert parallel ranks must divide it")
      .at_least(0);
  OURS(policy.random_weights)
  ("for measurements only: policy, reference model and critic have weights drawn with grpo.seed; of "
   "policy.model_name's folder "
   "only config.json and the tokenizer are read (trireme init-model --shape NAME --no-weights)");
}

void add_batching(std::vector<Field>& table) {
  MODEL(dynamic_batching.enabled)("micro-batches by number of tokens; excludes sequence_packing");
  MODEL(dynamic_batching.train_mb_tokens)
  ("tokens of a training micro-batch").from("max_total_sequence_length * train_micro_batch_size").at_least(1);
  MODEL(dynamic_batching.logprob_mb_tokens)
  ("tokens of a log-prob micro-batch").from("max_total_sequence_length * logprob_batch_size").at_least(1);
  MODEL(dynamic_batching.sequence_length_round)("lengths are rounded up to a multiple of it").at_least(1);
  MODEL(sequence_packing.enabled)("several sequences in one row; off by itself where dynamic_batching is on");
  MODEL(sequence_packing.train_mb_tokens)
  ("tokens of a training row").from("max_total_sequence_length * train_micro_batch_size").at_least(1);
  MODEL(sequence_packing.logprob_mb_tokens)
  ("tokens of a log-prob row").from("max_total_sequence_length * logprob_batch_size").at_least(1);
  MODEL(sequence_packing.algorithm)
  ("how sequences are put into rows; modified_ffd is short for modified_first_fit_decreasing")
      .one_of({"modified_first_fit_decreasing", "concatenative", "first_fit_decreasing", "first_fit_shuffle",
               "modified_ffd"});
  MODEL(sequence_packing.sequence_length_round)
  ("read by NeMo-RL's files; rows are packed without rounding").at_least(1);
  MODEL(sequence_packing.microbatch_order)("order of the rows").one_of({"packer", "largest_first"});
  OUR_MODEL(sequence_packing.share_prompts)
  ("a group's prompt is computed once in a row, in training and log-prob passes; the same log-probs, gradients within "
   "rounding");
}

void add_optimizer(std::vector<Field>& table) {
  MODEL(optimizer.name)
  ("AdamW under any of its names")
      .one_of({"torch.optim.AdamW", "AdamW", "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"});
  MODEL(optimizer.kwargs.lr)("learning rate").at_least(0);
  MODEL(optimizer.kwargs.weight_decay)("decoupled weight decay").at_least(0);
  MODEL(optimizer.kwargs.betas)("decay of the two moments").at_least(0).below(1);
  MODEL(optimizer.kwargs.eps)("added to the root of the second moment").above(0);
  MODEL(scheduler)
  ("list of learning-rate schedulers {name, kwargs}, then {milestones: [...]}; they move once a step of the run (a "
   "rollout with all its optimizer steps), as NeMo-RL's do")
      .null_default();
}

void add_generation(std::vector<Field>& table) {
  KEY(policy.generation.backend)
  ("one engine serves all; other names are accepted")
      .one_of({"trireme", "vllm", "sglang", "megatron", "trtllm", "dynamo"});
  KEY(policy.generation.max_new_tokens)
  ("tokens of a response, at most").from("policy.max_total_sequence_length").at_least(1);
  KEY(policy.generation.temperature)("logits are divided by it").above(0);
  KEY(policy.generation.top_p)
  ("sample from the most likely tokens that together have this probability").above(0).at_most(1);
  KEY(policy.generation.top_k)
  ("sample from this many most likely tokens; 0, -1 or null: all").at_least(-1).null_as("0");
  OURS(policy.generation.min_p)
  ("leave out tokens less likely than this times the most likely; 0: none").at_least(0).below(1);
  KEY(policy.generation.val_temperature)("temperature in validation; 0: greedy").from("temperature").at_least(0);
  KEY(policy.generation.val_top_p)("top_p in validation").from("top_p").above(0).at_most(1);
  KEY(policy.generation.val_top_k)("top_k in validation").from("top_k").at_least(0);
  KEY(policy.generation.stop_token_ids)
  ("tokens that end a response, besides the model's own").at_least(0).null_default();
  KEY(policy.generation.stop_strings)("texts that end a response").null_default();
  OURS(policy.generation.max_running_samples)("samples decoded at once, per rank").at_least(1);
  OURS(policy.generation.prefill_chunk_tokens)("prompt tokens prefilled in one engine step").at_least(1);
  OURS(policy.generation.kv_cache_tokens)("rows of the key-value cache, per rank; 0: as many as fit").at_least(0);
  OURS(policy.generation.kv_cache_memory_fraction)
  ("when kv_cache_tokens is 0: its share of the device's memory that everything else leaves, captured graphs and the "
   "largest step included")
      .above(0)
      .below(1);
  OURS(policy.generation.pipeline_lanes)
  ("under pipeline parallelism: schedulers that take turns, so that stages compute at the same time; 0: as many as "
   "stages. Fewer where the cache has no room for so many of the longest sequences. No sample depends on it")
      .at_least(0);
  OURS(policy.generation.tensor_parallel_size)
  ("tensor parallel ranks of generation; 0: as in training. Another number takes memory for a second copy of the "
   "weights while generating, filled before each rollout (phase refit), and makes previous log-probs a pass of their "
   "own. Of an engine (colocated.enabled=false) its devices, of one machine; 0: one. With as many as training has "
   "log-probs need no pass of their own")
      .at_least(0);
  OURS(policy.generation.expert_parallel_size)
  ("of an engine (colocated.enabled=false): how many parts its experts are split into, each of which some of its "
   "tensor "
   "ranks have; 0: as many as tensor ranks and combine blocks (policy.moe_combine_blocks) allow. No bit depends on it")
      .at_least(0);
  OURS(policy.generation.fold_pipeline)
  ("generate without the pipeline stages of training: each rank has its part of all layers, in a second copy of the "
   "weights, filled before each rollout (phase refit). No sample depends on it");
  OURS(policy.generation.background_sms)
  ("SMs of a GPU, in eights and at most half, that compute reference log-probs, critic's values and reward model's "
   "scores of finished responses while at most 32 are left to be generated; more where products do not start on so "
   "few; "
   "0: computed afterwards; -1: about 32 of a GPU, 0 on a CPU, where any other number means a thread of its own. No "
   "bit "
   "of a result changes (but see grpo.early_gradients)")
      .at_least(-1);
  OURS(policy.generation.forced_lengths)
  ("for measurements only: training responses have these lengths and prompts are cut or repeated to theirs, whatever "
   "the model says, and rewards are drawn. A file {\"prompt_lengths\": [...], \"output_lengths\": [...]} "
   "(bench/README.md) or synthetic:PROMPTSxSAMPLES:mean=M[:max=X][:prompt=P][:seed=S], with "
   "grpo.num_generations_per_prompt responses for each prompt; prompts beyond the last begin again with the first. "
   "Empty: responses end by themselves");
  KEY(policy.generation.colocated.enabled)
  ("generate on the training devices; false: other processes generate (trireme engine), training's ranks only for "
   "validation");
  KEY(policy.generation.colocated.resources.gpus_per_node)
  ("of a cluster of one node, devices that generate when not colocated: the others train. How many engines there are "
   "is "
   "the RLJob's or the launcher's to say")
      .at_least(0)
      .null_as("0");
  KEY(policy.generation.colocated.resources.num_nodes)
  ("of several nodes, those that generate when not colocated: the others train").at_least(0).null_as("0");
}

void add_value(std::vector<Field>& table) {
  for (size_t i = 0, size = table.size(); i < size; ++i) {
    const auto get = table[i].of_model;
    if (get == nullptr) continue;
    table.push_back(twin_of(table[i], "policy.", "value.", [get](Config& c) { return get(c.value); }));
    Field& twin = table.back();
    const std::string name = twin.path.substr(std::string("value.").size());
    if (name == "model_name") {
      twin.from("policy.model_name").doc =
          "the critic: a folder in Hugging Face format (...ForSequenceClassification with one label, or a causal "
          "model, "
          "under a head of zeros), or a Hub id in the local cache";
      twin.null_means.reset();
    }
    for (const char* of_policy :
         {"train_global_batch_size", "train_micro_batch_size", "max_total_sequence_length", "precision"}) {
      if (name == of_policy) twin.from("policy." + name);
    }
  }
}

}  // namespace trireme::config
