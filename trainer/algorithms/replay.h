// trireme replay: recomputes the loss of a dumped optimizer step, with or without the model, and compares.
#pragma once

#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <map>
#include <string>

namespace trireme {

struct ReplayResult {
  int64_t micro_batches = 0;
  int64_t tokens = 0;
  double dumped_loss = 0;
  double loss = 0;                   // recomputed
  double largest_logprob_error = 0;  // |recomputed - dumped| current log-probs; 0 without a model
  int64_t differing_tokens = 0;      // bits of the recomputed log-probs that differ from the sampler's
  // The same by the version of the weights that drew the tokens. Without a model none.
  struct OfVersion {
    int64_t tokens = 0;
    int64_t differing = 0;
  };
  std::map<int64_t, OfVersion> versions;
};

// `model_dir` empty: the dumped log-probs are taken as they are and only the loss is recomputed. Loss and errors are
// the dumped ones with the weights from before the dumped step; with those of an earlier version the tokens that these
// drew have the sampler's bits. The model runs on `device` ("auto", "cpu" or "cuda"). Prints a table to `out`. Throws
// Error(kData) for a file that is not a dump.
ReplayResult replay(const std::filesystem::path& dump, const std::filesystem::path& model_dir,
                    const std::string& device, std::ostream& out);

}  // namespace trireme
