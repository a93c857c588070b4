// What may meet and what may not: equal calls, loops of many launches, meshes with equal positions.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "collective/world.h"

namespace jaxfabric::testing {
namespace {

class MatchingTest : public ::testing::TestWithParam<Shape> {
 protected:
  static Problem AllReduce(size_t count) {
    return Problem{
        OpKind::kAllReduce, DType::kFloat32, count, GetParam().size(), ReduceOp::kSum, {}, 0};
  }
};

// Equal attributes, other data, in another order on every rank.
TEST_P(MatchingTest, DuplicatesNeverMeetEachOther) {
  for (size_t count : {size_t{3}, size_t{2000}, size_t{70000}}) {
    World world(GetParam());
    constexpr int kCalls = 12;
    world.Add(AllReduce(count));
    for (int process = 0; process < world.shape().processes; ++process) {
      for (int i = 1; i < kCalls; ++i) {
        world.ranks(process).AddDuplicate(0, static_cast<uint32_t>(i));
      }
    }
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
      std::mt19937_64 random(static_cast<uint64_t>(ranks.position(local)));
      std::vector<size_t> order(kCalls);
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::string failures;
      for (int launch = 0; launch < 6; ++launch) {
        const auto data = [&](size_t call) { return launch * 100 + static_cast<int>(call); };
        std::vector<std::unique_ptr<LocalRanks::Execution>> executions(kCalls);
        std::shuffle(order.begin(), order.end(), random);
        for (size_t call : order) {
          executions[call] = ranks.Enter(call, local, launch, data(call));
        }
        for (size_t call : order) {
          failures += Text(ranks.Check(call, local, data(call), *executions[call]));
        }
      }
      return failures;
    }),
              "");
  }
}

// XLA has up to 32 launches of one executable in flight on a device; each may be in a loop.
TEST_P(MatchingTest, LoopsOfManyLaunchesKeepTheirCounts) {
  World world(GetParam());
  world.Add(AllReduce(50));
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
    std::string failures = Text(ranks.Run(0, local, 0));
    std::mt19937_64 random(static_cast<uint64_t>(ranks.position(local)) + 9);
    constexpr int kLaunches = 32;
    for (int occurrence = 0; occurrence < 6; ++occurrence) {
      for (int first = 1; first <= kLaunches; first += 2) {
        // Neighbours in another order on every rank.
        std::vector<int> launches = {first, first + 1};
        std::shuffle(launches.begin(), launches.end(), random);
        std::vector<std::unique_ptr<LocalRanks::Execution>> executions;
        const auto data = [&](int launch) { return 1000 * occurrence + launch; };
        for (int launch : launches) {
          executions.push_back(ranks.Enter(0, local, launch, data(launch)));
        }
        for (size_t i = 0; i < launches.size(); ++i) {
          failures += Text(ranks.Check(0, local, data(launches[i]), *executions[i]));
        }
      }
    }
    return failures;
  }),
            "");
}

// One launch that waits while the others go on: it must still be noticed when it can end.
TEST_P(MatchingTest, AnExecutionMayBeOvertakenByManyOthers) {
  if (GetParam().processes == 1) GTEST_SKIP() << "devices of one process enter in one order";
  for (OpKind kind : {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kPermute}) {
    for (size_t count : {size_t{4}, size_t{3000}, size_t{80000}}) {
      World world(GetParam());
      Problem problem = AllReduce(count);
      problem.kind = kind;
      world.Add(problem);
      EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
        std::string failures = Text(ranks.Run(0, local, 0));
        constexpr int kLate = 40;
        std::unique_ptr<LocalRanks::Execution> late;
        // The last launch enters first on one rank, last on the others.
        if (ranks.position(local) == 0) late = ranks.Enter(0, local, kLate);
        for (int launch = 1; launch < kLate; ++launch) {
          failures += Text(ranks.Run(0, local, launch));
        }
        if (!late) late = ranks.Enter(0, local, kLate);
        return failures + Text(ranks.Check(0, local, kLate, *late));
      }),
                "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, MatchingTest,
                         ::testing::Values(Shape{1, 2}, Shape{1, 4}, Shape{2, 1}, Shape{2, 2},
                                           Shape{3, 1}, Shape{2, 1, 2}),
                         ShapeName);

}  // namespace
}  // namespace jaxfabric::testing
