// What an actor's session and a critic on ranks of its own have in common: models, optimizers and checks of a start.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "trainer/algorithms/fit.h"
#include "trainer/algorithms/model_problem.h"
#include "trainer/algorithms/session.h"

namespace trireme {

// The options of config.policy's model on this rank.
ModelOptions policy_options(const Config& config, int local_rank, const ModelConfig& model, ParallelContext& context);
// Of a model that is not trained, on ranks of its own, which are not the policy's: alone a rank has it whole.
ModelOptions untrained_model_options(const Config& config, int local_rank, const ModelConfig& model,
                                     ParallelContext& context);
// The tokenizer of a run whose model is in `model_dir`.
std::shared_ptr<const Tokenizer> load_tokenizer(const Config& config, const std::filesystem::path& hf_home,
                                                const std::filesystem::path& model_dir);
std::unique_ptr<DistributedAdamW> make_optimizer(const Config& config, Model& model, ParallelContext& context);
// Of CUDA a device's, of the host this rank's share.
MemoryLimit memory_of_a_rank(const Config& config, at::Device device);

// What rank 0 tells of its program and settings, and what a rank that was told it says of its own: "has other settings
// than rank 0: ..."; nothing where they agree.
std::string own_settings(const Config& config);
std::optional<std::string> settings_problem(const std::string& of_rank0, const Config& own);

// What checkpoints of either role have in common.
CheckpointOptions checkpoint_options(const Config& config, const TrainOptions& options,
                                     const std::filesystem::path& source_dir);
void log_saved(const SavedCheckpoint& saved);

// By which the models of this process are split: the policy in training and in generation, and a critic on the same
// ranks.
std::vector<Layout> layouts_of_models(const Config& config, const Layout& layout, const RendezvousOptions& ranks);
// `config` itself; a critic's ranks without a critic, or a device that cannot run this is refused before tokenizer,
// rendezvous and weights.
const Config& with_its_device(const Config& config, const TrainOptions& options);
// The first collective on the device makes NCCL choose what carries its traffic between nodes, which is logged. Where
// it must be RDMA and NCCL cannot go over it, the error says where, and what to do. Where a rank's log says that NCCL
// took sockets instead, that rank throws Error(kUnavailable). Collective; whether a rank has a log to read is its
// environment's matter, so that all agree first whether anybody does.
void check_transport(const TransportCheck& check, ParallelContext& context, at::Device device);
// Ranks that share a node: as they were started, else as the configuration says.
int64_t ranks_of_node(const Config& config, const RendezvousOptions& ranks);
// Of a model that reads what the policy writes.
void check_vocabulary(const std::string& key, const std::string& dir, const ModelConfig& model,
                      const ModelConfig& policy, const Tokenizer& tokenizer, const std::string& who);

// The critic's configuration and model, before its weights are read: positions, vocabulary and what model_problem says
// of its ranks are checked.
CriticModel find_critic(const Config& config, const ModelConfig& policy, const Tokenizer& tokenizer,
                        const std::filesystem::path& hf_home, const ModelRanks& ranks, bool main);
// Its weights and optimizer on the ranks of `context`, in its own layout, whatever theirs is. Collective.
std::unique_ptr<CriticState> make_critic(const CriticModel& critic, int local_rank, ParallelContext& context);
// Of a new run: what ppo.warm_start_value_checkpoint names, if anything.
void warm_start_critic(CriticState& critic, const Config& config, bool main);

}  // namespace trireme
