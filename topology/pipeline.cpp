#include "topology/pipeline.h"

#include <algorithm>

#include "base/error.h"

namespace trireme {
namespace {

// The passes of one kind that every stage runs, in order: groups of pp micro-batches, through one piece after another.
std::vector<PipelinePass> passes_of(int64_t pp, int64_t pieces, int64_t micro_batches, bool backward) {
  std::vector<PipelinePass> passes;
  for (int64_t group = 0; group < micro_batches; group += pp) {
    for (int64_t p = 0; p < pieces; ++p) {
      const int64_t piece = backward ? pieces - 1 - p : p;
      for (int64_t m = group; m < std::min(group + pp, micro_batches); ++m) passes.push_back({piece, m, backward});
    }
  }
  return passes;
}

int64_t most_in_flight(const std::vector<PipelinePass>& passes) {
  int64_t now = 0, most = 0;
  for (const PipelinePass& pass : passes) {
    now += pass.backward ? -1 : 1;
    most = std::max(most, now);
  }
  return most;
}

void require_sizes(int64_t pp, int64_t pieces, int64_t micro_batches) {
  TRIREME_CHECK(pp > 0 && pieces > 0 && micro_batches >= 0, "a pipeline of " + std::to_string(pp) + " stages of " +
                                                                std::to_string(pieces) + " pieces over " +
                                                                std::to_string(micro_batches) + " micro-batches");
}

// The place `steps` (1 or -1) further along the model.
std::optional<PipelinePlace> neighbour(const PipelineTable& table, int64_t stage, int64_t piece, int64_t steps) {
  const auto pp = static_cast<int64_t>(table.stages.size());
  const int64_t place = piece * pp + stage + steps;
  if (place < 0 || place >= table.pieces * pp) return std::nullopt;
  return PipelinePlace{place % pp, place / pp};
}

}  // namespace

PipelineTable training_passes(int64_t pp, int64_t pieces, int64_t micro_batches) {
  require_sizes(pp, pieces, micro_batches);
  PipelineTable table{.pieces = pieces};
  const int64_t whole = pieces == 1 ? micro_batches : (micro_batches + pp - 1) / pp * pp;
  const std::vector<PipelinePass> forward = passes_of(pp, pieces, whole, false);
  const std::vector<PipelinePass> backward = passes_of(pp, pieces, whole, true);
  const auto count = static_cast<int64_t>(forward.size());
  for (int64_t stage = 0; stage < pp; ++stage) {
    // Forward passes ahead of the first backward one.
    const int64_t behind = pp - 1 - stage;
    const int64_t ahead = std::min(count, pieces == 1 ? behind : 2 * behind + (pieces - 1) * pp);
    std::vector<PipelinePass> passes;
    const auto add = [&](const PipelinePass& pass) {
      if (pass.micro_batch < micro_batches) passes.push_back(pass);
    };
    for (int64_t i = 0; i < count + ahead; ++i) {
      if (i < count) add(forward[static_cast<size_t>(i)]);
      if (i >= ahead) add(backward[static_cast<size_t>(i - ahead)]);
    }
    table.most_in_flight.push_back(most_in_flight(passes));
    table.stages.push_back(std::move(passes));
  }
  return table;
}

PipelineTable forward_passes(int64_t pp, int64_t pieces, int64_t micro_batches) {
  require_sizes(pp, pieces, micro_batches);
  const auto stages = static_cast<size_t>(pp);
  return {.pieces = pieces,
          .stages = std::vector(stages, passes_of(pp, pieces, micro_batches, false)),
          .most_in_flight = std::vector<int64_t>(stages, 0)};
}

std::optional<PipelinePlace> input_of(const PipelineTable& table, int64_t stage, const PipelinePass& pass) {
  return neighbour(table, stage, pass.piece, pass.backward ? 1 : -1);
}

std::optional<PipelinePlace> output_of(const PipelineTable& table, int64_t stage, const PipelinePass& pass) {
  return neighbour(table, stage, pass.piece, pass.backward ? -1 : 1);
}

PipelineTime pipeline_time(const PipelineTable& table, const PipelineCosts& costs) {
  const size_t pp = table.stages.size();
  const auto pieces = static_cast<size_t>(table.pieces);
  int64_t micro_batches = 0;
  for (const PipelinePass& pass : table.stages.front()) micro_batches = std::max(micro_batches, pass.micro_batch + 1);
  const auto cost = [&](size_t stage, const PipelinePass& pass) {
    const auto& given = pass.backward ? costs.backward : costs.forward;
    return given.empty() ? (pass.backward ? 2.0 : 1.0) : given.at(stage).at(static_cast<size_t>(pass.piece));
  };
  // When the output of each pass is there; negative: not yet.
  const auto index = [&](size_t stage, int64_t piece, const PipelinePass& pass) {
    const size_t place = (stage * pieces + static_cast<size_t>(piece)) * 2 + (pass.backward ? 1 : 0);
    return place * static_cast<size_t>(micro_batches) + static_cast<size_t>(pass.micro_batch);
  };
  std::vector<double> there(pp * pieces * 2 * static_cast<size_t>(micro_batches), -1);
  std::vector<double> free(pp, 0);
  std::vector<size_t> next(pp, 0);
  double work = 0;
  // Runs what a stage can run, until nobody can.
  for (bool any = true; any;) {
    any = false;
    for (size_t stage = 0; stage < pp; ++stage) {
      for (; next[stage] < table.stages[stage].size(); ++next[stage]) {
        const PipelinePass& pass = table.stages[stage][next[stage]];
        const auto from = input_of(table, static_cast<int64_t>(stage), pass);
        const double input = from ? there[index(static_cast<size_t>(from->stage), from->piece, pass)] : 0;
        if (input < 0) break;
        free[stage] = std::max(free[stage], input) + cost(stage, pass);
        there[index(stage, pass.piece, pass)] = free[stage] + costs.hop;
        work += cost(stage, pass);
        any = true;
      }
    }
  }
  for (size_t stage = 0; stage < pp; ++stage) {
    TRIREME_CHECK(next[stage] == table.stages[stage].size(), "stage " + std::to_string(stage) + " waits for ever");
  }
  PipelineTime time;
  time.total = *std::max_element(free.begin(), free.end());
  if (work > 0) time.bubble = time.total * static_cast<double>(pp) / work - 1;
  return time;
}

}  // namespace trireme
