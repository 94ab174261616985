// Dataset and PromptStream: rows of a JSONL or Parquet file as tokenised prompts, in a reproducible endless order.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "trainer/data/permutation.h"
#include "trainer/data/row.h"
#include "trainer/data/row_file.h"
#include "trainer/options/data.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {

// Files whose rows have one layout, one after the other.
struct DataSource {
  std::vector<std::string> files;
  std::string input_key, output_key;  // as in DataOptions; both empty: those, and its system_key
  double weight = 0;                  // share of a stream's prompts; 0 for all sources: in proportion to their rows
  std::string system_key;             // beside these keys
};

struct DataOptions : RowLayout, PromptOptions {
  std::string path;                  // one file: JSON lines or a JSON array, plain, gzip or zstd; Parquet
  std::vector<DataSource> sources;   // instead of `path`
  int64_t max_total_length = 0;      // tokens of prompt and response, 0: no limit; a prompt that fills it is too long
  double split_validation_size = 0;  // rows held out: a share when < 1, a number of rows when >= 1
  int64_t repeat = 1;                // times that the split's rows follow each other; not of sources with weights
  int64_t split_seed = 42;           // of the choice of held-out rows
  enum class Split { kAll, kTrain, kValidation } split = Split::kAll;
  nlohmann::json chat_template_kwargs = nlohmann::json::object();
  bool completions = false;           // SFT: fill response and response_mask from the output
  std::filesystem::path scratch_dir;  // for indexes and unpacked copies; empty: the system's
  std::string
      shared_as;  // names the tokenizer: processes of a node with the same one share indexes; empty: they do not
};

struct PromptExample {
  int64_t index = 0;  // row in the file (line - 1), rows of the files before it counted
  std::string prompt_text;
  std::vector<int32_t> prompt;
  std::string gold;      // what is right, to grade against; after "####" when the output's last line starts so
  nlohmann::json extra;  // the row's other columns
  // SFT only: the tokens after the prompt, up to the end of the conversation, and 1 where the loss counts (0: user
  // turns in a conversation of several turns).
  std::vector<int32_t> response;
  std::vector<uint8_t> response_mask;
};

// Indexed files with their split. Rows stay on disk; memory is 8 bytes a row. Thread-safe.
class Dataset final {
 public:
  // Each file is read whole once a node: every row is checked (conversations are rendered too), so that a mistake shows
  // before the first step and size() counts valid rows only. Throws Error naming file, line and reason.
  static std::shared_ptr<const Dataset> open(const DataOptions& options, std::shared_ptr<const Tokenizer> tokenizer);

  int64_t size() const { return size_; }  // rows of the split, repeats counted
  // Example `i` of the split, 0 <= i < size(), in the file's order; nothing when its prompt is longer than the limit.
  std::optional<PromptExample> example(int64_t i) const;

  const DataOptions& options() const { return options_; }
  const RowSchema& schema() const { return schemas_.front(); }
  int64_t bad_rows() const;
  // Examples of the split that belong to each source, which follow each other, repeats not counted, and the sources'
  // weights (empty: none).
  const std::vector<int64_t>& source_sizes() const { return source_sizes_; }
  std::vector<double> weights() const;
  std::string name() const;  // of the first file, for messages
  // What the sequence of rows depends on (size of the file, split, seeds); equal on all ranks and after a resume.
  nlohmann::json identity() const;

 private:
  struct Part {  // a file and its place among all good rows and all rows
    std::unique_ptr<RowFile> file;
    size_t source;
    int64_t first, first_row;
  };
  struct Segment {  // of the text after the prompt
    std::string text;
    bool learn;
  };
  Dataset(const DataOptions& options, std::shared_ptr<const Tokenizer> tokenizer);
  void open_files();
  void open_file(const std::string& path, size_t source);
  std::string shared_as(size_t source) const;
  void choose_split();
  const std::string& system_of(const Row& row) const;  // its own, else that of system_prompt_file
  nlohmann::ordered_json prompt_messages(const Row& row) const;
  std::string raw_prompt(const Row& row) const;
  // Prompt text, and for SFT the text after it: one segment per response and per stretch between them.
  std::string render(const Row& row, std::vector<Segment>* completion) const;
  std::optional<PromptExample> tokenize(Row row, const std::string& where) const;
  void add_bos(std::string* text) const;
  void tokenize_completion(std::vector<Segment> segments, PromptExample* example) const;

  DataOptions options_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string prompt_before_, prompt_after_;  // prompt_file around its "{}"
  std::string system_prompt_;
  std::vector<RowSchema> schemas_;  // of the sources
  std::vector<Part> parts_;
  int64_t rows_ = 0;               // good ones, of all files
  std::vector<int64_t> held_out_;  // rows of the validation split, ascending
  std::vector<int64_t> source_sizes_;
  int64_t once_ = 0, size_ = 0;  // rows of the split, and with repeats
  mutable std::atomic<bool> warned_last_response_{false};
};

// Walks a Dataset for ever, epoch after epoch, each epoch in an order that depends on (seed, epoch) only. Every rank
// that opens it with the same options sees the same sequence; whoever shards takes its share by position. One thread.
// With weights each prompt comes from the source that is furthest behind its share, and each source is walked for ever
// by itself; an epoch is then as many prompts as there are rows.
class PromptStream final {
 public:
  explicit PromptStream(std::shared_ptr<const Dataset> dataset);
  PromptStream(const DataOptions& options, std::shared_ptr<const Tokenizer> tokenizer);

  // The next example whose prompt fits. Throws Error when a whole epoch has none.
  PromptExample next();
  std::vector<PromptExample> take(int64_t count);
  // Like next(), but nothing at the end of the epoch; the call after that begins the next epoch.
  std::optional<PromptExample> next_in_epoch();

  // Of the row that comes next: epochs from 0, and rows of the epoch already used or skipped.
  int64_t epoch() const { return position_ == size() ? epoch_ + 1 : epoch_; }
  int64_t position() const { return position_ == size() ? 0 : position_; }
  int64_t size() const { return dataset_->size(); }
  // Rows used or skipped since the start of the run.
  int64_t drawn() const { return epoch_ * size() + position_; }
  // Of a run of so many epochs and steps of `batch` rows. An epoch counts its whole batches, as in NeMo-RL, or all of
  // its rows where they are fewer than a batch. The largest number where it is above that.
  int64_t rows_of_epochs(int64_t epochs, int64_t batch) const;
  int64_t skipped_long() const { return skipped_long_; }  // since the start of the run, each epoch counted anew
  const Dataset& dataset() const { return *dataset_; }

  // restore(state()) on a stream of the same data continues exactly. restore throws Error when the state belongs to
  // other data, another split or another seed, and names the difference.
  nlohmann::json state() const;
  void restore(const nlohmann::json& state);

 private:
  bool epoch_done() const { return position_ == size(); }
  void start_epoch(int64_t epoch);
  int64_t example_at_position();           // counts a draw
  std::optional<PromptExample> advance();  // the row at position_, or nothing when its prompt is too long

  std::shared_ptr<const Dataset> dataset_;
  Permutation order_;
  int64_t epoch_ = 0;
  int64_t position_ = 0;  // size(): the epoch is done and the next not begun
  int64_t skipped_long_ = 0;
  struct Draws {        // from a source, when there are weights
    double share = 0;   // of all prompts
    int64_t first = 0;  // its first example
    int64_t size = 0;
    int64_t count = 0;  // so far, over all epochs
    Permutation order;  // of its present round
    int64_t round = -1;
  };
  std::vector<Draws> draws_;
};

}  // namespace trireme
