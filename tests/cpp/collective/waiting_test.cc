// What ranks do while they wait for each other, and what they leave alone.
#include <gtest/gtest.h>
#include <sched.h>
#include <time.h>

#include <thread>

#include "collective/world.h"
#include "os/cores.h"

namespace jaxfabric::testing {
namespace {

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

double ThreadSeconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// The scheduler may put both ranks on one core although there are two, next to a busy process. A
// rank that kept its time slice would burn 4 ms in every call.
TEST(Waiting, ARankLetsThePeerOnItsOwnCoreRun) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "counts processor time, which a sanitizer multiplies";
#endif
  for (const Shape shape : {Shape{2, 1}, Shape{1, 2}}) {
    World world(shape);
    std::vector<size_t> calls;
    for (const size_t count : {size_t{4}, size_t{4000}, size_t{40000}}) {
      calls.push_back(
          world.Add({OpKind::kAllReduce, DType::kFloat32, count, 2, ReduceOp::kSum, {}, 0}));
    }
    const auto core = static_cast<int>(UsableCores().front());
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(core, &one);
      if (::sched_setaffinity(0, sizeof(one), &one) != 0) return std::string("not pinned");
      std::string failures;
      for (size_t call : calls) failures += Text(ranks.Run(call, local, 0));
      constexpr int kLaunches = 100;
      const double before = ThreadSeconds();
      for (int launch = 1; launch <= kLaunches; ++launch) {
        for (size_t call : calls) failures += Text(ranks.Run(call, local, launch));
      }
      const double seconds = ThreadSeconds() - before;
      if (seconds > 1e-3 * kLaunches * static_cast<double>(calls.size())) {
        failures += "used " + std::to_string(seconds) + " s of its core";
      }
      return failures;
    }),
              "");
  }
}

}  // namespace
}  // namespace jaxfabric::testing
