#include "trainer/cli/plan_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace trireme {
namespace {

using testing::HasSubstr;
using testing::Not;

Workload work_of_a_step() {
  Workload work;
  work.prompts.assign(8, 200);
  work.outputs.assign(64, 700);
  work.longest = work.train_tokens = work.logprob_tokens = 4096;
  work.reference = true;
  return work;
}

TEST(PlanReport, SaysBothPhasesAndWhatALayoutExchanges) {
  const ModelShape shape = *known_model_shape("llama-3.1-8b");
  const PlanDevices devices{.rates = *device_rates("h200")};
  std::ostringstream out;
  const LayoutPlan plan = plan_layout(shape, {.tp = 2, .dp = 2}, work_of_a_step(), {}, devices);
  print_plan(out, plan, shape, work_of_a_step(), {}, devices);
  for (const char* line : {"training  generation", "reference model", "float32, with their sum over ranks",
                           "32 layers whole", "of the longest", "samples alive", "exchanges of passes", "of 139.8"})
    EXPECT_THAT(out.str(), HasSubstr(line));
  EXPECT_THAT(out.str(), Not(HasSubstr("bubble")));
  EXPECT_THAT(out.str(), Not(HasSubstr("does not fit")));
}

TEST(PlanReport, OtherModelsHaveTheirRows) {
  const ModelShape shape = *known_model_shape("qwen3-1.7b");
  const PlanDevices devices{.rates = *device_rates("h200")};
  PlannedModel other{shape, work_of_a_step(), {}};
  other.shape.value_head = true;
  std::ostringstream out;
  const LayoutPlan plan = plan_layout(shape, {}, work_of_a_step(), {}, devices, {other, other});
  print_plan(out, plan, shape, work_of_a_step(), {}, devices);
  for (const char* line : {"\n  critic  ", "\n  reward model  ", "\n  critic's training  ", "  values of the critic  ",
                           "  training of the critic  "})
    EXPECT_THAT(out.str(), HasSubstr(line));
}

TEST(PlanReport, EnginesHaveTheirMemoryAndTheirTime) {
  const ModelShape shape = *known_model_shape("qwen3-1.7b");
  const PlanDevices devices{.rates = *device_rates("h200")};
  Workload work = work_of_a_step();
  work.engines = 3;
  const auto text_of = [&] {
    std::ostringstream out;
    print_plan(out, plan_layout(shape, {.dp = 2}, work, {}, devices), shape, work, {}, devices);
    return out.str();
  };
  const std::string in_turn = text_of();
  for (const char* line : {"training  validation", "  waiting for engines  ", "memory of an engine, of 3, GiB",
                           "\n  second buffer  ", "cache of an engine", "generation of an engine", "weights to engines",
                           "within the node", "in turn: a step is their sum"})
    EXPECT_THAT(in_turn, HasSubstr(line));
  EXPECT_THAT(in_turn, Not(HasSubstr("previous log-probs")));
  work.age = 1;
  work.in_flight = work.previous_pass = true;
  work.engines_near = false;
  const std::string in_flight = text_of();
  for (const char* line : {"previous log-probs", "that older weights drew", "between nodes", "beside each other: "})
    EXPECT_THAT(in_flight, HasSubstr(line));
  // The waits of the ranks are a column of the table.
  std::ostringstream out;
  print_plans(out, {{plan_layout(shape, {.dp = 2}, work, {}, devices), true}}, devices);
  EXPECT_THAT(out.str(), HasSubstr("engines   waiting    step s"));
  EXPECT_THAT(out.str(), HasSubstr("tp=1,cp=1,ep=1,dp=2,pp=1,etp=1               3 "));
}

TEST(PlanReport, EnginesOfSeveralDevicesAreCountedAsEngines) {
  const ModelShape shape = *known_model_shape("llama-3.1-8b");
  const PlanDevices devices{.rates = *device_rates("h200")};
  Workload work = work_of_a_step();
  work.engines = 2;
  work.engine = {.tp = 4};
  const LayoutPlan plan = plan_layout(shape, {.tp = 2, .dp = 4}, work, {}, devices);
  std::ostringstream out;
  print_plan(out, plan, shape, work, {}, devices);
  EXPECT_THAT(out.str(), HasSubstr("\n  previous log-probs  "));
  const size_t engines = out.str().find("memory of an engine's device, of 2 engines of 4 devices, GiB\n");
  ASSERT_NE(engines, std::string::npos) << out.str();
  for (const char* line : {"\n  exchange buffers  ", "\n  exchanges while decoding  ",
                           " for 3.7 GiB a device from 2 ranks, within the node"})
    EXPECT_THAT(out.str().substr(engines), HasSubstr(line));
  std::ostringstream table;
  print_plans(table, {{plan, true}}, devices);
  EXPECT_THAT(table.str(), HasSubstr("tp=2,cp=1,ep=1,dp=4,pp=1,etp=1             2x4 "));
  work.engine = {.tp = 3};
  std::ostringstream refused;
  const LayoutPlan none = plan_layout(shape, {.dp = 8}, work, {}, devices);
  print_plans(refused, {{none, true}}, devices);
  EXPECT_THAT(nearest_text(none, devices), HasSubstr("dp=8,pp=1,etp=1: an engine in tp=3"));
  EXPECT_THAT(refused.str(), HasSubstr("an engine in tp=3,cp=1,ep=1,dp=1,pp=1,etp=1 cannot be: tp 3 does not divide"));
  EXPECT_EQ(engines_text(1, {}), "1 engine");
  EXPECT_EQ(engines_text(3, {}), "3 engines");
}

TEST(PlanReport, ListsWhatFitsAndWhatTheOthersWant) {
  const ModelShape shape = *known_model_shape("llama-3.1-70b");
  const PlanDevices devices{.rates = *device_rates("h100")};
  std::vector<RankedPlan> plans;
  for (LayoutPlan& plan : rank_layouts(shape, {{.dp = 64}, {.tp = 4, .dp = 4, .pp = 4}}, work_of_a_step(), {}, devices))
    plans.push_back({std::move(plan), false});
  std::ostringstream out;
  print_plans(out, plans, devices);
  EXPECT_THAT(out.str(), HasSubstr("\ntp=4,cp=1,ep=1,dp=4,pp=4,etp=1"));
  EXPECT_THAT(out.str(), HasSubstr("not yet\nrefused: 1 of 2\n"));
  EXPECT_THAT(out.str(), HasSubstr("tp=1,cp=1,ep=1,dp=64,pp=1,etp=1  wants "));
  EXPECT_THAT(nearest_text(plans.back().plan, devices), HasSubstr("dp=64,pp=1,etp=1 wants least, "));
}

}  // namespace
}  // namespace trireme
