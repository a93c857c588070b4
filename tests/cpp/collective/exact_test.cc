// Every op, size and type on real fabrics, in every composition of processes and ranks: each rank's
// result is compared with the one result the contract allows.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "collective/world.h"

namespace jaxfabric::testing {
namespace {

// Edges: nothing, one element, the publish line, a cache line, where algorithms change, a segment
// and a ring, each with its neighbours.
std::vector<size_t> EdgeCounts(size_t element) {
  std::vector<size_t> counts = {0, 1};
  for (size_t bytes : {40, 64, 1216, 2048, 4096, 8192, 65536}) {
    const size_t count = bytes / element;
    counts.insert(counts.end(), {count - 1, count, count + 1});
  }
  counts.push_back(100003 / element);
  return counts;
}

std::string RunAll(LocalRanks& ranks, int local, size_t calls, int launches, uint64_t seed) {
  std::mt19937_64 random(seed + static_cast<uint64_t>(ranks.position(local)));
  std::vector<size_t> order(calls);
  for (size_t i = 0; i < calls; ++i) order[i] = i;
  std::string failures;
  for (int launch = 0; launch < launches; ++launch) {
    // Every rank in another order, as XLA does.
    std::shuffle(order.begin(), order.end(), random);
    std::vector<std::unique_ptr<LocalRanks::Execution>> executions(calls);
    for (size_t call : order) executions[call] = ranks.Enter(call, local, launch);
    for (size_t call : order) {
      const Status status = ranks.Check(call, local, launch, *executions[call]);
      if (!status.ok()) failures += status.ToString() + "\n";
    }
  }
  return failures;
}

class ExactTest : public ::testing::TestWithParam<Shape> {};

TEST_P(ExactTest, EdgeSizes) {
  World world(GetParam());
  size_t calls = 0;
  for (size_t count : EdgeCounts(4)) {
    for (const Problem& problem : EveryKind(world.shape().size(), count)) {
      calls = world.Add(problem) + 1;
    }
  }
  EXPECT_EQ(world.OnEveryRank(
                [&](LocalRanks& ranks, int local) { return RunAll(ranks, local, calls, 2, 1); }),
            "");
}

TEST_P(ExactTest, EveryType) {
  World world(GetParam());
  size_t calls = 0;
  for (DType dtype : {DType::kBool, DType::kInt8, DType::kInt16, DType::kInt64, DType::kUint32,
                      DType::kFloat16, DType::kBfloat16, DType::kFloat64, DType::kComplex64,
                      DType::kComplex128, DType::kFloat8E4M3FN, DType::kFloat8E5M2}) {
    for (size_t count : {3, 1001, 20011}) {
      for (const Problem& problem : EveryKind(world.shape().size(), count, dtype)) {
        calls = world.Add(problem) + 1;
      }
    }
  }
  EXPECT_EQ(world.OnEveryRank(
                [&](LocalRanks& ranks, int local) { return RunAll(ranks, local, calls, 1, 2); }),
            "");
}

TEST_P(ExactTest, LargeBlocks) {
  World world(GetParam());
  const auto n = static_cast<size_t>(world.shape().size());
  size_t calls = 0;
  // Around a ring, and several times around it.
  for (size_t bytes : {1048576 / n - 4, 1048576 / n, 1048576 / n + 4, 5000004 / n / 4 * 4}) {
    for (const Problem& problem : EveryKind(world.shape().size(), bytes / 4)) {
      calls = world.Add(problem) + 1;
    }
  }
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
    std::string failures;
    for (size_t call = 0; call < calls; ++call) {
      for (int launch = 0; launch < 2; ++launch) {
        const Status status = ranks.Run(call, local, launch);
        if (!status.ok()) failures += status.ToString() + "\n";
      }
    }
    return failures;
  }),
            "");
}

// So little staging that executions live on their cells' reserve.
TEST_P(ExactTest, ScarceStaging) {
  Options options = TestOptions();
  options.segment_bytes = 256 * 1024;
  World world(GetParam(), options);
  size_t calls = 0;
  for (size_t count : {100, 3000, 20000}) {
    for (const Problem& problem : EveryKind(world.shape().size(), count)) {
      // Cells are scarce as well: a quarter of the segment.
      if (calls < 24) calls = world.Add(problem) + 1;
    }
  }
  EXPECT_EQ(world.OnEveryRank(
                [&](LocalRanks& ranks, int local) { return RunAll(ranks, local, calls, 4, 3); }),
            "");
}

// Launches of one program that enter in another order on every rank.
std::string RunLaunchesOutOfOrder(World& world, size_t calls, int windows) {
  return world.OnEveryRank([&](LocalRanks& ranks, int local) {
    std::mt19937_64 random(static_cast<uint64_t>(ranks.position(local)));
    std::string failures;
    // The first launch settles the clock alone.
    for (size_t call = 0; call < calls; ++call) failures += Text(ranks.Run(call, local, 0));
    for (int window = 0; window < windows; ++window) {
      std::vector<std::pair<size_t, int>> order;
      for (int launch = 0; launch < kSlots; ++launch) {
        for (size_t call = 0; call < calls; ++call) {
          order.emplace_back(call, 1 + window * kSlots + launch);
        }
      }
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::unique_ptr<LocalRanks::Execution>> executions;
      for (auto [call, launch] : order) executions.push_back(ranks.Enter(call, local, launch));
      for (size_t i = 0; i < order.size(); ++i) {
        const auto [call, launch] = order[i];
        failures += Text(ranks.Check(call, local, launch, *executions[i]));
      }
    }
    return failures;
  });
}

TEST_P(ExactTest, OutOfOrderLaunches) {
  World world(GetParam());
  size_t calls = 0;
  for (const Problem& problem : EveryKind(world.shape().size(), 5000)) {
    calls = world.Add(problem) + 1;
  }
  EXPECT_EQ(RunLaunchesOutOfOrder(world, calls, 25), "");
}

// All executions of a cell go on by its reserve, whichever began first.
TEST_P(ExactTest, OutOfOrderLaunchesWithoutStaging) {
  Options options = TestOptions();
  options.segment_bytes = 256 * 1024;
  World world(GetParam(), options);
  size_t calls = 0;
  for (const Problem& problem : EveryKind(world.shape().size(), 300)) {
    calls = world.Add(problem) + 1;
  }
  for (int process = 0; process < world.shape().processes; ++process) {
    Participant& user = world.ranks(process).participant(0, 0);
    while (world.fabric(process).TryAllocateStaging(64, user)) continue;
  }
  EXPECT_EQ(RunLaunchesOutOfOrder(world, calls, 10), "");
}

// A rank that only sends runs ahead until its slots are used up, and goes on when they are free.
TEST_P(ExactTest, OneWaySenderRunsAhead) {
  World world(GetParam());
  for (size_t count : {5, 3000, 60000}) {
    Problem problem{OpKind::kPermute,
                    DType::kInt32,
                    count,
                    world.shape().size(),
                    ReduceOp::kSum,
                    {0, world.shape().size() - 1},
                    0};
    world.Add(problem);
  }
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
    std::string failures;
    for (size_t call = 0; call < 3; ++call) {
      std::vector<std::unique_ptr<LocalRanks::Execution>> executions;
      for (int launch = 0; launch < 64; ++launch) {
        executions.push_back(ranks.Enter(call, local, launch));
      }
      for (int launch = 0; launch < 64; ++launch) {
        const Status status =
            ranks.Check(call, local, launch, *executions[static_cast<size_t>(launch)]);
        if (!status.ok()) failures += status.ToString() + "\n";
      }
    }
    return failures;
  }),
            "");
}

// By parts of the hosts' ranks, so that each host sends an array once and not once for each rank.
TEST(ExactHostsTest, LargeCallsBetweenHostsOfSeveralRanksGoByParts) {
  World world({2, 2, 2});
  for (const size_t count : {10, 20000}) {
    std::map<std::string, uint64_t> before = world.fabric(0).Counters();
    std::vector<size_t> calls;
    for (const Problem& problem : EveryKind(4, count)) calls.push_back(world.Add(problem));
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
      std::string failures;
      for (const size_t call : calls) failures += Text(ranks.Run(call, local, 0));
      return failures;
    }),
              "");
    // all_reduce, reduce_scatter, all_gather, broadcast, of both ranks of the process.
    EXPECT_EQ(world.fabric(0).Counters()["run_by_hosts"] - before["run_by_hosts"],
              count < 100 ? 0 : 8)
        << count;
  }
}

// So that a host of two ranks sends two messages, and not two to each of the other's processes.
TEST(ExactHostsTest, SmallCallsOfHostsWithSeveralProcessesAreRelayed) {
  for (const Shape shape : {Shape{4, 1, 2}, Shape{2, 2, 2}}) {
    World world(shape);
    std::vector<size_t> calls;
    for (const Problem& problem : EveryKind(4, 100)) calls.push_back(world.Add(problem));
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
      std::string failures;
      for (const size_t call : calls) failures += Text(ranks.Run(call, local, 0));
      return failures;
    }),
              "");
    // all_reduce, reduce_scatter, all_gather, all_to_all. The ranks of one process need no more
    // than one message to another one anyway.
    EXPECT_EQ(world.fabric(0).Counters()["run_by_relay"], shape.processes == 4 ? 4 : 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ExactTest,
                         ::testing::Values(Shape{1, 1}, Shape{1, 2}, Shape{1, 4}, Shape{1, 7},
                                           Shape{2, 1}, Shape{3, 1}, Shape{2, 2}, Shape{4, 2},
                                           Shape{8, 1}, Shape{2, 1, 2}, Shape{2, 2, 2},
                                           Shape{3, 2, 2}, Shape{5, 1, 3}, Shape{4, 1, 2},
                                           Shape{4, 2, 2}),
                         ShapeName);

}  // namespace
}  // namespace jaxfabric::testing
