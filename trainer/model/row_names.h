// Whose a row of a pass is, for messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// A sequence of tokens: a prompt with a response to it, or a prompt that several responses share.
struct SequenceName {
  int64_t group = 0;
  int64_t response = -1;  // in the group; -1: a prompt that several share
  int64_t prompt = 0;     // its tokens
};

// "token 3 of response 1 to prompt 7", of token `position` of the sequence; both count from 0.
std::string name_of_token(const SequenceName& sequence, int64_t position);

// The sequence that has the row, of sequences that begin at `starts` [sequences + 1]; the last one where rows go on.
size_t sequence_of_row(const std::vector<int64_t>& starts, int64_t row);

}  // namespace trireme
