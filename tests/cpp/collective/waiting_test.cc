// What ranks do while they wait for each other, and what they leave alone.
#include <gtest/gtest.h>

#include <thread>

#include "collective/world.h"

namespace jaxfabric::testing {
namespace {

std::string Text(const Status& status) { return status.ok() ? "" : status.ToString() + "\n"; }

// A ring is a system call and wakes a thread: 8 us per call where a call takes 0.3 us.
TEST(Waiting, RanksInStepRingNobody) {
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "ranks on one core do sleep";
  World world({2, 1});
  const size_t call = world.Add({OpKind::kAllReduce, DType::kFloat32, 4, 2, ReduceOp::kSum, {}, 0});
  constexpr int kLaunches = 4000;
  std::string failures = world.OnEveryRank(
      [&](LocalRanks& ranks, int local) { return Text(ranks.Run(call, local, 0)); });
  uint64_t rings = 0;
  uint64_t late = 0;  // executions that became the progress threads' business
  const auto count = [&](int sign) {
    for (int process = 0; process < 2; ++process) {
      Fabric& fabric = world.fabric(process);
      rings += static_cast<uint64_t>(sign) * fabric.Bell(process)->bell.load();
      late += static_cast<uint64_t>(sign) * fabric.Counters()["handed_off"];
    }
  };
  count(-1);
  failures += world.OnEveryRank([&](LocalRanks& ranks, int local) {
    std::string own;
    for (int launch = 1; launch <= kLaunches; ++launch) {
      own += Text(ranks.Run(call, local, launch));
    }
    return own;
  });
  count(1);
  EXPECT_EQ(failures, "");
  EXPECT_LE(rings, 4 * late + kLaunches / 100);
}

}  // namespace
}  // namespace jaxfabric::testing
