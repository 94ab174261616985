#include "trainer/parallel/exposed_waits.h"

#include <gtest/gtest.h>

#include <thread>

namespace trireme {
namespace {

using Kind = ExposedWaits::Kind;

TEST(ExposedWaits, CountsFromStartToTakeAndExpertsApart) {
  ExposedWaits waits;
  waits.add(Kind::kExchange, 100);
  waits.start();
  waits.add(Kind::kExchange, 1);
  waits.add(Kind::kStage, 2);
  {
    const ExposedWaits::ForExperts outer;
    waits.add(Kind::kExchange, 4);
    {
      const ExposedWaits::ForExperts inner;
      waits.add(Kind::kExchange, 8);
    }
    waits.add(Kind::kExchange, 16);
    waits.add(Kind::kStage, 32);
    std::thread([&] { waits.add(Kind::kExchange, 64); }).join();  // of another thread, for something else
  }
  waits.add(Kind::kExchange, 128);
  const ExposedWaits::Seconds seconds = waits.take();
  EXPECT_EQ(seconds.exchange, 1 + 4 + 8 + 16 + 64 + 128);
  EXPECT_EQ(seconds.experts, 4 + 8 + 16);
  EXPECT_EQ(seconds.stage, 2 + 32);
  waits.add(Kind::kExchange, 100);
  EXPECT_EQ(waits.take().exchange, 0);
}

}  // namespace
}  // namespace trireme
