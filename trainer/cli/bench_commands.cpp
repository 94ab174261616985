#include <iostream>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/threads.h"
#include "trainer/bench/checkpoint_bench.h"
#include "trainer/bench/engines_bench.h"
#include "trainer/bench/exchange_bench.h"
#include "trainer/bench/ops_bench.h"
#include "trainer/bench/refit_bench.h"
#include "trainer/bench/rollout_bench.h"
#include "trainer/bench/step_bench.h"
#include "trainer/bench/train_bench.h"
#include "trainer/cli/commands.h"
#include "trainer/cli/environment.h"
#include "trainer/parallel/device.h"

namespace trireme {
namespace {

constexpr const char* kUnknownEnds = "do not tell the scheduler where responses end, as in a real run";

void add_common(CLI::App* verb, bench::CommonOptions& o, const CommandContext& context) {
  o.command = context.command;
  verb->add_option("--shape", o.shape, join(bench::shape_names(), ", ") + ", or a config.json, or its folder")
      ->required();
  verb->add_option("--layers", o.layers, "only this many of its layers (default: all)");
  verb->add_option("--device", o.device)->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  verb->add_option("--dtype", o.dtype, "auto: bfloat16 on cuda, float32 on cpu")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16"}));
  verb->add_option("--seed", o.seed, "seed of weights, prompts and samples");
  verb->add_option("--repeats", o.repeats, "measured runs; the median is reported")->check(CLI::PositiveNumber);
  verb->add_option("--json", o.json, "write the results to this file");
  verb->add_flag("--verbose", o.verbose, "log what is chosen by autotuning");
}

void add_generation(CLI::App* verb, bench::GenerationOptions& o) {
  verb->add_option("--max-sequences", o.max_sequences, "samples decoded at once on a rank");
  verb->add_option("--cache-rows", o.cache_rows, "size of the KV cache in tokens (default: what the lengths need)");
  verb->add_option("--prefill-chunk-tokens", o.prefill_chunk_tokens);
  verb->add_option("--temperature", o.temperature)->check(CLI::PositiveNumber);
}

void add_tensor(CLI::App* verb, bench::CommonOptions& o) {
  verb->add_option("--tp", o.tp, "tensor parallel size")->check(CLI::PositiveNumber);
}

void add_split(CLI::App* verb, bench::CommonOptions& o) {
  add_tensor(verb, o);
  verb->add_option("--pp", o.pp, "pipeline stages")->check(CLI::PositiveNumber);
  verb->add_option("--virtual-stages", o.stages.virtual_stages, "virtual stages of each stage")
      ->check(CLI::PositiveNumber);
  verb->add_option("--first-stage-layers", o.stages.first_layers, "layers of the first stage (default: an even share)");
  verb->add_option("--last-stage-layers", o.stages.last_layers, "layers of the last stage (default: an even share)");
}

void add_experts(CLI::App* verb, bench::CommonOptions& o) {
  verb->add_option("--ep", o.ep, "expert parallel size")->check(CLI::PositiveNumber);
  verb->add_option("--combine-blocks", o.combine_blocks, "policy.moe_combine_blocks (default: derived)")
      ->check(CLI::PositiveNumber);
}

void add_context(CLI::App* verb, bench::CommonOptions& o) {
  verb->add_option("--cp", o.cp, "context parallel size")->check(CLI::PositiveNumber);
}

// Threads and log of a rank; single benchmarks run alone.
void set_up(bench::CommonOptions& o, bool collective) {
  const int64_t world = environment_int("WORLD_SIZE", 1);
  if (world > 1 && !collective) {
    fail_user("this benchmark runs on one rank; WORLD_SIZE is " + std::to_string(world) +
              " (all but bench ops run on several)");
  }
  o.local_rank = static_cast<int>(environment_int("LOCAL_RANK", 0));
  LogOptions log;
  if (o.verbose) log.level = LogLevel::kDebug;
  if (world > 1) log.tag = "rank " + std::to_string(environment_int("RANK", 0));
  log_setup(log);
  use_threads(local_world_from_environment());
}

template <typename Fn>
int on_ranks(bench::CommonOptions& common, double timeout_s, Fn&& run) {
  set_up(common, /*collective=*/true);
  const RendezvousOptions rendezvous = rendezvous_from_environment(timeout_s);
  const Layout layout = common.layout(rendezvous.world_size);
  prepare_devices({layout});
  choose_device(common.device, common.local_rank);  // what it lacks is said before the ranks meet
  ParallelContext context(layout, rendezvous);
  run(context);
  return 0;
}

std::shared_ptr<double> add_timeout(CLI::App* verb) {
  auto timeout_s = std::make_shared<double>(600);
  verb->add_option("--timeout", *timeout_s, "seconds that a collective may take")->check(CLI::PositiveNumber);
  return timeout_s;
}

void add_rollout(CLI::App& bench, CommandContext& context) {
  auto o = std::make_shared<bench::RolloutBenchOptions>();
  CLI::App* verb = bench.add_subcommand("rollout", "generate with forced lengths; compare log-probs with the loss's");
  add_common(verb, o->common, context);
  add_generation(verb, o->generation);
  verb->add_option("--lengths", o->lengths, "response lengths: a file, or synthetic:8x32:mean=794:max=3800:seed=1")
      ->required();
  verb->add_flag("--unknown-ends", o->generation.unknown_ends, kUnknownEnds);
  verb->add_option("--lanes", o->lanes, "lanes of pipeline stages; 0: as many as stages")
      ->check(CLI::NonNegativeNumber);
  verb->add_option("--score-tokens", o->score_tokens, "tokens of a packed batch in the comparison; 0: no comparison");
  add_split(verb, o->common);
  add_experts(verb, o->common);
  auto timeout_s = add_timeout(verb);
  verb->callback([=, &context] {
    context.run = [=] {
      return on_ranks(o->common, *timeout_s,
                      [&](ParallelContext& ranks) { bench::bench_rollout(*o, ranks, std::cout); });
    };
  });
}

void add_decode(CLI::App& bench, CommandContext& context) {
  auto o = std::make_shared<bench::DecodeBenchOptions>();
  CLI::App* verb = bench.add_subcommand("decode", "decode steps at given batch sizes");
  add_common(verb, o->common, context);
  add_generation(verb, o->generation);
  verb->add_option("--batch-size,--alive", o->batch_sizes, "samples in a step, e.g. 16,64")->delimiter(',');
  verb->add_option("--context", o->context, "mean context length, in tokens");
  verb->add_option("--steps", o->steps, "measured steps");
  verb->add_option("--background-sms,--background-processors", o->background_sms,
                   "leave this many SMs free, as while reference log-probs are computed (CUDA, up to 32 samples)")
      ->check(CLI::Range(int64_t{0}, int64_t{1024}));
  verb->add_option("--trace", o->trace, "write a Chrome trace of the kernels of eight more steps to this file");
  add_tensor(verb, o->common);
  auto timeout_s = add_timeout(verb);
  verb->callback([=, &context] {
    context.run = [=] {
      return on_ranks(o->common, *timeout_s,
                      [&](ParallelContext& ranks) { bench::bench_decode(*o, ranks, std::cout); });
    };
  });
}

void add_train(CLI::App& bench, CommandContext& context) {
  auto o = std::make_shared<bench::TrainBenchOptions>();
  CLI::App* verb = bench.add_subcommand("train", "forward, loss, backward, optimizer; alone or under trireme launch");
  add_common(verb, o->common, context);
  verb->add_option("--tokens", o->tokens, "tokens of a rank's micro-batch");
  verb->add_option("--sequences", o->sequences, "sequences in a micro-batch");
  verb->add_option("--prompt-tokens", o->prompt_tokens,
                   "prompt tokens of each sequence, not scored (default: 200 or half)");
  verb->add_option("--micro-batches", o->micro_batches, "micro-batches of a rank in an optimizer step");
  verb->add_option("--gradient-dtype", o->gradient_dtype)->check(CLI::IsMember({"float32", "bfloat16"}));
  verb->add_option("--sharding", o->sharding, "what data parallel ranks shard: no_shard, optim, optim_grads, ...");
  verb->add_flag("!--no-optimizer", o->optimizer, "forward and backward only");
  verb->add_flag("--checkpoint-activations", o->checkpoint_activations, "recompute every layer in backward");
  verb->add_option("--recompute-layers", o->recompute_layers,
                   "recompute the first N layers; -1: as many as memory requires");
  verb->add_flag("!--no-overlap", o->overlap, "do not overlap communication with compute");
  verb->add_option("--trace", o->trace, "write a Chrome trace of the kernels of one more step to this file");
  add_split(verb, o->common);
  add_experts(verb, o->common);
  add_context(verb, o->common);
  auto timeout_s = add_timeout(verb);
  verb->callback([=, &context] {
    context.run = [=] {
      return on_ranks(o->common, *timeout_s, [&](ParallelContext& ranks) { bench::bench_train(*o, ranks, std::cout); });
    };
  });
}

void add_step(CLI::App& bench, CommandContext& context) {
  auto o = std::make_shared<bench::StepBenchOptions>();
  CLI::App* verb = bench.add_subcommand("step", "a whole step of GRPO or PPO; alone or under trireme launch");
  add_common(verb, o->common, context);
  add_generation(verb, o->generation);
  auto* lengths = verb->add_option("--lengths", o->lengths, "a file or synthetic:..., instead of the next four");
  verb->add_option("--prompts", o->prompts)->excludes(lengths);
  verb->add_option("--samples", o->samples, "responses for each prompt")->excludes(lengths);
  verb->add_option("--response-tokens,--answer-tokens", o->response_tokens)->excludes(lengths);
  verb->add_option("--prompt-tokens", o->prompt_tokens)->excludes(lengths);
  verb->add_option("--optimizer-steps", o->optimizer_steps, "optimizer steps per rollout");
  verb->add_flag("--unknown-ends", o->generation.unknown_ends, kUnknownEnds);
  verb->add_flag("--reference", o->reference, "with a reference model and the KL term");
  verb->add_flag("--critic", o->critic, "PPO: a critic of the same shape, its values, GAE and its training");
  verb->add_option("--train-tokens", o->train_tokens, "tokens of a packed micro-batch");
  verb->add_option("--gradient-dtype", o->gradient_dtype)->check(CLI::IsMember({"float32", "bfloat16"}));
  verb->add_flag("--checkpoint-activations", o->checkpoint_activations, "recompute every layer in backward");
  verb->add_option("--recompute-layers", o->recompute_layers,
                   "recompute the first N layers; -1: as many as memory requires");
  verb->add_flag("--share-prompts", o->share_prompts, "compute a group's prompt once per micro-batch");
  verb->add_option("--background-sms,--background-processors", o->background_sms,
                   "policy.generation.background_sms (default: -1)")
      ->check(CLI::Range(int64_t{-1}, int64_t{1024}));
  verb->add_flag("--early-gradients", o->early_gradients, "grpo.early_gradients");
  auto* carry = verb->add_option("--carry-over", o->carry_over,
                                 "grpo.async_grpo with this age: free slots start responses of the next steps; 0: off")
                    ->check(CLI::Range(int64_t{0}, int64_t{100}));
  verb->add_flag("--keep-cache", o->keep_cache, "with --carry-over: keep keys and values over updates")->needs(carry);
  verb->add_option("--ratio-from", o->ratio_from, "with --carry-over: grpo.async_grpo.ratio_from")
      ->check(CLI::IsMember({"training", "generation"}))
      ->needs(carry);
  auto* engines =
      verb->add_option("--engines", o->engines,
                       "under launch: the last processes are N engines, which generate synchronously, or in flight "
                       "with --carry-over; the other sizes are those of the ranks that train")
          ->check(CLI::Range(int64_t{0}, int64_t{1024}));
  verb->add_option("--engine-tp", o->engine_tp, "with --engines: so many processes each, which share its tensors")
      ->check(CLI::PositiveNumber)
      ->needs(engines);
  add_split(verb, o->common);
  add_experts(verb, o->common);
  add_context(verb, o->common);
  verb->add_option("--timeout", o->collective_timeout_s, "seconds that a collective may take")
      ->check(CLI::PositiveNumber);
  verb->callback([o, &context] {
    context.run = [o] {
      if (o->engines > 0) {
        set_up(o->common, /*collective=*/true);
        bench::bench_step_with_engines(*o, rendezvous_from_environment(o->collective_timeout_s), std::cout);
        return 0;
      }
      if (o->engine_tp > 1) fail_user("--engine-tp is for --engines, of which there are none");
      o->on_stuck = rendezvous_from_environment(o->collective_timeout_s).on_stuck;
      return on_ranks(o->common, o->collective_timeout_s,
                      [&](ParallelContext& ranks) { bench::bench_step(*o, ranks, std::cout); });
    };
  });
}

void add_checkpoint(CLI::App& bench, CommandContext& context) {
  auto o = std::make_shared<bench::CheckpointBenchOptions>();
  CLI::App* verb = bench.add_subcommand(
      "checkpoint",
      "how long a step waits for its checkpoint, and how fast that is written; alone or under trireme launch");
  add_common(verb, o->common, context);
  verb->add_option("--directory", o->directory, "where to write; emptied afterwards (default: a temporary folder)");
  verb->add_option("--generation-seconds", o->generation_seconds,
                   "seconds of forward passes between a save and the optimizer step that follows")
      ->check(CLI::PositiveNumber);
  verb->add_option("--staging-gib", o->staging_gib, "checkpointing.staging_gib")->check(CLI::NonNegativeNumber);
  verb->add_option("--disk-rate", o->disk_gigabytes_per_second,
                   "simulate a disk of this many GB/s per rank: weights and state are not kept")
      ->check(CLI::PositiveNumber);
  verb->add_option("--gradient-dtype", o->gradient_dtype)->check(CLI::IsMember({"float32", "bfloat16"}));
  auto timeout_s = add_timeout(verb);
  verb->callback([=, &context] {
    context.run = [=] {
      return on_ranks(o->common, *timeout_s,
                      [&](ParallelContext& ranks) { bench::bench_checkpoint(*o, ranks, std::cout); });
    };
  });
}

void add_exchange(CLI::App& bench, CommandContext& context) {
  auto o = std::make_shared<bench::ExchangeBenchOptions>();
  CLI::App* verb = bench.add_subcommand(
      "exchange", "exchanges between tensor parallel ranks: times, and whether the bits are right");
  add_common(verb, o->common, context);
  add_tensor(verb, o->common);
  verb->add_option("--rows", o->rows, "tokens of a decode step, e.g. 16,64,256")->delimiter(',');
  verb->add_option("--large-mib", o->large_mebibytes, "MiB of a training exchange")->check(CLI::PositiveNumber);
  auto timeout_s = add_timeout(verb);
  verb->callback([=, &context] {
    context.run = [=] {
      return on_ranks(o->common, *timeout_s,
                      [&](ParallelContext& ranks) { bench::bench_exchange(*o, ranks, std::cout); });
    };
  });
}

void add_refit(CLI::App& bench, CommandContext& context) {
  auto o = std::make_shared<bench::RefitBenchOptions>();
  CLI::App* verb = bench.add_subcommand(
      "refit", "weight transfer to engines in other processes, in a layout of each side; under launch");
  add_common(verb, o->common, context);
  const auto size = [&](const char* option, int64_t& value, const char* meaning) {
    verb->add_option(option, value, meaning)->check(CLI::PositiveNumber);
  };
  size("--actors", o->actors, "how many ranks train, the first ones (default: as few as hold the weights)");
  size("--tp", o->training.tp, "tensor parallel size of training");
  size("--pp", o->training.pp, "pipeline stages of training");
  size("--ep", o->training.ep, "expert parallel size of training");
  size("--engine-tp", o->engine.tp, "ranks of an engine, which share its tensors");
  size("--engine-ep", o->engine.ep, "of these, that share its experts (default: each has all)");
  verb->add_flag("!--no-second-buffer", o->second_buffer,
                 "engines receive into the weights they use, with decoding stopped");
  auto timeout_s = add_timeout(verb);
  verb->callback([=, &context] {
    context.run = [=] {
      const RendezvousOptions rendezvous = rendezvous_from_environment(*timeout_s);
      o->link.store_address = rendezvous.master_address;
      o->link.store_port = rendezvous.master_port;
      o->link.attempt = rendezvous.attempt;
      o->link.deadline = rendezvous.timeout;
      return on_ranks(o->common, *timeout_s, [&](ParallelContext& ranks) { bench::bench_refit(*o, ranks, std::cout); });
    };
  });
}

void add_ops(CLI::App& bench, CommandContext& context) {
  auto o = std::make_shared<bench::OpsBenchOptions>();
  CLI::App* verb = bench.add_subcommand("ops", "single operations of a shape");
  add_common(verb, o->common, context);
  verb->add_option("--rows", o->rows, "rows of the linear layers, e.g. 16,64,256")->delimiter(',');
  verb->add_option("--decode-samples", o->decode_samples)->delimiter(',');
  verb->add_option("--decode-context", o->decode_context);
  verb->add_option("--packed-tokens", o->packed_tokens, "tokens of packed attention");
  verb->callback([o, &context] {
    context.run = [o] {
      set_up(o->common, /*collective=*/false);
      bench::bench_ops(*o, std::cout);
      return 0;
    };
  });
}

}  // namespace

void add_bench_commands(CLI::App& app, CommandContext& context) {
  CLI::App* bench = app.add_subcommand("bench", "measure speed against the device's limits, with random weights");
  bench->require_subcommand(1);
  for (const auto add :
       {add_rollout, add_decode, add_train, add_step, add_checkpoint, add_exchange, add_refit, add_ops})
    add(*bench, context);
}

}  // namespace trireme
