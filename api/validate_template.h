// What admission says about a role's pod template.
#pragma once

#include <string>
#include <vector>

#include "api/rljob.h"
#include "api/runtime.h"

namespace trireme {

// Appends to `errors`, up to kMaxIssues and a line that says how many more there are. `path` is the template's own,
// spec.roles.actor.template; `main_container` the one that gets the role's GPUs.
void check_template(const RLJobSpec& spec, const RoleRef& role, const std::string& path,
                    const std::string& main_container, std::vector<Issue>& errors);

}  // namespace trireme
