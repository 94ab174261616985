// Action: one write that a plan asks for. Planners make them (actions.h), the writer carries them out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "api/rljob.h"
#include "operator/kube/resource.h"

namespace trireme::controller {

struct Action {
  // kApply: created, or where it is there already given the labels and the spec of the body.
  enum class Kind { kCreate, kApply, kDelete };
  Kind kind = Kind::kCreate;
  int wave = 0;  // actions of a wave may run together; waves in order
  kube::Resource resource;
  std::string name;
  Json body;                    // kCreate, kApply; null where `make` is set
  std::function<Json()> make;   // kCreate of a pod: its body, made by the task that creates it and gone with it
  std::string role;             // kCreate of a pod: what is refused for one of a role is refused for all of it
  std::string uid;              // kDelete: precondition; empty: the writer looks first whether the object is the job's
  int64_t grace_period_s = -1;  // kDelete: < 0 the object's own; 0 without waiting for the kubelet

  Json content() const { return make ? make() : body; }
};

struct EventNote {
  bool warning = false;
  std::string reason;
  std::string message;
};

}  // namespace trireme::controller
