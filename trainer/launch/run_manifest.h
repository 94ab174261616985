// trireme run -f: an RLJob manifest on this machine.
#pragma once

#include <atomic>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "api/rljob.h"
#include "base/clock.h"

namespace trireme {

struct RunOptions {
  std::filesystem::path manifest;
  std::filesystem::path volumes = ".trireme/volumes";  // a claim NAME is the folder volumes/NAME
  std::filesystem::path program;                       // the trireme binary
  std::vector<std::string> overrides;                  // key.sub=value after the manifest's own
  Milliseconds init_timeout{3600000};                  // for each init container
  Milliseconds failure_grace{60000};                   // after a pod's failure, for the others to end by themselves
};

// Runs init containers, then every actor and critic pod as one `trireme launch`, every generation pod as one `trireme
// engine` (several processes: as one `launch` of them) and one reward pod by its container's command. Returns the exit
// code of the first actor or critic pod that failed, a lost peer being the last to count, or of the last generation pod
// when all of them did. Pods that end are not made again.
// Throws Error(kUser) for manifests that admission would refuse or that need a cluster.
int run_manifest(const RunOptions& options, const std::atomic<int>* signal);

// ---- parts, for tests --------------------------------------------------------------------------------------------

struct PathMapping {
  std::string container;  // mount path
  std::string local;      // absolute folder
};
// Replaces mount paths at the start of a path inside `text` ("/data/x", "--out=/data/x"); longest mount wins.
std::string map_paths(const std::string& text, const std::vector<PathMapping>& mappings);

}  // namespace trireme
