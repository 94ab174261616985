// DatasetTest: a folder of its own, a byte tokenizer, and rows to write into it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fs.h"
#include "trainer/data/dataset.h"

namespace trireme {

class DatasetTest : public testing::Test {
 protected:
  DatasetTest() {
    make_byte_tokenizer(dir_.path() / "model");
    tokenizer_ = Tokenizer::load(dir_.path() / "model");
  }

  std::string write(const std::string& name, const std::string& text) const {
    write_file_atomic(dir_.path() / name, text);
    return (dir_.path() / name).string();
  }
  // Rows 0..count-1 with input "q<i>" and output "<i>".
  static std::string rows(int count) {
    std::string text;
    for (int i = 0; i < count; ++i)
      text += nlohmann::json{{"input", "q" + std::to_string(i)}, {"output", std::to_string(i)}}.dump() + "\n";
    return text;
  }
  DataOptions raw(const std::string& path) const {
    DataOptions options;
    options.path = path;
    options.apply_chat_template = false;
    options.shuffle = false;
    return options;
  }
  std::string open_error(const DataOptions& options) const {
    try {
      Dataset::open(options, tokenizer_);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  std::vector<int64_t> indices(PromptStream* stream, int64_t count) const {
    std::vector<int64_t> out;
    for (const PromptExample& example : stream->take(count)) out.push_back(example.index);
    return out;
  }

  // What the loss counts.
  std::string learnt_text(const PromptExample& example) const {
    std::vector<int32_t> learnt;
    for (size_t i = 0; i < example.response.size(); ++i) {
      if (example.response_mask[i] != 0) learnt.push_back(example.response[i]);
    }
    return tokenizer_->decode(learnt, false);
  }

  TemporaryDirectory dir_;
  std::shared_ptr<const Tokenizer> tokenizer_;
};

}  // namespace trireme
