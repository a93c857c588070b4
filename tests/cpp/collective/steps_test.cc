// Patterns run between hosts: all of them, with every op they have, on 2 to 9 hosts.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "collective/world.h"

namespace jaxfabric::testing {
namespace {

constexpr OpKind kOps[] = {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kReduceScatter,
                           OpKind::kAllToAll,  OpKind::kBroadcast, OpKind::kBarrier};

Options With(PatternKind kind) {
  Options options = TestOptions();
  options.pattern = PatternName(kind);
  return options;
}

// Calls of the ops that the pattern has.
std::vector<Problem> ProblemsOf(PatternKind kind, int size, size_t count,
                                DType dtype = DType::kFloat32) {
  std::vector<Problem> problems = EveryKind(size, count, dtype);
  std::erase_if(problems, [kind](const Problem& problem) {
    const bool runs = std::ranges::count(kOps, problem.kind) > 0;
    return !runs || !HasPattern(kind, problem.kind);
  });
  return problems;
}

// Calls and their launches in another order on every rank, as many as may be in flight.
std::string RunShuffled(LocalRanks& ranks, int local, size_t calls, int windows) {
  std::mt19937_64 random(static_cast<uint64_t>(ranks.position(local)));
  std::string failures;
  for (size_t call = 0; call < calls; ++call) {
    // The first launch settles the clock alone.
    failures += Text(ranks.Run(call, local, 0));
  }
  for (int window = 0; window < windows; ++window) {
    std::vector<std::pair<size_t, int>> order;
    for (size_t call = 0; call < calls; ++call) {
      for (int i = 0; i < kSlots; ++i) order.emplace_back(call, 1 + window * kSlots + i);
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
}

class StepsTest : public ::testing::TestWithParam<PatternKind> {};

TEST_P(StepsTest, EverySizeOnTwoToNineHosts) {
  for (int hosts = 2; hosts <= 9; ++hosts) {
    World world({hosts, 1, hosts}, With(GetParam()));
    size_t calls = 0;
    std::vector<size_t> counts = {0, 1, 17, 1003};
    if (hosts == 2 || hosts == 5 || hosts == 8) counts.push_back(9001);
    for (const size_t count : counts) {
      for (const Problem& problem : ProblemsOf(GetParam(), hosts, count)) {
        calls = world.Add(problem) + 1;
      }
    }
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
      return RunShuffled(ranks, local, calls, 1);
    }),
              "")
        << hosts << " hosts";
    // Nothing went another way.
    uint64_t run = 0;
    const auto counters = world.fabric(0).Counters();
    if (const auto by = counters.find("run_by_" + std::string(PatternName(GetParam())));
        by != counters.end()) {
      run = by->second;
    }
    EXPECT_EQ(run, calls) << hosts << " hosts";
  }
}

TEST_P(StepsTest, EveryType) {
  constexpr int kHosts = 5;
  World world({kHosts, 1, kHosts}, With(GetParam()));
  size_t calls = 0;
  for (DType dtype : {DType::kBool, DType::kInt8, DType::kInt64, DType::kBfloat16, DType::kFloat16,
                      DType::kFloat64, DType::kComplex128, DType::kFloat8E4M3FN}) {
    for (const size_t count : {3, 1001}) {
      for (const Problem& problem : ProblemsOf(GetParam(), kHosts, count, dtype)) {
        calls = world.Add(problem) + 1;
      }
    }
  }
  EXPECT_EQ(world.OnEveryRank(
                [&](LocalRanks& ranks, int local) { return RunShuffled(ranks, local, calls, 1); }),
            "");
}

// A window without room for staging: patterns need none of it.
TEST_P(StepsTest, ScarceStaging) {
  Options options = With(GetParam());
  options.segment_bytes = 64 * 1024;
  World world({4, 1, 4}, options);
  size_t calls = 0;
  for (const Problem& problem : ProblemsOf(GetParam(), 4, 20000)) calls = world.Add(problem) + 1;
  const uint64_t free = world.fabric(0).Counters()["staging_free_bytes"];
  EXPECT_EQ(world.OnEveryRank(
                [&](LocalRanks& ranks, int local) { return RunShuffled(ranks, local, calls, 4); }),
            "");
  EXPECT_EQ(world.fabric(0).Counters()["staging_free_bytes"], free);
}

// Blocks come back: as much memory as is in use at once, however long it goes on.
TEST_P(StepsTest, MemoryStaysFlat) {
  World world({3, 1, 3}, With(GetParam()));
  size_t calls = 0;
  for (const Problem& problem : ProblemsOf(GetParam(), 3, 3000)) calls = world.Add(problem) + 1;
  std::vector<uint64_t> bytes;
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
      std::string failures;
      for (int launch = 0; launch < 30; ++launch) {
        for (size_t call = 0; call < calls; ++call) {
          failures += Text(ranks.Run(call, local, 30 * round + launch));
        }
      }
      return failures;
    }),
              "");
    bytes.push_back(world.fabric(0).Counters()["message_block_bytes"]);
  }
  EXPECT_GT(bytes[0], 0u);
  // One call at a time, and the one before may still be sending.
  EXPECT_LE(bytes[1], std::max<uint64_t>(bytes[0], 2 * 128 * 1024));
}

TEST_P(StepsTest, ARankThatLeavesInTheMiddleIsNamed) {
  constexpr int kHosts = 4;
  Options options = With(GetParam());
  options.deadline = 10;
  for (const Problem& problem : ProblemsOf(GetParam(), kHosts, 5000)) {
    World world({kHosts, 1, kHosts}, options);
    const size_t call = world.Add(problem);
    EXPECT_EQ(world.OnEveryRank(
                  [&](LocalRanks& ranks, int local) { return Text(ranks.Run(call, local, 0)); }),
              "");
    const auto given_up = world.ranks(kHosts - 1).EnterPartly(call, 0, 1);
    std::atomic<int> waiting{0};
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      if (&ranks == &world.ranks(kHosts - 1)) {
        while (waiting.load() < kHosts - 1) std::this_thread::yield();
        ranks.GiveUp(*given_up);
        ranks.fabric().Shutdown();
        return "";
      }
      const auto execution = ranks.Enter(call, local, 1);
      ++waiting;
      const Status status = ranks.Check(call, local, 1, *execution);
      const bool named = status.ToString().find("rank 6144 (process 3") != std::string::npos &&
                         status.ToString().find("has left") != std::string::npos;
      return status.ok() || named ? "" : Text(status);
    }),
              "")
        << problem.Describe();
  }
}

// Not the neighbour that waits for it: whoever does not come.
TEST_P(StepsTest, ARankThatNeverComesIsNamedAtTheDeadline) {
  constexpr int kHosts = 5;
  Options options = With(GetParam());
  options.deadline = 1;
  for (const Problem& problem : ProblemsOf(GetParam(), kHosts, 100)) {
    // One will do; they take as long as the deadline.
    if (problem.kind != ProblemsOf(GetParam(), kHosts, 100)[0].kind) break;
    World world({kHosts, 1, kHosts}, options);
    const size_t call = world.Add(problem);
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      std::string failures = Text(ranks.Run(call, local, 0));
      if (ranks.position(local) == 2) return failures;
      const Status status = ranks.Run(call, local, 1);
      // Of a broadcast some have all they need.
      if (status.ok() && problem.kind == OpKind::kBroadcast) return failures;
      const std::string text = status.ToString();
      const bool named = status.code() == Code::kDeadlineExceeded &&
                         text.find(" for rank 4096 ") != std::string::npos &&
                         text.find("; rank") == std::string::npos;
      return failures + (named ? "" : "rank 4096 is not named, or others are: " + text + "\n");
    }),
              "")
        << problem.Describe();
  }
}

TEST_P(StepsTest, DifferentSizesAreAnErrorOnEveryRank) {
  constexpr int kHosts = 3;
  for (const Problem& problem : ProblemsOf(GetParam(), kHosts, 900)) {
    if (problem.kind == OpKind::kBarrier) continue;
    World world({kHosts, 1, kHosts}, With(GetParam()));
    for (int process = 0; process < kHosts; ++process) {
      world.ranks(process).AddUnequal(problem, [&](int position) {
        Problem own = problem;
        own.count += position == kHosts - 1 ? 1 : 0;
        return own;
      });
    }
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      const Status status = ranks.Run(0, local, 0);
      const bool told = status.code() == Code::kFailedPrecondition &&
                        status.ToString().find("ranks disagree") != std::string::npos;
      return told ? "" : "no mismatch: " + Text(status) + "\n";
    }),
              "")
        << problem.Describe();
  }
}

INSTANTIATE_TEST_SUITE_P(Patterns, StepsTest, ::testing::ValuesIn(kPatternKinds),
                         [](const auto& tested) {
                           std::string name(PatternName(tested.param));
                           std::ranges::replace(name, '-', '_');
                           return name;
                         });

// All slots are in use on two sides, and nothing was published since their executions have ended:
// neither goes on unless it hears of that from the other.
TEST(StepsTest, EndsAreToldWhenNoSlotIsFree) {
  for (const char* pattern : {"none", "recursive-doubling"}) {
    Options options = TestOptions();
    options.deadline = 5;
    options.pattern = pattern;
    World world({3, 1, 3}, options);
    const size_t call =
        world.Add({OpKind::kAllReduce, DType::kFloat32, 2000, 3, ReduceOp::kSum, {}, 0});
    EXPECT_EQ(world.OnEveryRank(
                  [&](LocalRanks& ranks, int local) { return Text(ranks.Run(call, local, 0)); }),
              "");
    std::vector<std::unique_ptr<LocalRanks::Execution>> executions;
    // The last one comes when the others have published all they can.
    for (int process = 0; process < 3; ++process) {
      for (int launch = 1; launch <= kSlots + 1; ++launch) {
        executions.push_back(world.ranks(process).EnterPartly(call, 0, launch));
      }
    }
    const Deadline patience = Deadline::AfterSeconds(20);
    for (bool all = false; !all && !patience.expired();) {
      all = true;
      for (const auto& execution : executions) {
        execution->op->Advance();
        all &= execution->op->finished();
      }
      std::this_thread::yield();
    }
    for (const auto& execution : executions) {
      EXPECT_TRUE(execution->op->finished()) << pattern;
      world.ranks(0).GiveUp(*execution);
    }
  }
}

// Large and small, and what neither has a pattern nor wants one.
TEST(StepsTest, WhatIsTooLargeGoesAnotherWay) {
  constexpr int kHosts = 3;
  World world({kHosts, 1, kHosts}, With(PatternKind::kRing));
  const Problem small{OpKind::kAllReduce, DType::kFloat32, 1000, kHosts, ReduceOp::kSum, {}, 0};
  Problem large = small;
  large.count = 1000000;
  const size_t first = world.Add(small), second = world.Add(large);
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
    return Text(ranks.Run(first, local, 0)) + Text(ranks.Run(second, local, 0));
  }),
            "");
  auto counters = world.fabric(1).Counters();
  EXPECT_EQ(counters["run_by_ring"], 1u);
  EXPECT_EQ(counters["run_by_two-shot"], 1u);
}

// One rank of each host runs the pattern for all of them.
TEST(SharedHostsTest, SmallSumsAndBarriers) {
  for (const Shape shape : {Shape{4, 2, 2}, Shape{5, 1, 3}, Shape{7, 1, 4}}) {
    for (const PatternKind kind : {PatternKind::kRing, PatternKind::kRecursiveDoubling,
                                   PatternKind::kHalvingDoubling, PatternKind::kDissemination}) {
      World world(shape, With(kind));
      size_t calls = 0;
      for (const size_t count : {0, 1, 25, 64, 65}) {
        for (const Problem& problem : EveryKind(shape.size(), count)) {
          calls = world.Add(problem) + 1;
        }
      }
      EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
        return RunShuffled(ranks, local, calls, 1);
      }),
                "")
          << shape.processes << " " << PatternName(kind);
      auto counters = world.fabric(0).Counters();
      const uint64_t each = static_cast<uint64_t>(shape.ranks_each);
      EXPECT_EQ(counters["run_by_" + std::string(PatternName(kind))],
                each * ((HasPattern(kind, OpKind::kAllReduce) ? 4 : 0) +
                        (HasPattern(kind, OpKind::kBarrier) ? 5 : 0)));
    }
  }
}

// Executions that live on their cells' reserve.
TEST(SharedHostsTest, ScarceStaging) {
  Options options = With(PatternKind::kRecursiveDoubling);
  options.segment_bytes = 64 * 1024;
  const Shape shape{4, 1, 2};
  World world(shape, options);
  size_t calls = 0;
  while (calls < 6) {
    calls = world.Add({OpKind::kAllReduce, DType::kFloat32, 60, 4, ReduceOp::kSum, {}, 0}) + 1;
  }
  // Nothing is left of the pool.
  for (int process = 0; process < shape.processes; ++process) {
    Participant& user = world.ranks(process).participant(0, 0);
    while (world.fabric(process).TryAllocateStaging(64, user)) continue;
  }
  EXPECT_EQ(world.OnEveryRank(
                [&](LocalRanks& ranks, int local) { return RunShuffled(ranks, local, calls, 5); }),
            "");
}

TEST(SharedHostsTest, WhoeverDoesNotComeIsNamed) {
  Options options = With(PatternKind::kRecursiveDoubling);
  options.deadline = 1;
  const Shape shape{4, 2, 2};
  for (const int late : {0, 7}) {
    World world(shape, options);
    const size_t call =
        world.Add({OpKind::kAllReduce, DType::kFloat32, 50, 8, ReduceOp::kSum, {}, 0});
    const std::string name =
        " for rank " + std::to_string(shape.Ids()[static_cast<size_t>(late)]) + " ";
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      std::string failures = Text(ranks.Run(call, local, 0));
      if (ranks.position(local) == late) return failures;
      const std::string text = ranks.Run(call, local, 1).ToString();
      const bool named =
          text.find(name) != std::string::npos && text.find("; rank") == std::string::npos;
      return failures + (named ? "" : name + "is not named, or others are: " + text + "\n");
    }),
              "");
  }
}

}  // namespace
}  // namespace jaxfabric::testing
