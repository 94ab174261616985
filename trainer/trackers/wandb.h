// Weights & Biases: an offline run that `wandb sync FOLDER` uploads, now or from another machine.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "trainer/trackers/tracker.h"

namespace trireme {

struct WandbOptions {
  std::filesystem::path folder;           // offline-run-TIME-ID/run-ID.wandb is made below it
  std::string project = "uncategorized";  // W&B's own name for none
  std::string name;                       // of the run; empty: W&B chooses one
  std::string entity, group;
  std::vector<std::string> tags;
};

// The file is W&B's transaction log: records of wandb_internal.proto in LevelDB's log format with plain CRC-32. The
// run's id and its last written step are kept in FOLDER/trireme_run.json, so that a resumed run has the same id (`wandb
// sync` of all its folders makes one run of them). W&B takes a step once: values that come after a step's own line join
// it as long as no later step came, and steps done anew after a resume are left out.
std::unique_ptr<Tracker> make_wandb(const WandbOptions& options);

}  // namespace trireme
