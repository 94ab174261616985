#include "trainer/model/weight_view.h"

#include "base/error.h"
#include "base/text.h"

namespace trireme {

WeightView weight_view(const Model& model) {
  const ModelSplit& split = model.split();
  const Layout held{.tp = split.tp, .ep = split.ep, .pp = split.pp, .etp = split.etp};
  if (held != Layout{}) {
    fail_user("weights go to other processes from ranks that hold all of them: this model is split over " +
              to_string(held) + "; set these sizes to 1, or generate where it trains (policy.generation.colocated)");
  }
  TRIREME_CHECK(!model.options().releasable, "weights that come and go are no link's");
  WeightView view{.flat = model.flat_parameters()};
  view.layout = hash64("");
  for (const Parameter& parameter : model.parameters()) {
    std::string place = parameter.name + "@" + std::to_string(parameter.offset);
    for (const int64_t extent : parameter.shape()) place += "x" + std::to_string(extent);
    view.layout = hash64(place + ";", view.layout);
  }
  return view;
}

}  // namespace trireme
