#include "transport/signal_line.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "transport/ranks.h"

namespace jaxfabric {
namespace {

using Outcome = SignalLine::Outcome;

// A line as it lies in fresh shared memory, optionally with its word already at a value.
class Line {
 public:
  explicit Line(uint32_t word = 0) { std::memcpy(memory_, &word, sizeof(word)); }
  SignalLine* operator->() { return reinterpret_cast<SignalLine*>(memory_); }

 private:
  alignas(64) std::byte memory_[sizeof(SignalLine)] = {};
};

TEST(SignalLine, CountsAcrossTheWrapOfItsWord) {
  const uint32_t near_wrap = (1u << 30) - 2;
  Line line(near_wrap << 2);
  uint64_t seen = near_wrap;
  for (uint64_t count = near_wrap + 1; count < (1u << 30) + 5; ++count) {
    line->Signal();
    ASSERT_EQ(line->Wait(count, &seen, false, TestDeadline()), Outcome::kSignalled);
    ASSERT_EQ(seen, count);
    ASSERT_EQ(line->Wait(count + 1, &seen, false, Deadline::AfterSeconds(0)), Outcome::kDeadline);
  }
  line->AbortBySender();
  EXPECT_EQ(line->Wait(seen + 1, &seen, true, TestDeadline()), Outcome::kAbortedBySender);
  line->AbortByReceiver();
  EXPECT_EQ(line->Wait(0, &seen, true, TestDeadline()), Outcome::kAbortedByReceiver);
}

// Two threads that answer each other; a lost wake-up would stop both at the deadline.
TEST(SignalLine, LosesNoWakeUp) {
  for (bool spin : {false, true}) {
    Line there;
    Line back;
    constexpr uint64_t kRounds = 20000;
    std::thread other([&, spin] {
      uint64_t seen = 0;
      for (uint64_t round = 1; round <= kRounds; ++round) {
        if (there->Wait(round, &seen, spin, TestDeadline()) != Outcome::kSignalled) return;
        back->Signal();
      }
    });
    uint64_t seen = 0;
    Outcome outcome = Outcome::kSignalled;
    for (uint64_t round = 1; round <= kRounds && outcome == Outcome::kSignalled; ++round) {
      there->Signal();
      outcome = back->Wait(round, &seen, spin, TestDeadline());
    }
    other.join();
    EXPECT_EQ(outcome, Outcome::kSignalled) << "after " << seen << " rounds";
  }
}

TEST(SignalLine, SpinsOnlyOnItsOwnCores) {
  EXPECT_TRUE(CoresAllowSpinning(1));
  EXPECT_FALSE(CoresAllowSpinning(1 << 20));
}

}  // namespace
}  // namespace jaxfabric
