#include "base/error.h"
#include "trainer/data/dataset.h"

namespace trireme {

using nlohmann::json;

PromptStream::PromptStream(std::shared_ptr<const Dataset> dataset) : dataset_(std::move(dataset)), order_(0, 0) {
  start_epoch(0);
}

PromptStream::PromptStream(const DataOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
    : PromptStream(Dataset::open(options, std::move(tokenizer))) {}

void PromptStream::start_epoch(int64_t epoch) {
  epoch_ = epoch;
  position_ = 0;
  order_ = Permutation(size(),
                       Permutation::key(static_cast<uint64_t>(dataset_->options().seed), static_cast<uint64_t>(epoch)));
}

std::optional<PromptExample> PromptStream::advance() {
  const int64_t i = dataset_->options().shuffle ? order_(position_) : position_;
  std::optional<PromptExample> example = dataset_->example(i);
  ++position_;
  if (!example) ++skipped_long_;
  return example;
}

PromptExample PromptStream::next() {
  for (int64_t tried = 0; tried < size(); ++tried) {
    if (epoch_done()) start_epoch(epoch_ + 1);
    if (auto example = advance()) return std::move(*example);
  }
  const DataOptions& options = dataset_->options();
  fail_user("none of the " + std::to_string(size()) + " prompts of " + options.path +
            " fits in data.max_input_seq_length=" + std::to_string(options.max_input_seq_length) + " tokens");
}

std::vector<PromptExample> PromptStream::take(int64_t count) {
  std::vector<PromptExample> examples;
  for (int64_t i = 0; i < count; ++i) examples.push_back(next());
  return examples;
}

std::optional<PromptExample> PromptStream::next_in_epoch() {
  while (!epoch_done()) {
    if (auto example = advance()) return example;
  }
  start_epoch(epoch_ + 1);
  return std::nullopt;
}

json PromptStream::state() const {
  return {{"version", 1},
          {"epoch", epoch_},
          {"position", position_},
          {"skipped_long", skipped_long_},
          {"data", dataset_->identity()}};
}

void PromptStream::restore(const json& state) {
  const auto number = [&](const char* key) {
    const auto it = state.find(key);
    if (it == state.end() || !it->is_number_integer() || it->get<int64_t>() < 0)
      fail_data(std::string("the saved data position has no valid \"") + key + "\"");
    return it->get<int64_t>();
  };
  if (!state.is_object() || number("version") != 1)
    fail_data("the saved data position has a version this program does not know");
  const json mine = dataset_->identity();
  const json saved = state.value("data", json::object());
  for (const auto& [key, value] : mine.items()) {
    const json other = saved.value(key, json());
    if (other != value) {
      fail_user("the checkpoint's data position is of other data than " + dataset_->options().path + ": " + key +
                " was " + other.dump() + ", is " + value.dump());
    }
  }
  const int64_t position = number("position");
  if (position > size())
    fail_data("the saved data position " + std::to_string(position) + " is beyond the " + std::to_string(size()) +
              " rows");
  const int64_t skipped = number("skipped_long");
  start_epoch(number("epoch"));
  position_ = position;
  skipped_long_ = skipped;
}

}  // namespace trireme
