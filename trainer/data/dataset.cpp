#include "trainer/data/dataset.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

std::string plural(int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

const char* split_name(DataOptions::Split split) {
  switch (split) {
    case DataOptions::Split::kTrain:
      return "train";
    case DataOptions::Split::kValidation:
      return "validation";
    default:
      return "all";
  }
}

std::string read_prompt_file(const std::string& path) {
  const std::string text = read_file(path);
  if (!is_valid_utf8(text)) fail_user("prompt file " + path + " is not UTF-8");
  return text;
}

}  // namespace

Dataset::Dataset(const DataOptions& options, std::shared_ptr<const Tokenizer> tokenizer)
    : options_(options), tokenizer_(std::move(tokenizer)) {
  if (options_.path.empty()) fail_user("no data file is set (data.train.data_path)");
  if (options_.input_key.empty() && !options_.output_key.empty()) {
    log_info("data",
             "output_key " + options_.output_key + " without an input_key: the input is found from the first row");
  }
  if (options_.max_bad_lines < 0) fail_user("data.max_bad_lines must not be negative");
  if (!options_.prompt_file.empty()) {
    std::tie(prompt_before_, prompt_after_) =
        parse_prompt_template(read_prompt_file(options_.prompt_file), options_.prompt_file);
  }
  if (!options_.system_prompt_file.empty()) system_prompt_ = read_prompt_file(options_.system_prompt_file);
}

std::shared_ptr<const Dataset> Dataset::open(const DataOptions& options, std::shared_ptr<const Tokenizer> tokenizer) {
  std::shared_ptr<Dataset> dataset(new Dataset(options, std::move(tokenizer)));
  dataset->index_file();
  dataset->choose_split();
  log_info("data", options.path + ": " + plural(dataset->file_->size(), "row") + ", " + plural(dataset->size_, "row") +
                       " in split " + split_name(options.split) + ", input \"" + dataset->schema_.input_key +
                       "\", output \"" + dataset->schema_.output_key + "\"" +
                       (dataset->bad_rows() > 0 ? ", " + plural(dataset->bad_rows(), "bad row") + " skipped" : ""));
  return dataset;
}

void Dataset::index_file() {
  bool schema_known = false;
  bool rendered_one = false;
  const auto check = [&](std::string_view line) {
    const ordered_json object = parse_json_object(line);
    if (!schema_known) {
      try {
        schema_ = detect_schema(object, options_.input_key, options_.output_key);
      } catch (const Error& e) {
        fail_user("data file " + options_.path + ": " + e.what());
      }
      schema_.require_output = options_.completions;
      schema_known = true;
    }
    const Row row = parse_row(object, schema_);
    // A template can refuse a conversation for its roles; a single user message it takes always or never.
    if (!row.messages.is_null() || !rendered_one) {
      std::vector<Segment> completion;
      render(row, options_.completions ? &completion : nullptr);
      rendered_one = true;
    }
  };
  file_ = std::make_unique<RowFile>(
      options_.path, RowFile::Options{options_.format, options_.scratch_dir, options_.max_bad_lines}, check);
}

void Dataset::choose_split() {
  const int64_t rows = file_->size();
  const double wanted = options_.split_validation_size;
  if (!(wanted >= 0)) fail_user("split_validation_size must not be negative");
  if (wanted > 0) {
    const int64_t count =
        wanted < 1 ? std::max<int64_t>(1, std::llround(wanted * static_cast<double>(rows))) : std::llround(wanted);
    if (count >= rows) {
      fail_user("split_validation_size " + format_double(wanted) + " holds out " + std::to_string(count) + " of the " +
                plural(rows, "row") + " of " + options_.path + ": nothing is left to train on");
    }
    const Permutation choice(rows, Permutation::key(static_cast<uint64_t>(options_.split_seed), 0x5eed));
    for (int64_t i = 0; i < count; ++i) held_out_.push_back(choice(i));
    std::sort(held_out_.begin(), held_out_.end());
  }
  const int64_t held = static_cast<int64_t>(held_out_.size());
  switch (options_.split) {
    case DataOptions::Split::kAll:
      size_ = rows;
      break;
    case DataOptions::Split::kTrain:
      size_ = rows - held;
      break;
    case DataOptions::Split::kValidation:
      size_ = held;
      break;
  }
  if (size_ == 0)
    fail_user("the " + std::string(split_name(options_.split)) + " split of " + options_.path +
              " has no rows: set split_validation_size");
}

ordered_json Dataset::prompt_messages(const Row& row) const {
  ordered_json messages = ordered_json::array();
  if (row.messages.is_null()) {
    messages.push_back({{"role", "user"}, {"content", prompt_before_ + row.problem + prompt_after_}});
  } else {
    messages = row.messages;
    if (!options_.prompt_file.empty()) {
      for (auto it = messages.rbegin(); it != messages.rend(); ++it) {
        if ((*it)["role"] != "user") continue;
        (*it)["content"] = prompt_before_ + message_text(*it) + prompt_after_;
        break;
      }
    }
  }
  if (!system_prompt_.empty() && messages.front()["role"] != "system") {
    messages.insert(messages.begin(), ordered_json{{"role", "system"}, {"content", system_prompt_}});
  }
  return messages;
}

std::string Dataset::raw_prompt(const Row& row) const {
  if (!row.messages.is_null())
    fail_user(options_.path + " holds conversations, which need the chat template: set data.apply_chat_template=true");
  return (system_prompt_.empty() ? "" : system_prompt_ + "\n\n") + prompt_before_ + row.problem + prompt_after_;
}

std::string Dataset::render(const Row& row, std::vector<Segment>* completion) const {
  if (!options_.apply_chat_template) {
    if (completion) completion->push_back({row.output, true});
    return raw_prompt(row);
  }
  ordered_json extra = options_.chat_template_kwargs;
  if (!extra.is_object()) extra = ordered_json::object();
  if (!row.tools.is_null()) extra["tools"] = row.tools;
  ordered_json messages = prompt_messages(row);
  if (!completion) return tokenizer_->render_chat_ordered(messages, true, extra);

  messages.push_back(row.answer.is_null() ? ordered_json{{"role", "assistant"}, {"content", row.output}} : row.answer);
  std::vector<size_t> answers;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i]["role"] == "assistant" && i > 0) answers.push_back(i);
  }
  const auto render_first = [&](size_t count, bool generate) {
    const ordered_json part(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(count));
    return tokenizer_->render_chat_ordered(part, generate, extra);
  };
  // Every answer is learnt where the conversation up to it is a beginning of the whole. Templates that rewrite earlier
  // turns (Qwen3 drops old reasoning) leave only the last answer.
  for (const bool all_answers : {true, false}) {
    completion->clear();
    std::string prompt;
    std::string so_far;
    bool grows = true;
    for (const size_t at : all_answers ? answers : std::vector<size_t>{answers.back()}) {
      const std::string before = render_first(at, true);
      const std::string after = render_first(at + 1, false);
      grows = starts_with(before, so_far) && starts_with(after, before);
      if (!grows) break;
      if (so_far.empty()) {
        prompt = before;
      } else {
        completion->push_back({before.substr(so_far.size()), false});
      }
      completion->push_back({after.substr(before.size()), true});
      so_far = after;
    }
    if (grows) return prompt;
    if (answers.size() == 1) break;
    if (all_answers && !warned_last_answer_.exchange(true)) {
      log_warn(
          "data",
          options_.path +
              ": the chat template rewrites earlier turns, so only the last answer of such conversations is learnt");
    }
  }
  fail_data(
      "the chat template does not render the prompt as the beginning of prompt and answer, so the answer cannot be "
      "told apart");
}

std::optional<PromptExample> Dataset::example(int64_t i) const {
  TRIREME_CHECK(i >= 0 && i < size_, "example " + std::to_string(i) + " of " + std::to_string(size_));
  int64_t position = i;
  if (options_.split == DataOptions::Split::kTrain) position = nth_outside(held_out_, i);
  if (options_.split == DataOptions::Split::kValidation) position = held_out_[static_cast<size_t>(i)];
  const int64_t file_row = file_->file_row(position);
  try {
    Row row = parse_row(parse_json_object(file_->line(position)), schema_);
    row.index = file_row;
    return tokenize(std::move(row));
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kIo) throw;
    throw Error(e.kind(), file_->where(file_row) + ": " + e.what());
  }
}

std::optional<PromptExample> Dataset::tokenize(Row row) const {
  PromptExample example;
  std::vector<Segment> completion;
  example.index = row.index;
  example.prompt_text = render(row, options_.completions ? &completion : nullptr);
  // A chat template writes BOS itself; a raw prompt gets what the tokenizer adds.
  example.prompt_ids = tokenizer_->encode(example.prompt_text, !options_.apply_chat_template);
  if (example.prompt_ids.empty()) fail_data("the prompt has no tokens");
  if (options_.completions) tokenize_completion(completion, &example);
  const int64_t length = static_cast<int64_t>(example.prompt_ids.size() + example.completion_ids.size());
  if (options_.max_input_seq_length > 0 && length > options_.max_input_seq_length) {
    const std::string reason =
        "the prompt" + std::string(options_.completions ? " with its answer" : "") + " has " + std::to_string(length) +
        " tokens, more than data.max_input_seq_length=" + std::to_string(options_.max_input_seq_length);
    if (options_.fail_on_long_prompt) fail_data(reason);
    log_debug("data", "skipped " + file_->where(row.index) + ": " + reason);
    return std::nullopt;
  }
  example.gold = std::move(row.gold);
  example.extra = std::move(row.extra);
  return example;
}

void Dataset::tokenize_completion(const std::vector<Segment>& segments, PromptExample* example) const {
  const auto& ends = tokenizer_->eos_ids();
  for (size_t s = 0; s < segments.size(); ++s) {
    std::vector<int32_t> ids = tokenizer_->encode(segments[s].text);
    size_t learnt = segments[s].learn ? ids.size() : 0;
    if (segments[s].learn) {
      // What a template prints after the end token (a line feed) is never generated, so it is not learnt either.
      const auto last_end = std::find_if(
          ids.rbegin(), ids.rend(), [&](int32_t id) { return std::find(ends.begin(), ends.end(), id) != ends.end(); });
      if (last_end != ids.rend()) learnt = static_cast<size_t>(ids.rend() - last_end);
      if (s + 1 == segments.size()) {
        ids.resize(learnt);
        if (last_end == ids.rend() || ids.empty() || std::find(ends.begin(), ends.end(), ids.back()) == ends.end())
          ids.push_back(tokenizer_->eos_id());
        learnt = ids.size();
      }
    }
    example->completion_ids.insert(example->completion_ids.end(), ids.begin(), ids.end());
    example->completion_mask.insert(example->completion_mask.end(), learnt, 1);
    example->completion_mask.insert(example->completion_mask.end(), ids.size() - learnt, 0);
  }
}

json Dataset::identity() const {
  return {{"rows", file_->size()},
          {"bytes", file_->bytes()},
          {"split", split_name(options_.split)},
          {"held_out", held_out_.size()},
          {"split_seed", held_out_.empty() ? 0 : options_.split_seed},
          {"shuffle", options_.shuffle},
          {"seed", options_.shuffle ? options_.seed : 0}};
}

}  // namespace trireme
