#include "base/deadline.h"

#include <gtest/gtest.h>

namespace jaxfabric {
namespace {

TEST(Deadline, NeverDoesNotExpire) {
  EXPECT_FALSE(Deadline::Never().expired());
  EXPECT_EQ(Deadline::Never().remaining(), Clock::duration::max());
}

TEST(Deadline, PastHasNothingRemaining) {
  const Deadline past(Clock::now() - std::chrono::seconds(1));
  EXPECT_TRUE(past.expired());
  EXPECT_EQ(past.remaining(), Clock::duration::zero());
}

TEST(Deadline, FutureCountsDown) {
  const Deadline future = Deadline::AfterSeconds(1000);
  EXPECT_FALSE(future.expired());
  EXPECT_LE(future.remaining(), std::chrono::seconds(1000));
  EXPECT_GT(future.remaining(), std::chrono::seconds(900));
}

}  // namespace
}  // namespace jaxfabric
