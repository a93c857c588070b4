// Instances that come and go, ranks that disagree, failures in the middle.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "collective/world.h"

namespace jaxfabric::testing {
namespace {

Problem AllReduce(int size, size_t count, OpKind kind = OpKind::kAllReduce) {
  return Problem{kind, DType::kFloat32, count, size, ReduceOp::kSum, {}, 0};
}

class LifetimeTest : public ::testing::TestWithParam<Shape> {};

TEST_P(LifetimeTest, CellsAndStagingOfDroppedInstancesComeBack) {
  Options options = TestOptions();
  options.segment_bytes = 64 * 1024;
  World world(GetParam(), options);
  const int size = world.shape().size();
  const uint64_t staging = world.fabric(0).Counters()["staging_free_bytes"];
  // Many times as many as there are cells.
  constexpr int kRounds = 300;
  const std::vector<Problem> problems = EveryKind(size, 700);
  for (int round = 0; round < kRounds; ++round) {
    const size_t call = world.Add(problems[static_cast<size_t>(round) % problems.size()]);
    ASSERT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
      std::string failures = Text(ranks.Run(call, local, 0));
      return failures + Text(ranks.Run(call, local, 1));
    }),
              "")
        << "round " << round;
    for (int process = 0; process < world.shape().processes; ++process) {
      world.ranks(process).Drop(call);
    }
  }
  // The last retirements are still under way between processes.
  const Deadline patience = Deadline::AfterSeconds(20);
  for (int process = 0; process < world.shape().processes; ++process) {
    auto counters = world.fabric(process).Counters();
    while (counters["staging_free_bytes"] != staging && !patience.expired()) {
      std::this_thread::yield();
      counters = world.fabric(process).Counters();
    }
    EXPECT_EQ(counters["staging_free_bytes"], staging) << "process " << process;
    EXPECT_EQ(counters["instances"], 0u);
  }
}

TEST_P(LifetimeTest, AFailureEndsEveryExecutionAndLetsGoOfItsBuffers) {
  // Executions under way on all ranks but the last, of every size and algorithm; then a failure.
  for (size_t count : {size_t{2}, size_t{500}, size_t{30000}, size_t{400000}}) {
    World world(GetParam());
    const int size = world.shape().size();
    const std::vector<Problem> problems = EveryKind(size, count);
    for (const Problem& problem : problems) world.Add(problem);
    std::atomic<int> entered{0};
    const Status cause(Code::kUnavailable, "rank 77 died");
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      std::string failures;
      for (size_t call = 0; call < problems.size(); ++call) {
        failures += Text(ranks.Run(call, local, 0));
      }
      if (ranks.position(local) == size - 1) {
        while (entered.load() < size - 1) std::this_thread::yield();
        ranks.fabric().ReportFailure(cause);
        return failures;
      }
      std::vector<std::unique_ptr<LocalRanks::Execution>> executions;
      for (size_t call = 0; call < problems.size(); ++call) {
        executions.push_back(ranks.Enter(call, local, 1));
      }
      ++entered;
      for (size_t call = 0; call < problems.size(); ++call) {
        const Status status = ranks.Check(call, local, 1, *executions[call]);
        // Who needs nothing of the last rank has its result.
        if (status.ok()) continue;
        if (status.ToString().find("rank 77 died") == std::string::npos) {
          failures += status.ToString() + "\n";
        }
      }
      return failures;
    }),
              "");
  }
}

TEST_P(LifetimeTest, AFailureInTheMiddleNeverGivesAWrongResult) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 12; ++round) {
    World world(GetParam());
    const int size = world.shape().size();
    const std::vector<Problem> problems = EveryKind(size, 20000);
    for (const Problem& problem : problems) world.Add(problem);
    const int reporter = static_cast<int>(random() % static_cast<uint64_t>(size));
    const int when = 1 + static_cast<int>(random() % 40);
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      for (int step = 0;; ++step) {
        if (ranks.position(local) == reporter && step == when) {
          ranks.fabric().ReportFailure(Status(Code::kUnavailable, "enough"));
        }
        const size_t call = static_cast<size_t>(step) % problems.size();
        const Status status = ranks.Run(call, local, step / static_cast<int>(problems.size()));
        if (status.ok()) continue;
        return status.ToString().find("enough") != std::string::npos ? "" : Text(status);
      }
    }),
              "");
  }
}

TEST_P(LifetimeTest, ShutdownCancelsWhatIsUnderWay) {
  World world(GetParam());
  const int size = world.shape().size();
  const size_t call = world.Add(AllReduce(size, 5000));
  std::unique_ptr<LocalRanks::Execution> waiting;
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
    const std::string failures = Text(ranks.Run(call, local, 0));
    if (ranks.position(local) == 0) waiting = ranks.Enter(call, local, 1);
    return failures;
  }),
            "");
  world.fabric(0).Shutdown();
  const Status status = world.ranks(0).Check(call, 0, 1, *waiting);
  EXPECT_EQ(status.code(), Code::kCancelled) << status.ToString();
  world.fabric(0).Shutdown();
}

// The ranks of the last process leave in the middle of an execution. What they left is not enough,
// and the others wait for each other too.
TEST_P(LifetimeTest, RanksThatLeaveInTheMiddleAreNamed) {
  const Shape shape = GetParam();
  const int leaving = shape.processes - 1;
  if (leaving == 0) GTEST_SKIP() << "nobody stays behind";
  Options options = TestOptions();
  options.deadline = 5;
  for (size_t count : {size_t{500}, size_t{30000}, size_t{1000000}}) {
    for (const Problem& problem : EveryKind(shape.size(), count)) {
      World world(shape, options);
      const size_t call = world.Add(problem);
      EXPECT_EQ(world.OnEveryRank(
                    [&](LocalRanks& ranks, int local) { return Text(ranks.Run(call, local, 0)); }),
                "");
      std::vector<std::unique_ptr<LocalRanks::Execution>> given_up;
      for (int local = 0; local < shape.ranks_each; ++local) {
        given_up.push_back(world.ranks(leaving).EnterPartly(call, local, 1));
      }
      std::atomic<int> waiting{0};
      EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
        const int staying = leaving * shape.ranks_each;
        if (&ranks == &world.ranks(leaving)) {
          while (waiting.load() < staying) std::this_thread::yield();
          ranks.GiveUp(*given_up[static_cast<size_t>(local)]);
          if (local == 0) ranks.fabric().Shutdown();
          return "";
        }
        const auto execution = ranks.Enter(call, local, 1);
        ++waiting;
        const Status status = ranks.Check(call, local, 1, *execution);
        const bool named = status.ToString().find("has left") != std::string::npos;
        return status.ok() || named ? "" : Text(status);
      }),
                "")
          << problem.Describe();
    }
  }
}

TEST_P(LifetimeTest, ARankThatNeverComesIsNamedAtTheDeadline) {
  Options options = TestOptions();
  options.deadline = 0.3;
  World world(GetParam(), options);
  const int size = world.shape().size();
  const size_t call = world.Add(AllReduce(size, 500));
  const std::string late = "rank " + std::to_string(world.shape().Ids().back()) + " ";
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
    std::string failures = Text(ranks.Run(call, local, 0));
    if (ranks.position(local) == size - 1) return failures;
    const Status status = ranks.Run(call, local, 1);
    if (status.code() != Code::kDeadlineExceeded) failures += "not late: " + Text(status);
    if (status.ToString().find(late) == std::string::npos) {
      failures += late + "is not named: " + Text(status);
    }
    // Who waits is named with its process, too.
    if (status.ToString().find(") waited 0.3") == std::string::npos) {
      failures += "no process of who waits: " + Text(status);
    }
    return failures;
  }),
            "");
}

// Ranks that exchange long streams hold each other up when one of them stops in the middle.
TEST_P(LifetimeTest, OnlyTheRankThatStopsInTheMiddleIsNamedAtTheDeadline) {
  Options options = TestOptions();
  options.deadline = 2;  // The launch before has to end in this, on a busy machine too.
  const Shape shape = GetParam();
  const int last = shape.size() - 1;
  for (OpKind kind : {OpKind::kAllReduce, OpKind::kAllToAll}) {
    const Problem problem = AllReduce(shape.size(), 400000, kind);
    World world(shape, options);
    const size_t call = world.Add(problem);
    EXPECT_EQ(world.OnEveryRank(
                  [&](LocalRanks& ranks, int local) { return Text(ranks.Run(call, local, 0)); }),
              "");
    LocalRanks& stopped = world.ranks(shape.processes - 1);
    const auto partly = stopped.EnterPartly(call, shape.ranks_each - 1, 1);
    const std::string late = " for rank " + std::to_string(shape.Ids().back()) + " ";
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      if (ranks.position(local) == last) return "";
      const Status status = ranks.Check(call, local, 1, *ranks.Enter(call, local, 1));
      const std::string text = status.ToString();
      const bool named = text.find(late) != std::string::npos &&
                         text.find("; rank") == std::string::npos &&
                         text.find("disagree") == std::string::npos;
      return status.ok() || named ? "" : Text(status);
    }),
              "")
        << problem.Describe();
    stopped.GiveUp(*partly);
  }
}

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Which of the others has a position is not known: what each of them does is told once.
TEST(MeshPositionTest, WhatTheOthersDoIsToldOnceAtTheDeadline) {
  const Shape shape{2, 2};
  Options options = TestOptions();
  options.deadline = 1;
  options.mismatch_after = 0.05;
  World world(shape, options);
  for (int process = 0; process < shape.processes; ++process) {
    for (OpKind kind : {OpKind::kAllReduce, OpKind::kAllGather}) {
      world.ranks(process).AddByPosition(AllReduce(shape.size(), 500, kind));
    }
  }
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
    const auto call = static_cast<size_t>(ranks.fabric().process());
    const Status status = ranks.Check(call, local, 0, *ranks.Enter(call, local, 0));
    const std::string text = status.ToString();
    std::string failures;
    for (int64_t rank : shape.Ids()) {
      if (Count(text, "meanwhile rank " + std::to_string(rank) + " (process ") > 1) {
        failures += "rank " + std::to_string(rank) + " is told of again; ";
      }
    }
    if (Count(text, "mesh position") != 2) failures += "not two positions; ";
    if (Count(text, "meanwhile") == 0) failures += "no news of the others; ";
    if (Count(text, "disagree") != 1) failures += "disagrees more than once, or never; ";
    return failures.empty() ? "" : failures + Text(status);
  }),
            "");
}

// A root that needs nobody runs ahead until it has no slot left.
TEST_P(LifetimeTest, AReaderThatKeepsTheRootFromGoingOnIsNamed) {
  const Shape shape = GetParam();
  const int last = shape.size() - 1;
  for (bool leaves : {false, true}) {
    if (leaves && shape.processes == 1) continue;
    // All ranks of a process leave together.
    const std::string reader = leaves ? "(process " + std::to_string(shape.processes - 1) + ","
                                      : "rank " + std::to_string(shape.Ids().back()) + " ";
    Options options = TestOptions();
    options.deadline = leaves ? 5 : 1;
    World world(shape, options);
    const size_t call = world.Add(AllReduce(shape.size(), 500, OpKind::kBroadcast));
    std::atomic<bool> waiting{false};
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      std::string failures = Text(ranks.Run(call, local, 0));
      if (ranks.position(local) == last) {
        while (leaves && !waiting.load()) std::this_thread::yield();
        if (leaves) ranks.fabric().Shutdown();
      }
      if (ranks.position(local) != 0) return failures;
      std::vector<std::unique_ptr<LocalRanks::Execution>> executions;
      for (int launch = 1; launch < 12; ++launch) {
        executions.push_back(ranks.Enter(call, 0, launch));
      }
      waiting = true;
      Status status;
      for (size_t i = 0; i < executions.size(); ++i) {
        status = ranks.Check(call, 0, static_cast<int>(i) + 1, *executions[i]);
      }
      const std::string text = status.ToString();
      const char* why = leaves ? "has left" : "waited 1";
      const bool named =
          text.find(reader) != std::string::npos && text.find(why) != std::string::npos;
      return failures + (named ? "" : Text(status) + "does not name " + reader);
    }),
              "");
  }
}

// Sizes that differ under equal attributes: an exported program could have them.
TEST_P(LifetimeTest, DifferentSizesAreAnErrorOnEveryRank) {
  World world(GetParam());
  const int size = world.shape().size();
  for (OpKind kind : {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kAllToAll}) {
    World fresh(GetParam());
    const Problem common = AllReduce(size, 900, kind);
    for (int process = 0; process < fresh.shape().processes; ++process) {
      LocalRanks& ranks = fresh.ranks(process);
      ranks.AddUnequal(common, [&](int position) {
        return AllReduce(size, position == size - 1 ? 901 : 900, kind);
      });
    }
    EXPECT_EQ(fresh.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      const Status status = ranks.Run(0, local, 0);
      if (status.code() == Code::kFailedPrecondition &&
          status.ToString().find("ranks disagree") != std::string::npos) {
        return "";
      }
      return "no mismatch: " + Text(status) + "\n";
    }),
              "");
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LifetimeTest,
                         ::testing::Values(Shape{1, 2}, Shape{1, 4}, Shape{2, 1}, Shape{2, 2},
                                           Shape{3, 1}, Shape{2, 2, 2}, Shape{4, 1, 2},
                                           Shape{5, 1, 2}),
                         ShapeName);

// Processes of their own: real process_vm_readv, real death.
TEST(ForkedTest, EveryKindAndSize) {
  for (Shape shape : {Shape{2, 1}, Shape{2, 2}, Shape{4, 1}}) {
    EXPECT_EQ(InForkedProcesses(shape, TestOptions(),
                                [&](LocalRanks& ranks) {
                                  size_t calls = 0;
                                  for (size_t count : {size_t{0}, size_t{1}, size_t{10}, size_t{11},
                                                       size_t{5000}, size_t{100001}}) {
                                    for (const Problem& p : EveryKind(shape.size(), count)) {
                                      calls = ranks.Add(p) + 1;
                                    }
                                  }
                                  return OnThreads(shape.ranks_each, [&](int local) {
                                    std::string failures;
                                    for (size_t call = 0; call < calls; ++call) {
                                      for (int launch = 0; launch < 2; ++launch) {
                                        failures += Text(ranks.Run(call, local, launch));
                                      }
                                    }
                                    return failures;
                                  });
                                }),
              "");
  }
}

TEST(ForkedTest, ScarceStaging) {
  Options options = TestOptions();
  options.segment_bytes = 128 * 1024;
  const Shape shape{3, 1};
  EXPECT_EQ(InForkedProcesses(shape, options,
                              [&](LocalRanks& ranks) {
                                const std::vector<Problem> problems = EveryKind(3, 30000);
                                for (const Problem& p : problems) ranks.Add(p);
                                std::string failures;
                                for (int launch = 0; launch < 4; ++launch) {
                                  std::vector<std::unique_ptr<LocalRanks::Execution>> all;
                                  for (size_t call = 0; call < problems.size(); ++call) {
                                    all.push_back(ranks.Enter(call, 0, launch));
                                  }
                                  for (size_t call = 0; call < problems.size(); ++call) {
                                    failures += Text(ranks.Check(call, 0, launch, *all[call]));
                                  }
                                }
                                return failures;
                              }),
            "");
}

}  // namespace
}  // namespace jaxfabric::testing
