#include "trainer/parallel/context.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "trainer/parallel/attendance.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {
namespace {

// That a model is split over. One that nothing splits has groups of one, which cost nothing.
constexpr Axis kAxes[] = {Axis::kTp, Axis::kCp, Axis::kPp, Axis::kDp, Axis::kDpCp};
constexpr Axis kExpertAxes[] = {Axis::kEtpEp, Axis::kEdp, Axis::kCopy, Axis::kCopyPp, Axis::kPasses, Axis::kTpCp};

// "dp" where there is one group, "dp-3" where there are several.
RankGroup own_group(const Layout& layout, Axis axis, int64_t rank) {
  const std::vector<std::vector<int64_t>> all = groups(layout, axis);
  for (size_t i = 0; i < all.size(); ++i) {
    if (std::find(all[i].begin(), all[i].end(), rank) == all[i].end()) continue;
    RankGroup group{to_string(axis), {all[i].begin(), all[i].end()}};
    if (all.size() > 1) group.name += "-" + std::to_string(i);
    return group;
  }
  TRIREME_CHECK(false, "a rank is in a group of every axis");
}

RankGroup own_replica(const Layout& layout, const Coordinates& at) {
  RankGroup group{"replica-" + std::to_string(at.cp + layout.cp * at.dp), {}};
  for (int64_t stage = 0; stage < layout.pp; ++stage) {
    for (int64_t tensor = 0; tensor < layout.tp; ++tensor)
      group.ranks.push_back(static_cast<int>(rank_of(layout, tensor, at.cp, at.dp, stage)));
  }
  return group;
}

void check_world(const Layout& layout, int world) {
  LayoutCheck check;
  check.world = world;
  const LayoutReport report = check_layout(layout, check);
  if (!report.ok()) fail_user(report.errors.front());
}

// Groups are made by each rank's own layout: where two differ, some would wait for ranks that never come to theirs.
void check_alike(const Layout& layout, Communicator& world) {
  if (world.size() == 1) return;
  const std::vector<std::string> layouts = world.all_gather_bytes(to_string(layout));
  for (size_t rank = 1; rank < layouts.size(); ++rank) {
    if (layouts[rank] == layouts[0]) continue;
    fail_user("rank " + std::to_string(rank) + " has the layout " + layouts[rank] + ", rank 0 " + layouts[0] +
              "; start all ranks with one configuration and one --layout");
  }
}

}  // namespace

ParallelContext::ParallelContext() : world_(std::make_shared<Communicator>()) {
  for (const Axis axis : kAxes) groups_[axis] = std::make_shared<Communicator>();
  replica_ = groups_.at(Axis::kTp);
  generation_ = {.layout = layout_, .tensor = replica_.get(), .replica = replica_.get(), .leaders = replica_.get()};
}

ParallelContext::ParallelContext(const Layout& layout, const RendezvousOptions& rendezvous)
    : layout_(layout), rendezvous_(rendezvous), job_(of_job(rendezvous, layout)) {
  check_world(layout, rendezvous.world_size);
  if (rendezvous.rank < 0 || rendezvous.rank >= rendezvous.world_size) {
    fail_user("rank " + std::to_string(rendezvous.rank) + " is outside the world of " +
              std::to_string(rendezvous.world_size));
  }
  coordinates_ = trireme::coordinates(layout, rendezvous.rank);
  if (job_.world_size > 1) {
    store_ = std::make_shared<JobStore>(job_);
    attendance_ = std::make_shared<Attendance>(*store_, job_);
  }
  RankGroup everybody{kWorld, std::vector<int>(static_cast<size_t>(rendezvous.world_size))};
  std::iota(everybody.ranks.begin(), everybody.ranks.end(), 0);
  world_ = make_group(everybody);
  make_groups();
  generation_ = {.layout = layout,
                 .tensor = &tensor_parallel(),
                 .links = links_.get(),
                 .replica = replica_.get(),
                 .leaders = replica_->rank() == 0 ? groups_.at(Axis::kDpCp).get() : nullptr,
                 .replicas = static_cast<int>(layout.dp * layout.cp),
                 .number = groups_.at(Axis::kDpCp)->rank()};
}

ParallelContext::ParallelContext(ParallelContext& first, const Layout& layout, const std::string& name)
    : layout_(layout),
      rendezvous_(first.rendezvous_),
      job_(first.job_),
      prefix_(name + "-"),
      store_(first.store_),
      attendance_(first.attendance_),
      world_(first.world_),
      generation_(first.generation_) {
  check_world(layout, first.world_size());
  coordinates_ = trireme::coordinates(layout, rank());
  make_groups();
  generation_.apart = true;  // whatever this layout is
}

ParallelContext::~ParallelContext() = default;

void ParallelContext::make_groups() {
  check_alike(layout_, *world_);
  for (const Axis axis : kAxes) add_group(axis);
  replica_ = layout_.pp == 1   ? groups_.at(Axis::kTp)
             : layout_.tp == 1 ? groups_.at(Axis::kPp)
                               : make_group(own_replica(layout_, coordinates_));
  groups_[Axis::kTpPp] = replica_;
  if (layout_.ep * layout_.etp > 1) make_expert_groups();
  if (layout_.pp > 1) links_ = std::make_unique<StageLinks>(group(Axis::kPp));
}

// All groups of an axis are one of them, moved: where two axes have the same group on one rank, they have on all.
void ParallelContext::add_group(Axis axis) {
  const std::vector<int64_t> ranks = group_of(layout_, axis, rank());
  const auto twin = std::find_if(groups_.begin(), groups_.end(),
                                 [&](const auto& other) { return group_of(layout_, other.first, rank()) == ranks; });
  groups_[axis] = twin != groups_.end() ? twin->second : make_group(own_group(layout_, axis, rank()));
}

void ParallelContext::make_expert_groups() {
  if (groups_.count(Axis::kCopyPp) > 0) return;
  for (const Axis axis : kExpertAxes) add_group(axis);
}

// Ranks keep their numbers: stages are the same where there are as many, and so are the lines between them.
void ParallelContext::set_generation(const Layout& layout) {
  TRIREME_CHECK(layout.world() == rendezvous_.world_size && (layout.pp == 1 || layout.pp == layout_.pp),
                "generation has training's ranks, and its stages or none");
  const auto named = [](RankGroup group) {
    group.name = "generation-" + group.name;
    return group;
  };
  const Coordinates at = trireme::coordinates(layout, rendezvous_.rank);
  const std::shared_ptr<Communicator> tensor = make(named(own_group(layout, Axis::kTp, rendezvous_.rank)));
  const std::shared_ptr<Communicator> replica = layout.pp == 1 ? tensor : make(named(own_replica(layout, at)));
  more_ = {tensor, replica};
  // Whoever leads holds the same of the weights: the first tensor rank's part of the first stage.
  std::shared_ptr<Communicator> leaders;
  if (replica->rank() == 0) more_.push_back(leaders = make(named(own_group(layout, Axis::kDpCp, rendezvous_.rank))));
  generation_ = {.layout = layout,
                 .tensor = tensor.get(),
                 .links = layout.pp == 1 ? nullptr : links_.get(),
                 .replica = replica.get(),
                 .leaders = leaders.get(),
                 .replicas = static_cast<int>(layout.dp * layout.cp),
                 .number = static_cast<int>(at.cp + layout.cp * at.dp),
                 .apart = true};
}

bool GenerationRanks::leads() const { return replica->rank() == 0; }

std::string GenerationRanks::from_leader(const std::string& own) const {
  std::string said;
  if (links == nullptr || links->stage() == 0) said = tensor->broadcast_bytes(own, 0);
  return links == nullptr ? said : links->pass_on(said);
}

std::vector<std::string> GenerationRanks::from_leaders(const std::string& own) const {
  std::vector<std::string> parts;
  if (leads()) parts = leaders->all_gather_bytes(own);
  if (replica->size() == 1) return parts;
  // The length of each, then all.
  std::string packed;
  for (const std::string& part : parts) {
    const uint64_t length = part.size();
    packed.append(reinterpret_cast<const char*>(&length), sizeof length);
  }
  for (const std::string& part : parts) packed += part;
  packed = replica->broadcast_bytes(packed, 0);
  if (leads()) return parts;
  size_t at = static_cast<size_t>(replicas) * sizeof(uint64_t);
  for (size_t part = 0; part < static_cast<size_t>(replicas); ++part) {
    uint64_t length = 0;
    std::memcpy(&length, packed.data() + part * sizeof length, sizeof length);
    parts.push_back(packed.substr(at, length));
    at += length;
  }
  return parts;
}

std::shared_ptr<Communicator> ParallelContext::make(const RankGroup& group) {
  const std::vector<int> ranks = in_job(group).ranks;
  const auto same = [&](const std::shared_ptr<Communicator>& other) { return other->ranks() == ranks; };
  for (const Axis axis : {Axis::kTp, Axis::kPp}) {
    if (same(groups_.at(axis))) return groups_.at(axis);
  }
  if (same(replica_)) return replica_;
  for (const std::shared_ptr<Communicator>& other : more_) {
    if (same(other)) return other;
  }
  return make_group(group);
}

// Groups of a role are numbered by its own ranks until they are made.
RankGroup ParallelContext::in_job(RankGroup group) const {
  if (!job_.of_critic) return group;
  group.name = "critic-" + group.name;
  for (int& rank : group.ranks) rank += job_.actor_ranks;
  return group;
}

std::shared_ptr<Communicator> ParallelContext::make_group(RankGroup group) {
  group.name = prefix_ + group.name;
  return group.ranks.size() == 1 ? std::make_shared<Communicator>()
                                 : std::make_shared<Communicator>(*store_, job_, *attendance_, in_job(group));
}

void ParallelContext::set_phase(const std::string& phase) {
  phase_ = phase;
  if (attendance_) attendance_->set_phase(phase);
  if (on_phase_) on_phase_(phase);
}

std::string ParallelContext::phase() const { return phase_; }

void ParallelContext::set_on_absent(std::function<void(const std::vector<int>& ranks)> on_absent) {
  if (attendance_) attendance_->set_on_absent(std::move(on_absent));
}

void ParallelContext::start_waits() {
  if (attendance_) attendance_->waits.start();
}

ExposedWaits::Seconds ParallelContext::take_waits() {
  return attendance_ ? attendance_->waits.take() : ExposedWaits::Seconds{};
}

void ParallelContext::report_failure(const std::string& what) {
  if (attendance_) attendance_->report_failure(what);
}

void ParallelContext::leaving() {
  if (attendance_) attendance_->leaving();
}

void ParallelContext::leaves_by(std::exception_ptr error) {
  if (attendance_) attendance_->leaves_by(std::move(error));
}

std::optional<std::string> ParallelContext::failure_of_another() {
  return attendance_ ? attendance_->failure_of_another() : std::nullopt;
}

std::string ParallelContext::last_seen(int job_rank) {
  std::string name = name_of_job_rank(job_.layout, job_.actor_ranks, job_rank);
  if (!attendance_) return name;
  try {
    const std::string phase = attendance_->phase_of(job_rank);
    if (!phase.empty()) name += " (last seen in phase " + phase + ")";
  } catch (const std::exception&) {  // the store has gone: the name is what is known
  }
  return name;
}

}  // namespace trireme
