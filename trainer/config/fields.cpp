#include "trainer/config/fields.h"

#include "base/text.h"
#include "trainer/config/field_table.h"

namespace trireme::config {

Entry add(std::vector<Field>& table, const std::string& path, std::function<FieldRef(Config&)> get, bool ours) {
  Field field;
  field.path = path;
  field.get = std::move(get);
  field.ours = ours;
  Config defaults;
  const FieldRef ref = field.get(defaults);
  if (const auto* choice = std::get_if<ChoiceRef>(&ref))
    field.choices.assign(choice->names.begin(), choice->names.end());
  table.push_back(std::move(field));
  return Entry{&table.back()};
}

Entry add_rollout(std::vector<Field>& table, const std::string& name, FieldRef (*get)(RolloutConfig&), bool ours) {
  const Entry entry = add(
      table, "grpo." + name, [get](Config& c) { return get(c.grpo); }, ours);
  entry.field->of_rollout = get;
  return entry;
}

Entry add_async_key(std::vector<Field>& table, const std::string& name, FieldRef (*get)(AsyncGrpoConfig&), bool ours) {
  const Entry entry = add(
      table, "grpo.async_grpo." + name, [get](Config& c) { return get(c.grpo.async_grpo); }, ours);
  entry.field->of_async = get;
  return entry;
}

Entry add_model(std::vector<Field>& table, const std::string& name, FieldRef (*get)(ModelTrainingConfig&), bool ours) {
  const Entry entry = add(
      table, "policy." + name, [get](Config& c) { return get(c.policy); }, ours);
  entry.field->of_model = get;
  return entry;
}

Field twin_of(const Field& field, const std::string& from, const std::string& to,
              std::function<FieldRef(Config&)> get) {
  Field twin = field;
  twin.path = to + field.path.substr(from.size());
  twin.doc = replace_all(field.doc, from, to);
  twin.derived = replace_all(field.derived, from, to);
  twin.get = std::move(get);
  return twin;
}

const std::vector<Field>& fields() {
  static const std::vector<Field> kFields = [] {
    std::vector<Field> table;
    add(
        table, "algorithm", [](Config& c) -> FieldRef { return &c.algorithm; }, true)(
        "what is run; where no file says it: ppo for a file with a section ppo and none grpo, sft likewise, else grpo")
        .one_of({"grpo", "ppo", "sft"});
    add(
        table, "compatibility", [](Config& c) -> FieldRef { return &c.compatibility; }, true)(
        "the version of NeMo-RL whose defaults the keys of 'Defaults by version' take where the file says nothing")
        .one_of({"v0.3", "main"})
        .from("v0.3 where the file has a key that only v0.3 has (policy.fsdp_offload_enabled), else main");
    // In the order of the page; ppo and value are twins of what stands before them.
    for (const auto add_section :
         {add_grpo, add_async, add_ppo, add_sft, add_loss, add_value_loss, add_policy, add_batching, add_optimizer,
          add_generation, add_megatron, add_megatron_optimizer, add_dtensor, add_value, add_data, add_env, add_logger,
          add_checkpointing, add_cluster}) {
      add_section(table);
    }
    return table;
  }();
  return kFields;
}

const std::vector<AliasKey>& alias_keys() {
  static const std::vector<AliasKey> kKeys = [] {
    std::vector<AliasKey> keys = {
        {"grpo.adv_estimator.normalize_rewards", {"grpo.normalize_rewards"}, true},
        {"grpo.adv_estimator.use_leave_one_out_baseline", {"grpo.use_leave_one_out_baseline"}, true},
        {"policy.generation.background_processors", {"policy.generation.background_sms"}, false, true},
        {"data.train_data_path", {"data.train.data_path"}},
        {"data.val_data_path", {"data.validation.data_path"}},
    };
    // v0.3 has data-set keys directly under data, later versions under data.default: both stand for train and
    // validation alike (validation inherits no path: it would be the training data).
    for (const char* name : {"input_key", "output_key", "prompt_file", "system_prompt_file", "env_name"}) {
      for (const char* from : {"data.", "data.default."}) {
        keys.push_back(
            {std::string(from) + name, {std::string("data.train.") + name, std::string("data.validation.") + name}});
      }
    }
    for (const char* name : {"dataset_name", "split", "split_validation_size"}) {
      for (const char* from : {"data.", "data.default."}) {
        keys.push_back({std::string(from) + name, {std::string("data.train.") + name}});
      }
    }
    keys.push_back({"data.default.data_path", {"data.train.data_path"}});
    return keys;
  }();
  return kKeys;
}

}  // namespace trireme::config
