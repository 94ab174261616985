// A critic on ranks of its own against one on the actor's: values, training, checkpoints.
#include "trainer/algorithms/critic_role.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/algorithms/recorded_rollout.h"
#include "tests/unit/errors.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/algorithms/critic_follower.h"

namespace trireme {
namespace {

Config role_settings() {
  Config c = test::settings(/*dynamic=*/false);
  c.loss_fn.reference_policy_kl_penalty = 0;
  c.policy.optimizer.kwargs.lr = 1e-4;
  c.value_loss_fn = {.scale = 1, .cliprange = 0.5};
  return c;
}

std::vector<Sample> valued_rollout() {
  std::vector<Sample> samples = test::recorded();
  samples[3].loss_multiplier = 0;
  samples[5].loss_mask.assign(samples[5].response.size(), 1);
  samples[5].loss_mask[0] = 0;
  return samples;
}

void add_returns(std::vector<Sample>& samples) {
  for (Sample& s : samples) s.returns.assign(s.response.size(), s.raw_reward - 1);
}

struct RoleOutcome {
  std::vector<Sample> samples;  // with values of before training
  CriticTrained trained;
  at::Tensor weights;
  std::vector<std::string> errors;  // by rank of the job
};

// A critic's parts on this rank.
struct TinyCritic {
  explicit TinyCritic(ParallelContext& context) {
    const ModelConfig shape = test::tiny().with_value_head();
    ModelOptions options;
    set_split(options, shape.shape(), context);
    state.model = std::make_unique<Model>(shape, options);
    init_parameters(*state.model, 9);
    AdamWOptions adam;
    adam.bucket_elements = 4096;
    state.optimizer = std::make_unique<DistributedAdamW>(*state.model, context.data_parallel(), adam);
    trainer = std::make_unique<CriticTrainer>(config, *state.model, *state.optimizer, context);
  }
  const Config config = role_settings();
  CriticState state;
  std::unique_ptr<CriticTrainer> trainer;
};

RoleOutcome on_the_actors_rank() {
  RoleOutcome outcome;
  ParallelContext context;
  TinyCritic tiny(context);
  outcome.samples = valued_rollout();
  LocalCritic critic(std::move(tiny.trainer));
  critic.begin_values(outcome.samples, 1);
  critic.finish_values(outcome.samples);
  add_returns(outcome.samples);
  critic.begin_training(outcome.samples, 2, 1);
  outcome.trained = critic.finish_training();
  outcome.weights = tiny.state.model->flat_parameters().detach().clone();
  return outcome;
}

void follow_as_critic(ParallelContext& context, const std::filesystem::path& dir, bool spoil, RoleOutcome& outcome) {
  TinyCritic tiny(context);
  Mail mail(context);
  tiny.trainer->on_progress = [&] { mail.beat(); };
  if (spoil) tiny.state.model->flat_parameters().detach().fill_(std::numeric_limits<float>::quiet_NaN());
  CheckpointOptions options;
  options.directory = dir / "value";
  options.follows = dir;
  options.folder = "value";
  CheckpointManager checkpoints(options, {{"value", "tiny"}}, context);
  checkpoints.on_written = [&] { context.store()->add(critic_mail::kSaving, 1); };
  checkpoints.committed = [&](int64_t step) { context.store()->set(critic_mail::saved(step), ""); };
  CriticFollower follower(context, mail, tiny.state, *tiny.trainer, checkpoints, 0);
  run_and_report(context, [&] {
    EXPECT_EQ(follower.follow().end, LoopEnd::kStopped);
    EXPECT_EQ(follower.steps(), 1);
  });
  if (context.is_main()) outcome.weights = tiny.state.model->flat_parameters().detach().clone();
}

// One step of an actor's ranks with a critic's; some samples are sent ahead. `dir`: of checkpoints.
RoleOutcome on_its_own_ranks(const Layout& of_actor, const Layout& of_critic, const std::filesystem::path& dir,
                             bool spoil = false) {
  const auto actors = static_cast<int>(of_actor.world()), critics = static_cast<int>(of_critic.world());
  ListeningPort port;
  RoleOutcome outcome;
  outcome.errors = test::on_ranks(actors + critics, [&](int job_rank) {
    RendezvousOptions place = test::role_place(port, job_rank, actors, critics, Milliseconds(120000));
    if (place.of_critic) place.layout = of_actor;
    ParallelContext context(place.of_critic ? of_critic : of_actor, place);
    if (place.of_critic) return follow_as_critic(context, dir, spoil, outcome);
    CriticLink link(context, role_settings());
    RemoteCritic critic(link);
    std::vector<Sample> samples = valued_rollout();
    // Each leader's own; more than a critic rank may come to before it is asked.
    const bool leads = context.generation().leads();
    for (size_t i = static_cast<size_t>(context.rank()) * 4; leads && i + 2 <= 16; i += static_cast<size_t>(actors) * 4)
      critic.ahead(&samples[i], 2);
    context.world().barrier();  // as the exchange of a rollout is one
    critic.begin_values(samples, 1);
    context.world().barrier();  // as passes of the actor's ranks, which come between
    critic.finish_values(samples);
    add_returns(samples);
    critic.begin_training(samples, 2, 1);
    const CriticTrained trained = critic.finish_training();
    EXPECT_FALSE(link.asked_to_stop());
    link.save(1, {{"val:accuracy", 0.5}});
    if (context.is_main()) link.wait_saved(1, std::atomic<bool>{false});
    link.end(/*stopped=*/true);
    if (context.rank() != actors - 1) return;
    outcome.samples = samples;
    outcome.trained = trained;
  });
  return outcome;
}

TEST(CriticRoles, ItsOwnRanksGiveWhatTheActorsGive) {
  const RoleOutcome local = on_the_actors_rank();
  for (const auto& [actors, critics] : {std::pair{1, 1}, {1, 2}, {2, 1}, {2, 3}}) {
    const std::string which = std::to_string(actors) + " actor, " + std::to_string(critics) + " critic ranks";
    const TemporaryDirectory dir;
    const RoleOutcome own = on_its_own_ranks({.dp = actors}, {.dp = critics}, dir.path());
    for (const std::string& error : own.errors) EXPECT_EQ(error, "") << which;
    ASSERT_EQ(own.samples.size(), local.samples.size()) << which;
    for (size_t i = 0; i < own.samples.size(); ++i) {
      const std::vector<float>&a = own.samples[i].values, &b = local.samples[i].values;
      ASSERT_EQ(a.size(), b.size()) << which;
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << which << ", sample " << i;
    }
    ASSERT_EQ(own.trained.metrics.size(), local.trained.metrics.size()) << which;
    for (const auto& [name, value] : local.trained.metrics)
      EXPECT_NEAR(own.trained.metrics.at(name), value, 1e-5 * std::max(1.0, std::abs(value))) << which << " " << name;
    // Adam makes a whole step of a gradient that is nothing but rounding: in the mean, not element by element.
    EXPECT_LE((own.weights - local.weights).abs().mean().item<double>(), critics == 1 ? 1e-9 : 2e-6) << which;
    EXPECT_TRUE(std::filesystem::exists(dir.path() / "value/step_1/value/weights/config.json")) << which;
    EXPECT_EQ(list_checkpoints(dir.path() / "value").front().metrics.at("val:accuracy"), 0.5) << which;
  }
}

// An actor that its ranks split, a critic that its own do, each by its own layout; values of tp 1 to the bit.
TEST(CriticRoles, EitherMayBeSplitByALayoutOfItsOwn) {
  const RoleOutcome local = on_the_actors_rank();
  for (const auto& [actor, critic] : {std::pair{Layout{.tp = 2}, Layout{.dp = 2}},
                                      {Layout{}, Layout{.tp = 2}},
                                      {Layout{.pp = 2}, Layout{.pp = 2}},
                                      {Layout{.tp = 2}, Layout{.cp = 2}}}) {
    const std::string which = "actor " + to_string(actor) + ", critic " + to_string(critic);
    const TemporaryDirectory dir;
    const RoleOutcome own = on_its_own_ranks(actor, critic, dir.path());
    for (const std::string& error : own.errors) EXPECT_EQ(error, "") << which;
    ASSERT_EQ(own.samples.size(), local.samples.size()) << which;
    for (size_t i = 0; i < own.samples.size(); ++i) {
      const std::vector<float>&a = own.samples[i].values, &b = local.samples[i].values;
      ASSERT_EQ(a.size(), b.size()) << which;
      const bool same = std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
      EXPECT_TRUE(same || critic.tp > 1) << which << ", sample " << i;
      for (size_t t = 0; t < a.size(); ++t) EXPECT_NEAR(a[t], b[t], 1e-5) << which;
    }
    for (const auto& [name, value] : local.trained.metrics)
      EXPECT_NEAR(own.trained.metrics.at(name), value, 1e-5 * std::max(1.0, std::abs(value))) << which << " " << name;
    const auto saved = load_value_model(dir.path() / "value/step_1/value/weights", {});
    EXPECT_LE((saved->flat_parameters() - local.weights).abs().mean().item<double>(), 2e-6) << which;
  }
}

TEST(CriticRoles, NothingIsSentAheadToRanksThatComputeTogether) {
  for (const bool together : {false, true}) {
    ListeningPort port;
    const std::vector<std::string> errors = test::on_ranks(2, [&](int job_rank) {
      ParallelContext context({}, test::role_place(port, job_rank, 1, 1, Milliseconds(120000)));
      const auto await = [&](const char* key) {
        const Deadline limit = Deadline::after(Milliseconds(120000));
        while (!context.store()->has(key) && !limit.passed()) std::this_thread::sleep_for(Milliseconds(5));
      };
      if (context.of_critic()) {
        Mail mail(context);
        (void)mail.wait(critic_mail::kBegin, 0, "the actor to begin");
        mail.post(critic_mail::kReady, together ? critic_mail::kTogether : "");
        await("looked");
        context.store()->set("left", "");
        return;
      }
      CriticLink link(context, role_settings());
      link.begin(0, false);
      const RemoteCritic critic(link);
      EXPECT_EQ(critic.works_ahead(), !together);
      EXPECT_EQ(critic.works_in_waits(), !together);
      context.store()->set("looked", "");
      await("left");  // this rank serves the store
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

// A save of the critic may take longer than a collective's deadline, as long as it moves.
TEST(CriticRoles, TheActorWaitsForTheCriticsCheckpointWhileItMoves) {
  ListeningPort port;
  const std::vector<std::string> errors = test::on_ranks(2, [&](int job_rank) {
    ParallelContext context({}, test::role_place(port, job_rank, 1, 1, Milliseconds(2500)));
    if (context.of_critic()) {
      for (int sign = 0; sign < 12; ++sign) {
        std::this_thread::sleep_for(Milliseconds(300));
        context.store()->add(critic_mail::kSaving, 1);
      }
      context.store()->set(critic_mail::saved(1), "");
      const Deadline limit = Deadline::after(Milliseconds(120000));
      while (!context.store()->has("waited") && !limit.passed()) std::this_thread::sleep_for(Milliseconds(5));
      context.store()->set("left", "");
      return;
    }
    CriticLink link(context, role_settings());
    const std::atomic<bool> cancelled{false};
    int moves = 0;
    link.wait_saved(1, cancelled, [&] { ++moves; });
    EXPECT_GE(moves, 5);
    try {
      link.wait_saved(2, cancelled);
      ADD_FAILURE() << "nothing moves";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
      EXPECT_NE(std::string(error.what()).find("critic rank 0"), std::string::npos) << error.what();
    }
    context.store()->set("waited", "");
    (void)context.store()->get("left");  // this rank serves the store
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(CriticRoles, AValueThatIsNotFiniteEndsBothAndNamesSampleAndToken) {
  const TemporaryDirectory dir;
  const RoleOutcome own = on_its_own_ranks({}, {}, dir.path(), /*spoil=*/true);
  EXPECT_NE(own.errors[0].find("critic rank 0"), std::string::npos) << own.errors[0];
  for (const std::string& error : own.errors)
    EXPECT_NE(error.find("the critic's value before token 0 of the response of sample"), std::string::npos) << error;
}

}  // namespace
}  // namespace trireme
