// Roles: ranks of an actor and of a critic in one job, their groups, and messages between them.
#include "trainer/parallel/mail.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "tests/unit/parallel/ranks.h"

namespace trireme {
namespace {

// body(context) on each rank of a job of `actors` and `critics`; what each threw, by its rank of the job.
std::vector<std::string> on_roles(int actors, int critics, Milliseconds timeout,
                                  const std::function<void(ParallelContext&)>& body) {
  ListeningPort port;
  return test::on_ranks(actors + critics, [&](int job_rank) {
    const RendezvousOptions place = test::role_place(port, job_rank, actors, critics, timeout);
    Layout layout;
    layout.dp = place.world_size;
    ParallelContext context(layout, place);
    body(context);
    // Rank 0 serves the store: it leaves last.
    const std::string left = "left";
    if (context.job_rank() > 0) {
      context.store()->add(left, 1);
      return;
    }
    const Deadline limit = Deadline::after(Milliseconds(60000));
    while (context.store()->add(left, 0) < actors + critics - 1 && !limit.passed())
      std::this_thread::sleep_for(Milliseconds(5));
  });
}

void expect_no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(Roles, HaveTheirOwnRanksGroupsAndNames) {
  expect_no_errors(on_roles(2, 3, Milliseconds(60000), [](ParallelContext& context) {
    const int size = context.of_critic() ? 3 : 2;
    EXPECT_EQ(context.world_size(), size);
    EXPECT_EQ(context.job_size(), 5);
    EXPECT_EQ(context.actor_ranks(), 2);
    EXPECT_EQ(context.critic_ranks(), 3);
    EXPECT_EQ(context.job_rank(), context.rank() + (context.of_critic() ? 2 : 0));
    EXPECT_EQ(context.name(), (context.of_critic() ? "critic rank " : "rank ") + std::to_string(context.rank()));
    EXPECT_EQ(context.is_main(), context.rank() == 0);
    // Both roles' collectives at once, over the own ranks only.
    EXPECT_EQ(context.world().all_reduce_sum(int64_t{1}), size);
    EXPECT_EQ(context.data_parallel().size(), size);
    EXPECT_EQ(context.data_parallel().all_reduce_sum(static_cast<int64_t>(context.rank())), size * (size - 1) / 2);
  }));
}

TEST(Roles, OfOneRankEachAreAJobOfTwo) {
  expect_no_errors(on_roles(1, 1, Milliseconds(60000), [](ParallelContext& context) {
    EXPECT_EQ(context.world_size(), 1);
    EXPECT_NE(context.store(), nullptr);
    EXPECT_EQ(context.world().all_reduce_sum(int64_t{7}), 7);
  }));
}

TEST(Roles, ACriticThatIsNotToldTheActorsIsRefused) {
  RendezvousOptions place;
  place.of_critic = true;
  EXPECT_THROW(ParallelContext(Layout{}, place), Error);
}

TEST(Mail, EveryReaderGetsEveryByteOnceAndNothingIsLeft) {
  std::string large(3 * (1 << 20) + 17, '\0');
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 31 + i / 251);
  expect_no_errors(on_roles(1, 2, Milliseconds(60000), [&](ParallelContext& context) {
    Mail mail(context);
    if (!context.of_critic()) {
      EXPECT_FALSE(mail.take("large").has_value());
      mail.post("large", large, 2);
      mail.post("empty", "", 2);
      for (int rank = 1; rank <= 2; ++rank)
        EXPECT_EQ(mail.wait("answer-" + std::to_string(rank), rank, "an answer"), std::to_string(rank));
      EXPECT_FALSE(context.store()->has("large"));
      EXPECT_FALSE(context.store()->has("large-part-3"));
      EXPECT_FALSE(context.store()->has("empty"));
      return;
    }
    EXPECT_EQ(mail.wait("large", 0, "the large one"), large);
    EXPECT_EQ(mail.wait("empty", 0, "the empty one"), "");
    context.world().barrier();  // both have read
    mail.post("answer-" + std::to_string(context.job_rank()), std::to_string(context.job_rank()));
  }));
}

TEST(Mail, ALengthThatItDoesNotHaveIsRefusedAtItsFirstPart) {
  expect_no_errors(on_roles(1, 1, Milliseconds(60000), [](ParallelContext& context) {
    if (context.of_critic()) return;
    Mail mail(context);
    context.store()->set("forged-part-0", "three");
    for (const char* header : {"68719476736 1", "4 1", "6 1"}) {  // no room is made for 64 GiB, no part awaited
      context.store()->set("forged", header);
      try {
        (void)mail.take("forged");
        ADD_FAILURE() << header;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kData) << header;
        EXPECT_NE(std::string(error.what()).find("has 5 bytes in 1 of its parts"), std::string::npos) << error.what();
      }
    }
    for (const char* header : {"5", "5 0", "-1 1", "68719476737 1", "x 1"}) {
      context.store()->set("forged", header);
      EXPECT_THROW(mail.take("forged"), Error) << header;
    }
  }));
}

TEST(Mail, AWaitLastsAsLongAsTheSenderLives) {
  expect_no_errors(on_roles(1, 1, Milliseconds(4000), [](ParallelContext& context) {
    Mail mail(context);  // its patience is 6 s
    if (context.of_critic()) {
      EXPECT_EQ(mail.wait("late", 0, "what is late"), "here");
      return;
    }
    const Deadline until = Deadline::after(mail.patience() + Milliseconds(2000));
    while (!until.passed()) {
      mail.beat();
      std::this_thread::sleep_for(Milliseconds(20));
    }
    mail.post("late", "here");
  }));
}

TEST(Mail, ASilentSenderIsNamedAtTheDeadline) {
  const std::vector<std::string> errors = on_roles(1, 1, Milliseconds(4000), [](ParallelContext& context) {
    Mail mail(context);
    if (context.of_critic()) {
      context.set_phase("values");
      const Deadline limit = Deadline::after(Milliseconds(200000));
      while (!context.store()->has("named") && !limit.passed()) std::this_thread::sleep_for(Milliseconds(20));
      return;
    }
    std::string error;
    try {
      (void)mail.wait("never", 1, "the values of step 3");
    } catch (const Error& thrown) {
      EXPECT_EQ(thrown.kind(), ErrorKind::kTimeout);
      error = thrown.what();
    }
    context.store()->set("named", "");
    EXPECT_NE(error.find("waits for the values of step 3: critic rank 0 (last seen in phase values)"),
              std::string::npos)
        << error;
  });
  expect_no_errors(errors);
}

TEST(Mail, AFailureOfTheOtherRoleEndsTheWait) {
  expect_no_errors(on_roles(1, 1, Milliseconds(60000), [](ParallelContext& context) {
    Mail mail(context);
    if (context.of_critic()) {
      context.report_failure("critic rank 0 on here in phase values: a value is not finite");
      return;
    }
    std::string error;
    try {
      (void)mail.wait("never", 1, "values");
    } catch (const Error& thrown) {
      EXPECT_EQ(thrown.kind(), ErrorKind::kUnavailable);
      error = thrown.what();
    }
    EXPECT_NE(error.find("critic rank 0 on here in phase values: a value is not finite"), std::string::npos) << error;
  }));
}

}  // namespace
}  // namespace trireme
