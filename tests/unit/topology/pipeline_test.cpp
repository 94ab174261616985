// Tables of passes against a simulator that knows only "inputs before outputs": every place of the model (piece after
// piece, stage after stage) is a station, forward goes up the stations and backward down, a stage does what its table
// says next or waits.
#include "topology/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/error.h"

namespace trireme {
namespace {

struct Simulated {
  bool stuck = false;
  int64_t ticks = 0, working = 0;       // until all is done; of all stages
  std::vector<int64_t> most_in_flight;  // of each stage
};

Simulated simulate(const PipelineTable& table, int64_t forward_ticks, int64_t backward_ticks, int64_t hop_ticks) {
  const auto pp = static_cast<int64_t>(table.stages.size());
  const int64_t last = pp * table.pieces - 1;
  using Work = std::tuple<bool, int64_t, int64_t>;  // backward, station, micro-batch
  std::map<Work, int64_t> done;                     // since which tick its output is everywhere
  struct Stage {
    size_t next = 0;
    int64_t busy_until = 0;
    std::set<std::pair<int64_t, int64_t>> kept;  // station and micro-batch
    std::optional<std::pair<int64_t, int64_t>> leaving;
  };
  std::vector<Stage> stages(static_cast<size_t>(pp));
  Simulated result;
  result.most_in_flight.resize(static_cast<size_t>(pp));
  const auto there = [&](bool backward, int64_t station, int64_t micro_batch) {
    const auto found = done.find({backward, station, micro_batch});
    return found != done.end() && found->second <= result.ticks;
  };
  for (int64_t quiet = 0;; ++result.ticks) {
    bool all = true, moved = false;
    for (int64_t s = 0; s < pp; ++s) {
      Stage& stage = stages[static_cast<size_t>(s)];
      if (stage.busy_until > result.ticks) moved = true;
      if (stage.busy_until > result.ticks) all = false;
      if (stage.busy_until > result.ticks) continue;
      if (stage.leaving) stage.kept.erase(*stage.leaving);
      stage.leaving.reset();
      const auto& passes = table.stages[static_cast<size_t>(s)];
      if (stage.next == passes.size()) continue;
      all = false;
      const PipelinePass& pass = passes[stage.next];
      const int64_t station = pass.piece * pp + s, m = pass.micro_batch;
      const bool ready = pass.backward
                             ? stage.kept.count({station, m}) > 0 && (station == last || there(true, station + 1, m))
                             : station == 0 || there(false, station - 1, m);
      if (!ready) continue;
      ++stage.next;
      moved = true;
      stage.busy_until = result.ticks + (pass.backward ? backward_ticks : forward_ticks);
      result.working += pass.backward ? backward_ticks : forward_ticks;
      done[{pass.backward, station, m}] = stage.busy_until + hop_ticks;
      if (pass.backward) {
        stage.leaving = {station, m};
      } else {
        stage.kept.insert({station, m});
        auto& most = result.most_in_flight[static_cast<size_t>(s)];
        most = std::max(most, static_cast<int64_t>(stage.kept.size()));
      }
    }
    if (all) return result;
    quiet = moved ? 0 : quiet + 1;
    if (quiet > hop_ticks + 1) {
      result.stuck = true;
      return result;
    }
  }
}

struct Size {
  int64_t pp, pieces, micro_batches;
};

std::ostream& operator<<(std::ostream& out, const Size& size) {
  return out << size.pp << " stages of " << size.pieces << " pieces, " << size.micro_batches << " micro-batches";
}

std::vector<Size> every_size() {
  std::vector<Size> all;
  for (int64_t pp = 1; pp <= 8; ++pp)
    for (int64_t pieces = 1; pieces <= 4; ++pieces)
      for (int64_t m = 0; m <= 16; ++m) all.push_back({pp, pieces, m});
  return all;
}

// Each piece once forward for each micro-batch, and once backward, in the order of the micro-batches.
void expect_complete(const PipelineTable& table, const Size& size, bool forward_only) {
  ASSERT_EQ(static_cast<int64_t>(table.stages.size()), size.pp);
  ASSERT_EQ(static_cast<int64_t>(table.most_in_flight.size()), size.pp);
  for (const auto& passes : table.stages) {
    std::map<std::pair<int64_t, bool>, std::vector<int64_t>> seen;
    for (const PipelinePass& pass : passes) seen[{pass.piece, pass.backward}].push_back(pass.micro_batch);
    std::vector<int64_t> all;
    for (int64_t m = 0; m < size.micro_batches; ++m) all.push_back(m);
    for (int64_t piece = 0; piece < size.pieces; ++piece) {
      ASSERT_EQ((seen[{piece, false}]), all);
      ASSERT_EQ((seen[{piece, true}]), forward_only ? std::vector<int64_t>() : all);
    }
    ASSERT_EQ(static_cast<int64_t>(passes.size()), size.pieces * size.micro_batches * (forward_only ? 1 : 2));
  }
}

// What a stage sends to another is what that one receives next, of each direction.
void expect_messages_in_order(const PipelineTable& table) {
  using Message = std::tuple<int64_t, int64_t, bool>;  // receiving piece, micro-batch, backward
  std::map<std::tuple<int64_t, int64_t, bool>, std::vector<Message>> sent, received;
  for (int64_t stage = 0; stage < static_cast<int64_t>(table.stages.size()); ++stage) {
    for (const PipelinePass& pass : table.stages[static_cast<size_t>(stage)]) {
      if (const auto to = output_of(table, stage, pass)) {
        sent[{stage, to->stage, pass.backward}].emplace_back(to->piece, pass.micro_batch, pass.backward);
        const auto back = input_of(table, to->stage, {to->piece, pass.micro_batch, pass.backward});
        ASSERT_EQ(back, (PipelinePlace{stage, pass.piece}));
      }
      if (const auto from = input_of(table, stage, pass))
        received[{from->stage, stage, pass.backward}].emplace_back(pass.piece, pass.micro_batch, pass.backward);
    }
  }
  ASSERT_EQ(sent, received);
}

void expect_simulated(const PipelineTable& table, const Size& size, bool forward_only) {
  for (const auto& [forward, backward, hop] : {std::tuple{1, 2, 0}, {2, 3, 1}, {1, 1, 3}}) {
    const Simulated simulated = simulate(table, forward, backward, hop);
    ASSERT_FALSE(simulated.stuck);
    if (forward_only) {
      ASSERT_EQ(table.most_in_flight, std::vector<int64_t>(table.stages.size(), 0));
    } else {
      ASSERT_EQ(simulated.most_in_flight, table.most_in_flight);
    }
    const auto each = [&](double cost) {
      return std::vector(static_cast<size_t>(size.pp), std::vector(static_cast<size_t>(size.pieces), cost));
    };
    const PipelineTime time = pipeline_time(table, {each(forward), each(backward), static_cast<double>(hop)});
    ASSERT_EQ(time.total, static_cast<double>(simulated.ticks));
    const int64_t idle = simulated.ticks * size.pp - simulated.working;
    ASSERT_NEAR(time.bubble * static_cast<double>(simulated.working), static_cast<double>(idle), 1e-6);
  }
}

TEST(Pipeline, TrainingTablesRunToTheirEnd) {
  for (const Size& size : every_size()) {
    const PipelineTable table = training_passes(size.pp, size.pieces, size.micro_batches);
    ASSERT_NO_FATAL_FAILURE(expect_complete(table, size, false)) << size;
    ASSERT_NO_FATAL_FAILURE(expect_messages_in_order(table)) << size;
    ASSERT_NO_FATAL_FAILURE(expect_simulated(table, size, false)) << size;
  }
}

TEST(Pipeline, ForwardTablesRunToTheirEnd) {
  for (const Size& size : every_size()) {
    const PipelineTable table = forward_passes(size.pp, size.pieces, size.micro_batches);
    ASSERT_NO_FATAL_FAILURE(expect_complete(table, size, true)) << size;
    ASSERT_NO_FATAL_FAILURE(expect_messages_in_order(table)) << size;
    ASSERT_NO_FATAL_FAILURE(expect_simulated(table, size, true)) << size;
  }
}

// The published figures: bubble (pp - 1) / (pieces * micro_batches), and what is in flight.
TEST(Pipeline, BubbleAndInFlightAreThoseOfThePaper) {
  for (const Size& size : every_size()) {
    if (size.micro_batches == 0 || (size.pieces > 1 && size.micro_batches % size.pp != 0)) continue;
    const PipelineTable table = training_passes(size.pp, size.pieces, size.micro_batches);
    const int64_t passes = size.pieces * size.micro_batches;
    const double bubble = static_cast<double>(size.pp - 1) / static_cast<double>(passes);
    ASSERT_NEAR(pipeline_time(table).bubble, bubble, 1e-9) << size;
    ASSERT_NEAR(pipeline_time(forward_passes(size.pp, size.pieces, size.micro_batches)).bubble, bubble, 1e-9) << size;
    for (int64_t stage = 0; stage < size.pp; ++stage) {
      const int64_t behind = size.pp - 1 - stage;
      const int64_t most = size.pieces == 1 ? behind + 1 : 2 * behind + (size.pieces - 1) * size.pp + 1;
      ASSERT_EQ(table.most_in_flight[static_cast<size_t>(stage)], std::min(passes, most)) << size;
    }
  }
}

// A table for a number of micro-batches that pp does not divide costs no more than the next one that it does.
TEST(Pipeline, AnyNumberOfMicroBatchesCostsNoMoreThanTheNextMultiple) {
  for (const Size& size : every_size()) {
    const PipelineTable table = training_passes(size.pp, size.pieces, size.micro_batches);
    const int64_t whole = (size.micro_batches + size.pp - 1) / size.pp * size.pp;
    const PipelineTable next = training_passes(size.pp, size.pieces, whole);
    ASSERT_LE(pipeline_time(table).total, pipeline_time(next).total) << size;
    for (size_t stage = 0; stage < table.stages.size(); ++stage)
      ASSERT_LE(table.most_in_flight[stage], next.most_in_flight[stage]) << size;
  }
}

std::string text(const std::vector<PipelinePass>& passes) {
  std::string line;
  for (const PipelinePass& pass : passes) {
    line += (line.empty() ? "" : " ") + std::string(pass.backward ? "B" : "F") + std::to_string(pass.piece) + "." +
            std::to_string(pass.micro_batch);
  }
  return line;
}

TEST(Pipeline, ByHand) {
  const PipelineTable one = training_passes(3, 1, 4);
  EXPECT_EQ(text(one.stages[0]), "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3");
  EXPECT_EQ(text(one.stages[1]), "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3");
  EXPECT_EQ(text(one.stages[2]), "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3");
  // Megatron's interleaved order: 2 stages of 2 pieces, 4 micro-batches.
  const PipelineTable two = training_passes(2, 2, 4);
  EXPECT_EQ(text(two.stages[0]), "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3");
  EXPECT_EQ(text(two.stages[1]), "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3");
  // Fewer micro-batches than stages, and one more than a multiple.
  EXPECT_EQ(text(training_passes(4, 1, 2).stages[0]), "F0.0 F0.1 B0.0 B0.1");
  EXPECT_EQ(text(training_passes(2, 2, 3).stages[1]), "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 B0.1 F1.2 B1.2 B0.2");
  EXPECT_EQ(text(forward_passes(2, 2, 3).stages[1]), "F0.0 F0.1 F1.0 F1.1 F0.2 F1.2");
  // The whole step of 2 stages and 16 micro-batches has a bubble of 1/16.
  EXPECT_NEAR(pipeline_time(training_passes(2, 1, 16)).bubble, 1.0 / 16, 1e-12);
}

TEST(Pipeline, UnequalStagesWaitForTheSlowest) {
  // 2 stages, the second with twice the work: it works from the first forward's end on, then the first one's backward.
  const PipelineTime time = pipeline_time(training_passes(2, 1, 4), {{{1}, {2}}, {{2}, {4}}});
  EXPECT_EQ(time.total, 1 + 4 * 6 + 2);
  EXPECT_NEAR(time.bubble, (2 * 27 - 36) / 36.0, 1e-12);
}

TEST(Pipeline, TheSimulatorSeesATableThatLocksUp) {
  PipelineTable table = training_passes(2, 1, 2);
  std::swap(table.stages[1][0], table.stages[1][1]);  // backward before its forward
  EXPECT_TRUE(simulate(table, 1, 2, 0).stuck);
  table = training_passes(2, 1, 2);
  std::swap(table.stages[0][1], table.stages[0][2]);  // harmless: less ahead
  EXPECT_FALSE(simulate(table, 1, 2, 0).stuck);
  table.stages[0] = {{0, 0, false}, {0, 0, true}, {0, 1, false}, {0, 1, true}};
  table.stages[1] = {{0, 1, false}, {0, 1, true}, {0, 0, false}, {0, 0, true}};
  EXPECT_TRUE(simulate(table, 1, 2, 0).stuck);
  EXPECT_THROW(pipeline_time(table), Error);
}

// Why what is not there is left out of a whole table: the interleaved order over a last group of fewer micro-batches
// than stages waits for itself.
TEST(Pipeline, AShortLastGroupByItselfLocksUp) {
  constexpr int64_t kStages = 4, kPieces = 3, kMicroBatches = 5;
  PipelineTable table{.pieces = kPieces, .stages = forward_passes(kStages, kPieces, kMicroBatches).stages};
  for (int64_t stage = 0; stage < kStages; ++stage) {
    auto& passes = table.stages[static_cast<size_t>(stage)];
    const std::vector<PipelinePass> forward = passes;
    const size_t ahead = static_cast<size_t>((kStages - 1 - stage) * 2 + (kPieces - 1) * kStages);
    passes.clear();
    for (size_t i = 0; i < forward.size() + ahead; ++i) {
      if (i < forward.size()) passes.push_back(forward[i]);
      if (i < ahead) continue;
      const PipelinePass& pass = forward[i - ahead];
      passes.push_back({kPieces - 1 - pass.piece, pass.micro_batch, true});
    }
  }
  EXPECT_TRUE(simulate(table, 1, 2, 0).stuck);
  EXPECT_FALSE(simulate(training_passes(kStages, kPieces, kMicroBatches), 1, 2, 0).stuck);
}

}  // namespace
}  // namespace trireme
