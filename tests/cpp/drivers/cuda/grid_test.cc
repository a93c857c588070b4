#include "drivers/cuda/fake/grid.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace jaxfabric::emulation {
namespace {

constexpr uint64_t kPlenty = 100'000'000;

template <class T>
std::vector<std::byte> Pack(const T& arguments) {
  std::vector<std::byte> bytes(sizeof(T));
  std::memcpy(bytes.data(), &arguments, sizeof(T));
  return bytes;
}

// A launch whose end can be asked for.
struct Ended {
  int count = 0;
  bool trapped = false;
  std::function<void(bool)> Callback() {
    return [this](bool was_trapped) {
      ++count;
      trapped = was_trapped;
    };
  }
};

struct Indices {
  std::array<std::atomic<int>, 12>* seen;
};

TEST(Grid, RunsEveryThreadOnceWithItsIndices) {
  Grid grid(1);
  std::array<std::atomic<int>, 12> seen{};
  Ended ended;
  grid.Launch(
      [](const void* arguments) {
        ASSERT_EQ(ThreadCount(), 4u);
        ASSERT_EQ(BlockCount(), 3u);
        auto* counts = static_cast<const Indices*>(arguments)->seen;
        ++(*counts)[BlockIndex() * ThreadCount() + ThreadIndex()];
      },
      Pack(Indices{&seen}), {3, 4}, ended.Callback());
  EXPECT_EQ(ended.count, 0) << "nothing runs outside Run()";
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(ended.count, 1);
  EXPECT_FALSE(ended.trapped);
  for (const auto& count : seen) EXPECT_EQ(count, 1);
}

struct Trace {
  std::vector<int>* order;
};

std::vector<int> OrderOfTurns(uint64_t seed) {
  std::vector<int> order;
  Grid grid(seed);
  const auto kernel = [](const void* arguments) {
    for (int i = 0; i < 5; ++i) {
      static_cast<const Trace*>(arguments)->order->push_back(static_cast<int>(ThreadIndex()));
      MaybeSwitch();
    }
  };
  // One fibre at a time runs, but the thread sanitizer rightly sees a vector without a lock.
#if !defined(__SANITIZE_THREAD__)
  grid.Launch(kernel, Pack(Trace{&order}), {1, 8}, {});
#else
  grid.Launch(kernel, Pack(Trace{&order}), {1, 1}, {});
#endif
  EXPECT_FALSE(grid.Run(kPlenty));
  return order;
}

TEST(Grid, TheSeedFixesTheSchedule) {
  const std::vector<int> order = OrderOfTurns(7);
  EXPECT_EQ(order, OrderOfTurns(7));
#if !defined(__SANITIZE_THREAD__)
  EXPECT_EQ(order.size(), 40u);
  EXPECT_NE(order, OrderOfTurns(8));
#endif
}

struct Values {
  int* values;
  int* sums;
};

// Every thread writes its own value and reads all others: wrong, and a race, without the barriers.
void SumOfNeighbours(const void* arguments) {
  const auto& args = *static_cast<const Values*>(arguments);
  const uint32_t threads = ThreadCount(), me = ThreadIndex();
  for (int round = 1; round <= 3; ++round) {
    args.values[me] = round * static_cast<int>(me + 1);
    MaybeSwitch();
    SyncBlock();
    int sum = 0;
    for (uint32_t i = 0; i < threads; ++i) sum += args.values[i];
    args.sums[me] += sum;
    MaybeSwitch();
    SyncBlock();
  }
}

TEST(Grid, SyncBlockOrdersTheThreadsOfABlock) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::array<int, 16> values{}, sums{};
    Grid grid(seed);
    grid.Launch(&SumOfNeighbours, Pack(Values{values.data(), sums.data()}), {1, 16}, {});
    EXPECT_FALSE(grid.Run(kPlenty));
    for (int sum : sums) EXPECT_EQ(sum, (1 + 2 + 3) * 16 * 17 / 2);
  }
}

TEST(Grid, AThreadThatHasReturnedCountsAsArrived) {
  Grid grid(3);
  Ended ended;
  grid.Launch(
      [](const void*) {
        if (ThreadIndex() % 2 == 0) return;
        SyncBlock();
        if (ThreadIndex() % 3 == 0) return;
        SyncBlock();
      },
      {}, {4, 9}, ended.Callback());
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(ended.count, 1);
  EXPECT_FALSE(ended.trapped);
}

TEST(Grid, DivergenceTraps) {
  Grid grid(3);
  Ended ended;
  grid.Launch(
      [](const void*) {
        if (ThreadIndex() == 0) {
          SyncBlock();
        } else {
          SyncBlock();
        }
      },
      {}, {1, 4}, ended.Callback());
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(ended.count, 1);
  EXPECT_TRUE(ended.trapped);
  EXPECT_NE(grid.trap_reason().find("grid_test.cc"), std::string::npos) << grid.trap_reason();
}

TEST(Grid, TrapEndsTheWholeKernelAndNoOther) {
  Grid grid(5);
  Ended bad, good;
  grid.Launch(
      [](const void*) {
        if (BlockIndex() == 1 && ThreadIndex() == 3) Trap("deadline");
        for (;;) Pause();
      },
      {}, {2, 8}, bad.Callback());
  grid.Launch([](const void*) { SyncBlock(); }, {}, {2, 8}, good.Callback());
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(bad.count, 1);
  EXPECT_TRUE(bad.trapped);
  EXPECT_EQ(grid.trap_reason(), "deadline");
  EXPECT_EQ(good.count, 1);
  EXPECT_FALSE(good.trapped);
}

struct Flags {
  std::atomic<int>* mine;
  std::atomic<int>* theirs;
};

// Two launches that need each other at every step.
void PingPong(const void* arguments) {
  const auto& args = *static_cast<const Flags*>(arguments);
  for (int step = 1; step <= 50; ++step) {
    if (ThreadIndex() == 0) {
      args.mine->store(step, std::memory_order_release);
      MaybeSwitch();
    }
    while (args.theirs->load(std::memory_order_acquire) < step) Pause();
    SyncBlock();
  }
}

TEST(Grid, LaunchesInFlightTogetherTakeTurns) {
  Grid grid(11);
  std::atomic<int> a{0}, b{0};
  Ended first, second;
  grid.Launch(&PingPong, Pack(Flags{&a, &b}), {1, 16}, first.Callback());
  EXPECT_TRUE(grid.Run(10'000)) << "the second launch is missing";
  EXPECT_TRUE(grid.AllWaiting());
  grid.Launch(&PingPong, Pack(Flags{&b, &a}), {1, 16}, second.Callback());
  EXPECT_FALSE(grid.AllWaiting());
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(first.count + second.count, 2);
  EXPECT_FALSE(grid.AllWaiting());
}

TEST(Grid, ALoopThatLoadsAndPausesWaits) {
  Grid grid(11);
  std::atomic<int> flags[2] = {0, 0};
  Ended ended;
  grid.Launch(
      [](const void* arguments) {
        const auto& args = *static_cast<const Flags*>(arguments);
        for (const std::atomic<int>* flag : {args.mine, args.theirs}) {
          do {
            MaybeSwitch();  // others may come before each load
            Pause();
          } while (flag->load(std::memory_order_acquire) == 0);
        }
      },
      Pack(Flags{&flags[0], &flags[1]}), {2, 16}, ended.Callback());
  for (std::atomic<int>& flag : flags) {
    EXPECT_TRUE(grid.Run(10'000));
    EXPECT_TRUE(grid.AllWaiting());
    flag = 1;
  }
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(ended.count, 1);
}

TEST(Grid, TwoGridsOnTwoThreadsSeeEachOther) {
  std::atomic<int> a{0}, b{0};
  const auto run = [](std::atomic<int>* mine, std::atomic<int>* theirs) {
    Grid grid(1);
    grid.Launch(&PingPong, Pack(Flags{mine, theirs}), {1, 4}, {});
    while (grid.RunUntilWaiting(1000)) std::this_thread::yield();
  };
  std::thread other(run, &b, &a);
  run(&a, &b);
  other.join();
  EXPECT_EQ(a, 50);
  EXPECT_EQ(b, 50);
}

TEST(Grid, KilledFibresNeverRunAgain) {
  Grid grid(11);
  std::atomic<int> a{0}, b{0};
  Ended dead, alive;
  const uint64_t id = grid.Launch(&PingPong, Pack(Flags{&a, &b}), {1, 4}, dead.Callback());
  grid.Launch(&PingPong, Pack(Flags{&b, &a}), {1, 4}, alive.Callback());
  EXPECT_TRUE(grid.Run(50));
  grid.Kill(id);
  grid.Kill(id);
  const int reached = a;
  EXPECT_TRUE(grid.Run(10'000));
  EXPECT_TRUE(grid.AllWaiting());
  EXPECT_EQ(a, reached);
  a = 1000;
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(dead.count, 0);
  EXPECT_EQ(alive.count, 1);
}

TEST(Grid, FinishedMayLaunch) {
  Grid grid(2);
  int left = 100;
  std::function<void(bool)> next = [&](bool) {
    if (--left > 0) grid.Launch([](const void*) { SyncBlock(); }, {}, {1, 2}, next);
  };
  grid.Launch([](const void*) {}, {}, {1, 2}, next);
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(left, 0);
}

TEST(Grid, TimePassesForThoseThatWait) {
  Grid grid(2);
  Ended ended;
  grid.Launch(
      [](const void*) {
        const uint64_t begin = NanoClock();
        while (NanoClock() - begin < 10'000'000'000) Pause();
      },
      {}, {1, 3}, ended.Callback());
  EXPECT_TRUE(grid.RunUntilWaiting(kPlenty));
  EXPECT_TRUE(grid.AllWaiting());
  EXPECT_TRUE(grid.Run(1000));
  EXPECT_EQ(ended.count, 0) << "10 s cannot have passed";
  grid.AdvanceClock(10'000'000'000);
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(ended.count, 1);
}

TEST(Grid, WaitingTimeIsRealTime) {
  Grid grid(2);
  grid.Launch(
      [](const void*) {
        const uint64_t begin = NanoClock();
        while (NanoClock() - begin < 20'000'000) Pause();
      },
      {}, {1, 1}, {});
  const auto begin = std::chrono::steady_clock::now();
  while (grid.RunUntilWaiting(kPlenty)) std::this_thread::yield();
  EXPECT_GT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(5));
}

struct Sums {
  std::atomic<int>* failures;
};

TEST(Grid, SharedIsPerBlockAndKey) {
  Grid grid(2);
  std::atomic<int> failures{0};
  grid.Launch(
      [](const void* arguments) {
        static const char first_key = 0, second_key = 0;
        auto& wrong = *static_cast<const Sums*>(arguments)->failures;
        auto* bytes = static_cast<unsigned char*>(Shared(&first_key, 64, 1));
        auto* words = static_cast<uint32_t*>(Shared(&second_key, 64 * 4, 128));
        if (bytes[ThreadIndex()] != 0xA5) ++wrong;
        if (reinterpret_cast<uintptr_t>(words) % 128 != 0) ++wrong;
        words[ThreadIndex()] = BlockIndex() * 100 + ThreadIndex();
        MaybeSwitch();
        SyncBlock();
        for (uint32_t i = 0; i < ThreadCount(); ++i) {
          if (words[i] != BlockIndex() * 100 + i) ++wrong;
        }
      },
      Pack(Sums{&failures}), {4, 16}, {});
  EXPECT_FALSE(grid.Run(kPlenty));
  EXPECT_EQ(failures, 0);
}

TEST(Grid, WhatIsInFlightEndsWithTheGrid) {
  Ended ended;
  {
    Grid grid(2);
    static const char key = 0;
    grid.Launch(
        [](const void*) {
          Shared(&key, 1024, 16);
          for (;;) Pause();
        },
        {}, {2, 40}, ended.Callback());
    EXPECT_TRUE(grid.Run(1000));
  }
  EXPECT_EQ(ended.count, 0);
}

TEST(Grid, StacksAreUsedAgain) {
  // Those that trap and those that return, many times over, each with a deep frame.
  Grid grid(4);
  int trapped = 0;
  const auto count = [&](bool was_trapped) { trapped += was_trapped; };
  for (int i = 0; i < 50; ++i) {
    grid.Launch(
        [](const void*) {
          volatile char frame[8192];
          for (size_t j = 0; j < sizeof(frame); j += 64) frame[j] = 1;
          MaybeSwitch();
          SyncBlock();
          if (BlockIndex() == 1 && ThreadIndex() == 5) Trap();
          SyncBlock();
        },
        {}, {static_cast<uint32_t>(1 + i % 2), 16}, count);
    EXPECT_FALSE(grid.Run(kPlenty));
  }
  EXPECT_EQ(trapped, 25);
}

// What 10,000 launches of two ranks with two blocks of 32 threads cost is the budget of the tests
// of kernels: this is a hundredth of it.
TEST(Grid, ManySmallLaunches) {
  Grid grid(9);
  std::atomic<int> cells[2] = {0, 0};
  int ended = 0;
  for (int i = 0; i < 100; ++i) {
    cells[0] = cells[1] = 0;
    for (int rank = 0; rank < 2; ++rank) {
      grid.Launch(&PingPong, Pack(Flags{&cells[rank], &cells[1 - rank]}), {1, 32},
                  [&](bool) { ++ended; });
    }
    EXPECT_FALSE(grid.Run(kPlenty));
  }
  EXPECT_EQ(ended, 200);
}

}  // namespace
}  // namespace jaxfabric::emulation
