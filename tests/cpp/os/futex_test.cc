#include "os/futex.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace jaxfabric {
namespace {

TEST(Futex, ReturnsAtOnceWhenTheWordDiffers) {
  std::atomic<uint32_t> word{1};
  FutexWait(&word, 0, Deadline::Never());
}

TEST(Futex, ReturnsAtTheDeadline) {
  std::atomic<uint32_t> word{0};
  const Deadline deadline = Deadline::AfterSeconds(0.02);
  while (!deadline.expired()) FutexWait(&word, 0, deadline);  // may return early for no reason
  FutexWait(&word, 0, Deadline(Clock::time_point()));         // long past
}

TEST(Futex, WakesEverySleeper) {
  std::atomic<uint32_t> word{0};
  const auto sleep = [&word] {
    while (word.load() == 0) FutexWait(&word, 0, Deadline::AfterSeconds(60));
  };
  std::thread a(sleep);
  std::thread b(sleep);
  word.store(1);
  FutexWakeAll(&word);
  a.join();
  b.join();
}

}  // namespace
}  // namespace jaxfabric
