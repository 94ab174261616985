// How fields_*.cpp write the table of keys, a line each. Internal to them and fields.cpp, which joins their sections in
// the order of the page.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "trainer/config/fields.h"

namespace trireme::config {

FieldRef reference(auto& member) { return &member; }
FieldRef reference(Named auto& member) { return ChoiceRef(&member); }

#define KEY(member) add(table, #member, [](Config& c) { return reference(c.member); })
#define OURS(member) \
  add(               \
      table, #member, [](Config& c) { return reference(c.member); }, true)
// Keys of grpo that ppo has too, those of steps that overlap by another name, and of policy that value has too.
#define ROLLOUT(member) add_rollout(table, #member, [](RolloutConfig& c) { return reference(c.member); })
#define OUR_ROLLOUT(member) \
  add_rollout(              \
      table, #member, [](RolloutConfig& c) { return reference(c.member); }, true)
#define ASYNC(member) add_async_key(table, #member, [](AsyncGrpoConfig& c) { return reference(c.member); })
#define OUR_ASYNC(member) \
  add_async_key(          \
      table, #member, [](AsyncGrpoConfig& c) { return reference(c.member); }, true)
#define MODEL(member) add_model(table, #member, [](ModelTrainingConfig& c) { return reference(c.member); })
#define OUR_MODEL(member) \
  add_model(              \
      table, #member, [](ModelTrainingConfig& c) { return reference(c.member); }, true)

// A new line of the table, until it has its words.
struct Entry {
  Field* field;
  Field& operator()(const char* doc) const {
    field->doc = doc;
    return *field;
  }
};

// `ours`: not a NeMo-RL key.
Entry add(std::vector<Field>& table, const std::string& path, std::function<FieldRef(Config&)> get, bool ours = false);
// grpo.NAME; add_ppo gives ppo the same key.
Entry add_rollout(std::vector<Field>& table, const std::string& name, FieldRef (*get)(RolloutConfig&),
                  bool ours = false);
// grpo.async_grpo.NAME; add_ppo gives ppo.async_ppo the same key.
Entry add_async_key(std::vector<Field>& table, const std::string& name, FieldRef (*get)(AsyncGrpoConfig&),
                    bool ours = false);
// policy.NAME; add_value gives value the same key.
Entry add_model(std::vector<Field>& table, const std::string& name, FieldRef (*get)(ModelTrainingConfig&),
                bool ours = false);
// The same key of another section, by the same words.
Field twin_of(const Field& field, const std::string& from, const std::string& to, std::function<FieldRef(Config&)> get);

// fields_algorithm.cpp
void add_grpo(std::vector<Field>& table);
void add_async(std::vector<Field>& table);
void add_ppo(std::vector<Field>& table);  // behind the sections that add_rollout and add_async_key have filled
void add_sft(std::vector<Field>& table);
void add_loss(std::vector<Field>& table);
void add_value_loss(std::vector<Field>& table);
// fields_model.cpp
void add_policy(std::vector<Field>& table);
void add_batching(std::vector<Field>& table);
void add_optimizer(std::vector<Field>& table);
void add_generation(std::vector<Field>& table);
void add_value(std::vector<Field>& table);  // behind the sections that add_model has filled
// fields_backends.cpp
void add_megatron(std::vector<Field>& table);
void add_megatron_optimizer(std::vector<Field>& table);
void add_dtensor(std::vector<Field>& table);
// fields_data.cpp
void add_data(std::vector<Field>& table);
void add_env(std::vector<Field>& table);
// fields_run.cpp
void add_logger(std::vector<Field>& table);
void add_checkpointing(std::vector<Field>& table);
void add_cluster(std::vector<Field>& table);

}  // namespace trireme::config
