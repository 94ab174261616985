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
  if (options_.sources.empty() && !options_.path.empty()) options_.sources.push_back({{options_.path}, "", "", 0});
  if (options_.sources.empty()) fail_user("no data file is set (data.train.data_path)");
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
  dataset->open_files();
  dataset->choose_split();
  const size_t files = dataset->parts_.size();
  log_info("data", dataset->name() + (files > 1 ? " and " + plural(static_cast<int64_t>(files) - 1, "file") : "") +
                       ": " + plural(dataset->rows_, "row") + ", " + plural(dataset->size_, "row") + " in split " +
                       split_name(options.split) + ", input \"" + dataset->schema().input_key + "\", output \"" +
                       dataset->schema().output_key + "\"" +
                       (dataset->bad_rows() > 0 ? ", " + plural(dataset->bad_rows(), "bad row") + " skipped" : ""));
  return dataset;
}

std::string Dataset::name() const { return parts_.empty() ? options_.path : parts_.front().file->path().string(); }

int64_t Dataset::bad_rows() const {
  int64_t bad = 0;
  for (const Part& part : parts_) bad += part.file->bad_rows();
  return bad;
}

std::vector<double> Dataset::weights() const {
  std::vector<double> weights;
  for (const DataSource& source : options_.sources) {
    if (source.weight > 0) weights.push_back(source.weight);
  }
  if (weights.empty()) return weights;
  if (weights.size() != options_.sources.size())
    fail_user("data: some sources of a mixture have a weight and others have none; give all of them one, above 0");
  return weights;
}

void Dataset::open_files() {
  weights();  // refuses what cannot be mixed before anything is read
  schemas_.resize(options_.sources.size());
  for (size_t source = 0; source < options_.sources.size(); ++source) {
    TRIREME_CHECK(!options_.sources[source].files.empty(), "a source without files");
    for (const std::string& path : options_.sources[source].files) open_file(path, source);
  }
}

// All that checking a row depends on, the file apart.
std::string Dataset::shared_as(size_t source) const {
  if (options_.shared_as.empty()) return "";
  const DataSource& from = options_.sources[source];
  return json{options_.shared_as,
              from.input_key,
              from.output_key,
              from.system_key,
              options_.input_key,
              options_.output_key,
              options_.system_key,
              options_.completions,
              options_.apply_chat_template,
              options_.add_generation_prompt,
              system_prompt_,
              prompt_before_,
              prompt_after_,
              options_.chat_template_kwargs.dump()}
      .dump();
}

void Dataset::open_file(const std::string& path, size_t source) {
  const DataSource& from = options_.sources[source];
  const bool own_keys = !from.input_key.empty() || !from.output_key.empty();
  const std::string& system_key = own_keys ? from.system_key : options_.system_key;
  RowSchema schema;
  bool schema_known = false;
  bool rendered_one = false;
  RowFile::Reader reader;
  reader.check = [&](std::string_view line) {
    const ordered_json object = parse_json_object(line);
    if (!schema_known) {
      schema = detect_schema(object, own_keys ? from.input_key : options_.input_key,
                             own_keys ? from.output_key : options_.output_key);
      schema.require_output = options_.completions;
      schema.system_key = system_key;
      schema_known = true;
    }
    const Row row = parse_row(object, schema);
    // Text prompts render alike; conversations may break the template's own rules.
    if (!row.messages.is_null() || !rendered_one) {
      std::vector<Segment> completion;
      render(row, options_.completions ? &completion : nullptr);
      rendered_one = true;
    }
  };
  reader.facts = [&] { return json{schema.input_key, schema.output_key}; };
  RowFile::Options options;
  options.format = options_.format;
  options.scratch_dir = options_.scratch_dir;
  options.max_bad_rows = options_.max_bad_lines - bad_rows();
  options.shared_as = shared_as(source);
  Part part{std::make_unique<RowFile>(path, options, reader), source, rows_, 0};
  if (!parts_.empty()) part.first_row = parts_.back().first_row + parts_.back().file->file_rows();
  const RowSchema found{part.file->facts().at(0).get<std::string>(), part.file->facts().at(1).get<std::string>(),
                        options_.completions, system_key};
  const bool first_of_source = parts_.empty() || parts_.back().source != source;
  if (!first_of_source &&
      (found.input_key != schemas_[source].input_key || found.output_key != schemas_[source].output_key)) {
    fail_user(path + " has the columns \"" + found.input_key + "\" and \"" + found.output_key + "\", " +
              from.files.front() + " has \"" + schemas_[source].input_key + "\" and \"" + schemas_[source].output_key +
              "\": name input_key and output_key, or mix them as two sources "
              "(data.train.mixture)");
  }
  schemas_[source] = found;
  rows_ += part.file->size();
  parts_.push_back(std::move(part));
}

void Dataset::choose_split() {
  const int64_t rows = rows_;
  TRIREME_CHECK(options_.repeat >= 1 && (options_.repeat == 1 || weights().empty()),
                "rows of sources with weights come by these, not by repeats");
  const double wanted = options_.split_validation_size;
  if (!(wanted >= 0)) fail_user("split_validation_size must not be negative");
  if (wanted > 0) {
    const auto count = static_cast<int64_t>(wanted < 1 ? std::ceil(wanted * static_cast<double>(rows)) : wanted);
    if (count >= rows) {
      fail_user("split_validation_size " + format_double(wanted) + " holds out " + std::to_string(count) + " of the " +
                plural(rows, "row") + " of " + name() + ": nothing is left to train on");
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
  once_ = size_;
  size_ *= options_.repeat;
  if (size_ == 0)
    fail_user("the " + std::string(split_name(options_.split)) + " split of " + name() +
              " has no rows: set split_validation_size");
  source_sizes_.assign(options_.sources.size(), 0);
  for (const Part& part : parts_) {
    const auto below = [&](int64_t row) {
      return std::lower_bound(held_out_.begin(), held_out_.end(), row) - held_out_.begin();
    };
    const int64_t held_here = below(part.first + part.file->size()) - below(part.first);
    source_sizes_[part.source] += options_.split == DataOptions::Split::kValidation ? held_here
                                  : options_.split == DataOptions::Split::kTrain    ? part.file->size() - held_here
                                                                                    : part.file->size();
  }
}

const std::string& Dataset::system_of(const Row& row) const { return row.system.empty() ? system_prompt_ : row.system; }

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
  if (!system_of(row).empty() && messages.front()["role"] != "system") {
    messages.insert(messages.begin(), ordered_json{{"role", "system"}, {"content", system_of(row)}});
  }
  return messages;
}

std::string Dataset::raw_prompt(const Row& row) const {
  if (!row.messages.is_null())
    fail_user(name() + " holds conversations, which need the chat template: set data.apply_chat_template=true");
  return (system_of(row).empty() ? "" : system_of(row) + "\n\n") + prompt_before_ + row.problem + prompt_after_;
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

  messages.push_back(row.response.is_null() ? ordered_json{{"role", "assistant"}, {"content", row.output}}
                                            : row.response);
  std::vector<size_t> responses;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i]["role"] == "assistant" && i > 0) responses.push_back(i);
  }
  const auto render_first = [&](size_t count, bool generate) {
    const ordered_json part(messages.begin(), messages.begin() + static_cast<std::ptrdiff_t>(count));
    return tokenizer_->render_chat_ordered(part, generate, extra);
  };
  const auto has_header = [&](size_t at) {
    return options_.add_generation_prompt && (messages[at - 1]["role"] == "user" || messages[at - 1]["role"] == "tool");
  };
  // Every response is learnt where the conversation up to it is a beginning of the whole. Templates that rewrite
  // earlier turns (Qwen3 drops old reasoning) leave only the last response.
  for (const bool all_responses : {true, false}) {
    completion->clear();
    std::string prompt;
    std::string so_far;
    bool grows = true;
    for (const size_t at : all_responses ? responses : std::vector<size_t>{responses.back()}) {
      const std::string before = render_first(at, has_header(at));
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
    if (responses.size() == 1) break;
    if (all_responses && !warned_last_response_.exchange(true)) {
      log_warn(
          "data",
          name() +
              ": the chat template rewrites earlier turns, so only the last response of such conversations is learnt");
    }
  }
  fail_data(
      "the chat template does not render the prompt as the beginning of prompt and response, so the response cannot be "
      "told apart");
}

std::optional<PromptExample> Dataset::example(int64_t i) const {
  TRIREME_CHECK(i >= 0 && i < size_, "example " + std::to_string(i) + " of " + std::to_string(size_));
  const int64_t row_of_split = i % once_;
  int64_t position = row_of_split;
  if (options_.split == DataOptions::Split::kTrain) position = nth_outside(held_out_, row_of_split);
  if (options_.split == DataOptions::Split::kValidation) position = held_out_[static_cast<size_t>(row_of_split)];
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), position,
                                      [](int64_t p, const Part& part) { return p < part.first; });
  const Part& part = *(after - 1);
  const int64_t file_row = part.file->file_row(position - part.first);
  try {
    Row row = parse_row(parse_json_object(part.file->line(position - part.first)), schemas_[part.source]);
    row.index = part.first_row + file_row;
    return tokenize(std::move(row), part.file->where(file_row));
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kIo) throw;
    throw Error(e.kind(), part.file->where(file_row) + ": " + e.what());
  }
}

std::optional<PromptExample> Dataset::tokenize(Row row, const std::string& where) const {
  PromptExample example;
  std::vector<Segment> completion;
  example.index = row.index;
  example.prompt_text = render(row, options_.completions ? &completion : nullptr);
  if (options_.completions && options_.apply_chat_template && options_.add_bos) add_bos(&example.prompt_text);
  // A prompt to generate from has the BOS that its chat template writes; a raw one gets what the tokenizer adds.
  example.prompt = tokenizer_->encode(example.prompt_text, !options_.apply_chat_template);
  if (example.prompt.empty()) fail_data("the prompt has no tokens");
  if (options_.completions) tokenize_completion(std::move(completion), &example);
  const int64_t length = static_cast<int64_t>(example.prompt.size() + example.response.size());
  const int64_t prompt = static_cast<int64_t>(example.prompt.size());
  const bool fills = options_.max_total_length > 0 && prompt >= options_.max_total_length;
  if (fills || (options_.max_input_seq_length > 0 && length > options_.max_input_seq_length)) {
    const std::string reason =
        fills ? "the prompt has " + std::to_string(prompt) +
                    " tokens, which leaves none for a response in policy.max_total_sequence_length=" +
                    std::to_string(options_.max_total_length)
              : "the prompt" + std::string(options_.completions ? " with its response" : "") + " has " +
                    std::to_string(length) +
                    " tokens, more than data.max_input_seq_length=" + std::to_string(options_.max_input_seq_length);
    if (options_.fail_on_long_prompt) fail_data(reason);
    log_debug("data", "skipped " + where + ": " + reason);
    return std::nullopt;
  }
  example.gold = std::move(row.gold);
  example.extra = std::move(row.extra);
  return example;
}

void Dataset::add_bos(std::string* text) const {
  const std::string bos = tokenizer_->bos_token();
  if (!starts_with(*text, bos)) text->insert(0, bos);
}

void Dataset::tokenize_completion(std::vector<Segment> segments, PromptExample* example) const {
  std::string& last = segments.back().text;
  const std::string text = last.substr(0, last.find_last_not_of('\n') + 1);
  if (options_.drop_line_feeds) last = text;
  for (const Segment& segment : segments) {
    const std::vector<int32_t> ids = tokenizer_->encode(segment.text);
    example->response.insert(example->response.end(), ids.begin(), ids.end());
    example->response_mask.insert(example->response_mask.end(), ids.size(), segment.learn ? 1 : 0);
  }
  if (!options_.add_eos) return;
  const std::optional<std::string> end = tokenizer_->id_to_token(tokenizer_->eos_id());
  if (end && ends_with(text, *end)) return;
  example->response.push_back(tokenizer_->eos_id());
  example->response_mask.push_back(1);
}

json Dataset::identity() const {
  int64_t bytes = 0;
  for (const Part& part : parts_) bytes += part.file->bytes();
  json identity = {{"rows", rows_},
                   {"bytes", bytes},
                   {"split", split_name(options_.split)},
                   {"held_out", held_out_.size()},
                   {"split_seed", held_out_.empty() ? 0 : options_.split_seed},
                   {"shuffle", options_.shuffle},
                   {"seed", options_.shuffle ? options_.seed : 0}};
  if (const auto mixed = weights(); !mixed.empty()) identity["weights"] = mixed;
  if (options_.repeat > 1) identity["repeat"] = options_.repeat;
  return identity;
}

}  // namespace trireme
