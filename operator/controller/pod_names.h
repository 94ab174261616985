// PodNames: the names that a job's pods can have, as far as this process knows, so that a live look can GET them one by
// one. A list by label makes the API server walk every pod of the namespace; with tens of thousands of them it does not
// answer in time just when the watch is late and everybody looks. Pure.
//
// A look by these names shows every pod of ours that a list would show:
// - Pods are made by the one process that leads, of the status' attempt only, after a look in the same reconcile or of
//   an attempt 1 that has just begun. Their names follow from the specification and the attempt.
// - What was made before this process first looked is known from a list, or nothing was (attempt 1 began here). A
//   specification of another generation may have had other roles or sizes, a status that was taken back other attempts:
//   then it is a list again.
// - An attempt is asked for until a look has shown none of its pods: nobody makes any later. The last one is asked for
//   always, since a create whose answer was lost may take effect late.
// - A pod that is made again in its attempt has a name that nobody can tell from the specification. The status counts
//   such pods before they are made: from then on looks are lists, until their attempt is not asked for any more.
// - What the cache shows is asked for, too. A pod with our labels under another name is somebody's copy; once one has
//   been seen, looks are lists.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "api/rljob.h"
#include "operator/controller/observed.h"

namespace trireme::controller {

struct WantedPod {
  std::string role;
  int64_t rank = 0;
  std::string name;
  int64_t incarnation = 0;
  int64_t failures = 0;  // of the pods that had its place before it, in a row
};
// Every pod of an attempt under its first name, actor first.
std::vector<WantedPod> wanted_pods(const RLJob& job, int64_t attempt);

class PodNames final {
 public:
  // A gang of 32 in three attempts. So many GETs cost about what a list among 15,000 pods does.
  static constexpr int64_t kMost = 96;

  // This process has just written that the job's first attempt begins.
  void begin(const RLJob& job);
  // A status that this process has just written.
  void wrote(const RLJobStatus& status);
  // The names to GET, each once and in order; nothing if only a list can tell.
  std::optional<std::vector<std::string>> ask(const RLJob& job, std::vector<std::string> cached) const;
  // What a look showed, by list or by name. `job` is the one that was read before the pods.
  void saw(const RLJob& job, const std::vector<ObservedPod>& pods);

 private:
  bool explains(const RLJob& job, const ObservedPod& pod) const;

  uint64_t uid_hash_ = 0;  // of the job's uid, which is only compared
  int64_t generation_ = 0;
  int64_t first_ = 0, last_ = 0;  // attempts whose pods there may be; 0: not known
  int64_t renamed_ = 0;           // attempts up to this one may have pods of further incarnations
};

}  // namespace trireme::controller
