// Plans of layouts as text.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "topology/plan.h"

namespace trireme {

// "weights of a rank                  7.5 GiB, bfloat16"
void print_line(std::ostream& out, const std::string& what, const std::string& value);

// "2 engines", and where each has several devices "2 engines of 4 devices".
std::string engines_text(int64_t engines, const Layout& engine);

// One plan in full: memory of both phases by kind, the parts of the time.
void print_plan(std::ostream& out, const LayoutPlan& plan, const ModelShape& shape, const Workload& work,
                const PlanOptions& options, const PlanDevices& devices);
// Of many the ones that fit, a line each, and the others with what they want. `runs`: whether the trainer of this
// version takes the layout.
struct RankedPlan {
  LayoutPlan plan;
  bool runs = true;
};
// Of the first of the plans where none fits: its layout and what it wants, or its problems where memory is none.
std::string nearest_text(const LayoutPlan& plan, const PlanDevices& devices);
void print_plans(std::ostream& out, const std::vector<RankedPlan>& plans, const PlanDevices& devices);

}  // namespace trireme
