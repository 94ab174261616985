// Reads GSM8K's own files through the loader and grades its gold answers, and answers next to them, by the math reward.
//   gsm8k_check FOLDER    with train.jsonl and test.jsonl
#include <cstdio>
#include <filesystem>
#include <optional>
#include <string>

#include "base/error.h"
#include "trainer/data/dataset.h"
#include "trainer/rewards/math.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {
namespace {

struct Totals {
  int64_t rows = 0, gold_right = 0, wrong = 0, wrong_taken = 0;
};

std::string without_commas(std::string text) {
  std::erase(text, ',');
  return text;
}

// As the reward does: the answer looked for in a response.
bool right(const std::string& gold, const std::string& answer) {
  const std::optional<std::string> found =
      extract_final_answer("So she has 7 of 12 left, and the answer is \\boxed{" + answer + "}.");
  return found && math_equal(gold, *found);
}

void grade(const std::string& gold, Totals& totals) {
  ++totals.rows;
  totals.gold_right += right(gold, gold) ? 1 : 0;
  const double value = std::stod(without_commas(gold));
  const auto format = [](double x) {
    char text[64];
    std::snprintf(text, sizeof text, "%.10g", x);
    return std::string(text);
  };
  for (const double other : {value + 1, value - 1, value * 10, -value}) {
    if (other == value) continue;  // 0
    ++totals.wrong;
    if (right(gold, format(other))) {
      ++totals.wrong_taken;
      std::printf("taken as right: %s for %s\n", format(other).c_str(), gold.c_str());
    }
  }
}

int run(const std::filesystem::path& folder) {
  const std::filesystem::path scratch = std::filesystem::temp_directory_path() / "trireme-gsm8k-tokenizer";
  make_byte_tokenizer(scratch);
  const auto tokenizer = Tokenizer::load(scratch);
  Totals totals;
  for (const char* name : {"train.jsonl", "test.jsonl"}) {
    DataOptions options;
    options.path = (folder / name).string();
    options.apply_chat_template = false;
    const auto dataset = Dataset::open(options, tokenizer);
    for (int64_t i = 0; i < dataset->size(); ++i) grade(dataset->example(i)->gold, totals);
    std::printf("%s: %lld problems, %lld bad\n", name, static_cast<long long>(dataset->size()),
                static_cast<long long>(dataset->bad_rows()));
  }
  std::filesystem::remove_all(scratch);
  std::printf(
      "%lld problems; gold answers graded right: %lld; wrong answers (+1, -1, x10, sign): %lld, taken as right: %lld\n",
      static_cast<long long>(totals.rows), static_cast<long long>(totals.gold_right),
      static_cast<long long>(totals.wrong), static_cast<long long>(totals.wrong_taken));
  return totals.rows == totals.gold_right && totals.wrong_taken == 0 ? 0 : 1;
}

}  // namespace
}  // namespace trireme

int main(int count, char** values) {
  if (count != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", values[0]);
    return 2;
  }
  try {
    return trireme::run(values[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
