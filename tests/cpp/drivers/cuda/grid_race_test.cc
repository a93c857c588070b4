// That the thread sanitizer takes fibres for threads.
#if defined(__SANITIZE_THREAD__)

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "drivers/cuda/fake/grid.h"

namespace jaxfabric::emulation {
namespace {

struct Shelf {
  int* value;
  std::atomic<int>* ready;
  std::memory_order order;
};

void HandOver(const void* arguments) {
  const auto& args = *static_cast<const Shelf*>(arguments);
  if (ThreadIndex() == 0) {
    *args.value = 42;
    args.ready->store(1, args.order == std::memory_order_relaxed ? std::memory_order_relaxed
                                                                 : std::memory_order_release);
    MaybeSwitch();
  } else {
    while (args.ready->load(args.order) == 0) Pause();
    if (*args.value != 42) Trap();
  }
}

void RunHandOver(std::memory_order order) {
  int value = 0;
  std::atomic<int> ready{0};
  Grid grid(1);
  const Shelf shelf{&value, &ready, order};
  std::vector<std::byte> arguments(sizeof(shelf));
  std::memcpy(arguments.data(), &shelf, sizeof(shelf));
  grid.Launch(&HandOver, arguments, {1, 2}, {});
  EXPECT_FALSE(grid.Run(1'000'000));
}

TEST(GridRaceTest, ThreadSanitizerSeesARaceBetweenFibres) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        RunHandOver(std::memory_order_relaxed);
        std::exit(0);
      },
      "data race");
}

TEST(GridRaceTest, ThreadSanitizerIsSilentAboutASynchronisedPair) {
  RunHandOver(std::memory_order_acquire);
}

}  // namespace
}  // namespace jaxfabric::emulation

#endif
