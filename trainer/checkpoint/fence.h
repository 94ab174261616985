// Fence: one writer for a folder of checkpoints. Needs no LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace trireme {

// Who wants to write. Attempts of the same job are ordered; of others the last to come has the folder.
struct Claim {
  std::string job;      // the job's UID; empty: started by hand
  int64_t attempt = 0;  // of that job
  std::string owner;    // of this start, unlike any other
};
std::string random_owner();

// The folder's `.fence` names who writes there. It is taken at the start of a run and looked at before each checkpoint
// is given its name, both under a lock of the file system, so that a process of an older attempt that still runs, on a
// machine which the cluster has given up, can neither add a checkpoint nor remove one.
class Fence final {
 public:
  // Makes the folder and takes it. Throws Error(kConflict) when a newer attempt of the same job has it.
  Fence(std::filesystem::path directory, Claim claim);

  // Runs `work` while nobody else can take the folder. Throws what check() throws, then without running it.
  void guard(const std::function<void()>& work) const;
  // Throws Error(kConflict) when a newer attempt of this job has taken the folder since, Error(kUser) when another run
  // has.
  void check() const;

 private:
  const std::filesystem::path directory_;
  const Claim claim_;
};

}  // namespace trireme
