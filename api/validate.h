// What admission says about an RLJob: pure functions of the object, used by the webhook, `trireme validate` and
// `trireme run`.
#pragma once

#include <optional>
#include <vector>

#include "api/rljob.h"

namespace trireme {

struct Validation {
  std::vector<Issue> errors;
  std::vector<Issue> warnings;  // accepted, but worth telling the user
  bool ok() const { return errors.empty(); }
};

Validation validate(const RLJob& job);
// The first of validate()'s rules, alone: the specification is within kMaxSpecBytes and kMaxSpecValues.
std::optional<Issue> size_issue(const RLJobSpec& spec);
// Rules about a change, on top of validate(new_job): what is immutable, and what only a suspended job may change.
Validation validate_update(const RLJob& old_job, const RLJob& new_job);

}  // namespace trireme
