// Ranks, coordinates, groups, placement.
#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "topology/topology.h"

namespace trireme {
namespace {

// One dimension of a grid: `size` ranks that are `stride` apart.
struct Dim {
  int64_t size;
  int64_t stride;
};

struct Grid {
  Dim tp, cp, dp, pp;  // dense
  Dim etp, ep, edp;    // expert
  explicit Grid(const Layout& l)
      : tp{l.tp, 1},
        cp{l.cp, l.tp},
        dp{l.dp, l.tp * l.cp},
        pp{l.pp, l.tp * l.cp * l.dp},
        etp{l.etp, 1},
        ep{l.ep, l.etp},
        edp{l.expert_dp(), l.etp * l.ep} {}
};

// The dimensions an axis runs over, fastest first.
std::vector<Dim> dims_of(const Layout& layout, Axis axis) {
  const Grid grid(layout);
  switch (axis) {
    case Axis::kTp:
      return {grid.tp};
    case Axis::kCp:
      return {grid.cp};
    case Axis::kDp:
      return {grid.dp};
    case Axis::kPp:
      return {grid.pp};
    case Axis::kEtp:
      return {grid.etp};
    case Axis::kEp:
      return {grid.ep};
    case Axis::kEdp:
      return {grid.edp};
    case Axis::kDpCp:
      return {grid.cp, grid.dp};
    case Axis::kTpCp:
      return {grid.tp, grid.cp};
    case Axis::kTpPp:
      return {grid.tp, grid.pp};
    case Axis::kEtpEp:
      return {grid.etp, grid.ep};
    case Axis::kEtpEpPp:
      return {grid.etp, grid.ep, grid.pp};
    case Axis::kCopy:
      return {{layout.copy_ranks(), 1}};
    case Axis::kCopyPp:
      return {{layout.copy_ranks(), 1}, grid.pp};
    case Axis::kPasses:
      return {{std::lcm(layout.tp * layout.cp, layout.etp * layout.ep), 1}};
  }
  fail_internal("unknown axis");
}

int64_t index_in(const Dim& dim, int64_t rank) { return rank / dim.stride % dim.size; }

std::vector<int64_t> members(const std::vector<Dim>& dims, int64_t first) {
  std::vector<int64_t> ranks{first};
  for (const Dim& dim : dims) {
    const size_t count = ranks.size();
    for (int64_t i = 1; i < dim.size; ++i) {
      for (size_t j = 0; j < count; ++j) ranks.push_back(ranks[j] + i * dim.stride);
    }
  }
  return ranks;  // ascending: each dimension's stride is at least the extent of the faster ones
}

}  // namespace

const char* to_string(Axis axis) {
  switch (axis) {
    case Axis::kTp:
      return "tp";
    case Axis::kCp:
      return "cp";
    case Axis::kDp:
      return "dp";
    case Axis::kPp:
      return "pp";
    case Axis::kEtp:
      return "etp";
    case Axis::kEp:
      return "ep";
    case Axis::kEdp:
      return "edp";
    case Axis::kDpCp:
      return "dp-cp";
    case Axis::kTpCp:
      return "tp-cp";
    case Axis::kTpPp:
      return "tp-pp";
    case Axis::kEtpEp:
      return "etp-ep";
    case Axis::kEtpEpPp:
      return "etp-ep-pp";
    case Axis::kCopy:
      return "copy";
    case Axis::kCopyPp:
      return "copy-pp";
    case Axis::kPasses:
      return "passes";
  }
  return "?";
}

std::string name_of_rank(const Layout& layout, int64_t rank) {
  const std::string name = "rank " + std::to_string(rank);
  const int axes = (layout.tp > 1) + (layout.cp > 1) + (layout.pp > 1) + (layout.dp > 1);
  const bool split = axes + (layout.ep > 1) + (layout.etp > 1) > 1;
  if (!split || rank < 0 || rank >= layout.world()) return name;
  const Coordinates at = coordinates(layout, rank);
  std::string place;
  const auto add = [&](const char* axis, int64_t size, int64_t index) {
    if (size > 1) place += (place.empty() ? "" : ", ") + std::string(axis) + " " + std::to_string(index);
  };
  add("tp", layout.tp, at.tp);
  add("cp", layout.cp, at.cp);
  add("pp", layout.pp, at.pp);
  add("dp", layout.dp, at.dp);
  add("ep", layout.ep, at.ep);
  add("etp", layout.etp, at.etp);
  return name + " (" + place + ")";
}

Coordinates coordinates(const Layout& layout, int64_t rank) {
  TRIREME_CHECK(rank >= 0 && rank < layout.world(), "rank " + std::to_string(rank) + " outside " + to_string(layout));
  const Grid grid(layout);
  Coordinates at;
  at.tp = index_in(grid.tp, rank);
  at.cp = index_in(grid.cp, rank);
  at.dp = index_in(grid.dp, rank);
  at.pp = index_in(grid.pp, rank);
  at.etp = index_in(grid.etp, rank);
  at.ep = index_in(grid.ep, rank);
  at.edp = index_in(grid.edp, rank);
  return at;
}

int64_t rank_of(const Layout& layout, int64_t tp, int64_t cp, int64_t dp, int64_t pp) {
  const Grid grid(layout);
  return tp * grid.tp.stride + cp * grid.cp.stride + dp * grid.dp.stride + pp * grid.pp.stride;
}

int64_t expert_rank_of(const Layout& layout, int64_t etp, int64_t ep, int64_t edp, int64_t pp) {
  const Grid grid(layout);
  return etp * grid.etp.stride + ep * grid.ep.stride + edp * grid.edp.stride + pp * grid.pp.stride;
}

int64_t group_size(const Layout& layout, Axis axis) {
  int64_t size = 1;
  for (const Dim& dim : dims_of(layout, axis)) size *= dim.size;
  return size;
}

std::vector<int64_t> group_of(const Layout& layout, Axis axis, int64_t rank) {
  TRIREME_CHECK(rank >= 0 && rank < layout.world(), "rank " + std::to_string(rank) + " outside " + to_string(layout));
  const std::vector<Dim> dims = dims_of(layout, axis);
  int64_t first = rank;
  for (const Dim& dim : dims) first -= index_in(dim, rank) * dim.stride;
  return members(dims, first);
}

std::vector<std::vector<int64_t>> groups(const Layout& layout, Axis axis) {
  const std::vector<Dim> dims = dims_of(layout, axis);
  std::vector<std::vector<int64_t>> result;
  for (int64_t rank = 0; rank < layout.world(); ++rank) {
    const bool first = std::all_of(dims.begin(), dims.end(), [&](const Dim& dim) { return index_in(dim, rank) == 0; });
    if (first) result.push_back(members(dims, rank));
  }
  return result;
}

NodeSlot slot_of(int64_t rank, int64_t gpus_per_node) { return {rank / gpus_per_node, rank % gpus_per_node}; }

bool inside_node(const Layout& layout, Axis axis, int64_t gpus_per_node) {
  for (const std::vector<int64_t>& group : groups(layout, axis)) {
    if (slot_of(group.front(), gpus_per_node).node != slot_of(group.back(), gpus_per_node).node) return false;
  }
  return true;
}

}  // namespace trireme
