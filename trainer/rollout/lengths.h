// Forced lengths of a rollout, for measurements: from a file, or drawn.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

struct RolloutLengths {
  std::string name;              // the file's name or the synthetic description
  std::vector<int64_t> prompts;  // tokens of each prompt
  std::vector<int64_t> outputs;  // tokens of each response; response i belongs to prompt i / samples_per_prompt()

  int64_t samples() const { return static_cast<int64_t>(outputs.size()); }
  int64_t samples_per_prompt() const { return samples() / static_cast<int64_t>(prompts.size()); }
  // Of response `index` to prompt `group`; prompts beyond the last begin again with the first.
  int64_t output_of(int64_t group, int64_t index) const {
    return outputs[static_cast<size_t>(group % static_cast<int64_t>(prompts.size()) * samples_per_prompt() + index)];
  }
  int64_t prompt_of(int64_t sample) const { return prompts[static_cast<size_t>(sample / samples_per_prompt())]; }
  int64_t total_of(int64_t sample) const { return prompt_of(sample) + outputs[static_cast<size_t>(sample)]; }
  int64_t longest() const;        // prompt + response
  int64_t output_tokens() const;  // of all responses
  std::vector<int64_t> prompt_of_each_sample() const;
  // The `part`-th of as many equal runs of prompts, with their responses. Throws Error(kUser) where they do not divide.
  RolloutLengths part(int64_t part, int64_t parts) const;
};

// {"prompt_lengths": [...], "output_lengths": [...], "about": "..."}: positive numbers, as many responses for each
// prompt. Throws Error(kUser) that names `source`, the key and the entry.
RolloutLengths parse_lengths(std::string_view json, const std::string& source);

// "synthetic:PROMPTSxSAMPLES:mean=M[:max=X][:prompt=P][:seed=S]": responses log-normal (sigma 0.8) with mean M within
// half a token cut at X, which the longest has (default 5 M), prompts uniform in 0.6 P .. 1.4 P (default P = 200). With
// max = mean every response has that length and every prompt P. The same text gives the same lengths.
RolloutLengths synthetic_lengths(const std::string& description);

// A description that starts with "synthetic:", or a file.
RolloutLengths load_lengths(const std::string& description_or_file);

// KV cache rows with which nothing is preempted: the longest `max_sequences` samples at once, or this rank's even share
// of all samples if that is less; a quarter more for extents that grow.
int64_t wanted_cache_rows(const RolloutLengths& lengths, int64_t max_sequences, int64_t ranks);

}  // namespace trireme
