// EngineRank: what every rank of an engine has, the leader and its followers (engine_group.h): the model or its part of
// it, the tokenizer, and where weights come to.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trainer/algorithms/engine_group.h"
#include "trainer/algorithms/engine_process.h"
#include "trainer/model/weight_parts.h"
#include "trainer/parallel/weight_link.h"

namespace trireme {

class EngineRank final {
 public:
  // Collective. Waits for the actor, meets the other ranks, makes the model. Config and options outlive it. Throws
  // Error(kUser) for what of the configuration cannot be.
  EngineRank(const Config& config, const EngineProcessOptions& options);

  const Config& config() const { return config_; }
  const EngineProcessOptions& options() const { return options_; }
  const std::filesystem::path& model_dir() const { return model_dir_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  Model& model() { return *model_; }
  EngineGroup& group() { return *group_; }
  const std::string& ticket() const { return ticket_; }  // of the work server
  const std::string& url() const { return url_; }
  const std::string& probe() const { return probe_; }  // parse_probe

  // Where weights of engine `engine` come to. With a second buffer on all ranks, or on none. Collective.
  void make_receiver(int64_t engine, const std::function<void(int64_t bytes)>& on_bytes);
  WeightReceiver* receiver() { return receiver_.get(); }  // null: not made yet
  // What comes to this rank of that engine. One thread.
  const std::vector<WeightPart>& parts(int64_t engine);
  // On the thread that will own it; `threads` of the CPU it computes with.
  std::unique_ptr<Engine> make_engine(int threads) const;
  // A GPU is the current one of a thread.
  void use_device() const;

 private:
  void find_actor();
  void make_model();

  const Config& config_;
  const EngineProcessOptions& options_;
  const std::filesystem::path model_dir_;
  const ModelConfig description_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  std::string url_, ticket_, probe_;
  Layout actors_;
  std::unique_ptr<EngineGroup> group_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<WeightParts> sources_;
  std::unique_ptr<WeightReceiver> receiver_;
  int64_t parts_of_ = -1;
  std::vector<WeightPart> parts_;
};

}  // namespace trireme
