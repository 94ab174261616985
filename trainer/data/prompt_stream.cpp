#include <limits>
#include <set>

#include "base/error.h"
#include "trainer/data/dataset.h"

namespace trireme {

using nlohmann::json;

PromptStream::PromptStream(std::shared_ptr<const Dataset> dataset) : dataset_(std::move(dataset)), order_(0, 0) {
  // Held-out rows are each seen once.
  const bool mixes = dataset_->options().split != DataOptions::Split::kValidation;
  const std::vector<double> weights = mixes ? dataset_->weights() : std::vector<double>{};
  double sum = 0;
  for (const double weight : weights) sum += weight;
  int64_t first = 0;
  for (size_t k = 0; k < weights.size(); ++k) {
    const int64_t rows = dataset_->source_sizes()[k];
    if (rows == 0) fail_user("data: source " + std::to_string(k + 1) + " of the mixture has no row in this split");
    draws_.push_back({weights[k] / sum, first, rows, 0, Permutation(0, 0), -1});
    first += rows;
  }
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

int64_t PromptStream::example_at_position() {
  const DataOptions& options = dataset_->options();
  if (draws_.empty()) return options.shuffle ? order_(position_) : position_;
  // Draws are whole numbers and shares are fixed, so every rank and every resumed run chooses alike.
  const auto total = static_cast<double>(epoch_ * size() + position_ + 1);
  size_t chosen = 0;
  double most = -1e300;
  for (size_t k = 0; k < draws_.size(); ++k) {
    const double behind = draws_[k].share * total - static_cast<double>(draws_[k].count);
    if (behind > most) most = behind, chosen = k;
  }
  Draws& from = draws_[chosen];
  const int64_t round = from.count / from.size, at = from.count % from.size;
  ++from.count;
  if (round != from.round) {
    from.round = round;
    const uint64_t seed = Permutation::key(static_cast<uint64_t>(options.seed), 0x3117 + chosen);
    from.order = Permutation(from.size, Permutation::key(seed, static_cast<uint64_t>(round)));
  }
  return from.first + (options.shuffle ? from.order(at) : at);
}

std::optional<PromptExample> PromptStream::advance() {
  const int64_t i = example_at_position();
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
  fail_user("none of the " + std::to_string(size()) + " prompts of " + dataset_->name() +
            " fits in data.max_input_seq_length=" + std::to_string(options.max_input_seq_length) +
            " tokens and leaves room for a response");
}

int64_t PromptStream::rows_of_epochs(int64_t epochs, int64_t batch) const {
  const int64_t of_one = batch <= size() ? size() / batch * batch : size();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return epochs > kMost / of_one ? kMost : epochs * of_one;
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
  json state = {{"version", 1},
                {"epoch", epoch_},
                {"position", position_},
                {"skipped_long", skipped_long_},
                {"data", dataset_->identity()}};
  for (const Draws& from : draws_) state["draws"].push_back(from.count);
  return state;
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
  std::set<std::string> keys;  // a mixture's weights are in one of them only where the other is none
  for (const json* one : {&mine, &saved}) {
    for (const auto& [key, unused] : one->items()) keys.insert(key);
  }
  for (const std::string& key : keys) {
    const json was = saved.value(key, json()), is = mine.value(key, json());
    if (was != is) {
      fail_user("the checkpoint's data position is of other data than " + dataset_->name() + ": " + key + " was " +
                was.dump() + ", is " + is.dump());
    }
  }
  const int64_t position = number("position");
  if (position > size())
    fail_data("the saved data position " + std::to_string(position) + " is beyond the " + std::to_string(size()) +
              " rows");
  const int64_t skipped = number("skipped_long");
  const int64_t epoch = number("epoch");
  int64_t drawn = 0;
  for (size_t k = 0; k < draws_.size(); ++k) {
    const json counts = state.value("draws", json::array());
    if (counts.size() != draws_.size() || !counts[k].is_number_integer())
      fail_data("the saved data position has no valid \"draws\"");
    draws_[k].count = counts[k].get<int64_t>();
    drawn += draws_[k].count;
  }
  if (!draws_.empty() && drawn != epoch * size() + position)
    fail_data("the saved data position has \"draws\" that do not add up to its position");
  start_epoch(epoch);
  position_ = position;
  skipped_long_ = skipped;
}

}  // namespace trireme
