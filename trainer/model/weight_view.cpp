#include "trainer/model/weight_view.h"

#include "base/error.h"
#include "base/text.h"

namespace trireme {

WeightView weight_view(const Model& model) {
  TRIREME_CHECK(!model.options().releasable, "weights that come and go are no link's");
  WeightView view{.flat = model.flat_parameters()};
  view.layout = hash64("");
  for (const Parameter& parameter : model.parameters()) {
    std::string place = parameter.name + "@" + std::to_string(parameter.offset);
    for (const int64_t extent : parameter.held) place += "x" + std::to_string(extent);
    view.layout = hash64(place + ";", view.layout);
  }
  return view;
}

}  // namespace trireme
