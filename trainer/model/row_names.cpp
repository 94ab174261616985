#include "trainer/model/row_names.h"

#include <algorithm>

#include "base/error.h"

namespace trireme {

std::string name_of_token(const SequenceName& sequence, int64_t position) {
  const std::string prompt = "prompt " + std::to_string(sequence.group);
  if (sequence.response < 0) return "token " + std::to_string(position) + " of " + prompt;
  const std::string response = "response " + std::to_string(sequence.response) + " to " + prompt;
  if (position < sequence.prompt) return "token " + std::to_string(position) + " of the prompt of " + response;
  return "token " + std::to_string(position - sequence.prompt) + " of " + response;
}

size_t sequence_of_row(const std::vector<int64_t>& starts, int64_t row) {
  TRIREME_CHECK(starts.size() > 1 && row >= starts.front(), "a row of no sequence");
  const auto after = std::upper_bound(starts.begin(), starts.end() - 1, row);
  return static_cast<size_t>(after - starts.begin()) - 1;
}

}  // namespace trireme
