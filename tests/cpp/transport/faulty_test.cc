#include "transport/faulty/faulty.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "transport/inproc/inproc.h"

namespace jaxfabric {
namespace {

const std::vector<std::byte> kOnes(8, std::byte{1});
const std::vector<std::byte> kTwos(8, std::byte{2});

Deadline Now() { return Deadline::AfterSeconds(0); }

// A faulty sender and a sound receiver.
class FaultyTest : public ::testing::Test {
 protected:
  void Start(const FaultPlan& plan) {
    const std::unique_ptr<Transport> faulty = MakeFaultyTransport(MakeInprocTransport(), plan);
    EXPECT_EQ(faulty->name(), "faulty+inproc");
    Result<std::unique_ptr<Endpoint>> from = faulty->Bind(0, 2, 4096);
    Result<std::unique_ptr<Endpoint>> to = MakeInprocTransport()->Bind(1, 2, 4096);
    ASSERT_TRUE(from.ok() && to.ok());
    from_ = std::move(*from);
    to_ = std::move(*to);
    auto sender = from_->Connect(to_->address(), {}, Now());
    auto receiver = to_->Connect(from_->address(), {}, Now());
    ASSERT_TRUE(sender.ok() && receiver.ok());
    sender_ = std::move(*sender);
    receiver_ = std::move(*receiver);
  }

  int At(size_t offset) { return static_cast<int>(to_->window()[offset]); }
  bool Signalled(uint64_t count) { return receiver_->Wait(count, Now()).ok(); }

  std::unique_ptr<Endpoint> from_;
  std::unique_ptr<Endpoint> to_;
  std::unique_ptr<Channel> sender_;
  std::unique_ptr<Channel> receiver_;
};

TEST_F(FaultyTest, EmptyPlanChangesNothing) {
  Start({});
  ASSERT_TRUE(sender_->Put(kOnes, 0).ok());
  ASSERT_TRUE(sender_->Signal().ok());
  EXPECT_TRUE(Signalled(1));
  EXPECT_EQ(At(7), 1);
}

TEST_F(FaultyTest, DropsThePlannedPuts) {
  Start({.drop_puts = {1, 1}});
  for (size_t i = 0; i < 3; ++i) ASSERT_TRUE(sender_->Put(kOnes, 8 * i).ok());
  EXPECT_EQ(At(0), 1);
  EXPECT_EQ(At(8), 0);
  EXPECT_EQ(At(16), 1);
}

TEST_F(FaultyTest, DropsThePlannedSignals) {
  Start({.drop_signals = {0, 2}});
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(sender_->Signal().ok());
  EXPECT_TRUE(Signalled(1));
  const Status status = receiver_->Wait(2, Now());
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_NE(status.message().find("peer 0"), std::string_view::npos);
}

TEST_F(FaultyTest, TruncatesPuts) {
  Start({.truncate_puts = {0, 1}});
  ASSERT_TRUE(sender_->Put(kOnes, 0).ok());
  ASSERT_TRUE(sender_->Put(kTwos, 8).ok());
  EXPECT_EQ(At(3), 1);
  EXPECT_EQ(At(4), 0);
  EXPECT_EQ(At(15), 2);
}

TEST_F(FaultyTest, HoldsPutsUntilALaterCallAndKeepsTheOrder) {
  Start({.delay_puts = {0, 1}, .delay_calls = 3});
  ASSERT_TRUE(sender_->Put(kOnes, 0).ok());
  ASSERT_TRUE(sender_->Signal().ok());
  ASSERT_TRUE(sender_->Put(kTwos, 0).ok());
  EXPECT_EQ(At(0), 0);
  EXPECT_FALSE(Signalled(1)) << "a signal must not overtake the put before it";
  ASSERT_TRUE(sender_->Signal().ok());
  EXPECT_EQ(At(0), 2);
  EXPECT_TRUE(Signalled(2));
}

TEST_F(FaultyTest, FlushAndWaitLetGo) {
  Start({.delay_puts = {0, 2}, .delay_calls = 1000});
  ASSERT_TRUE(sender_->Put(kOnes, 0).ok());
  ASSERT_TRUE(sender_->Flush(Now()).ok());
  EXPECT_EQ(At(0), 1);
  ASSERT_TRUE(sender_->Put(kTwos, 0).ok());
  EXPECT_EQ(sender_->Wait(1, Now()).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(At(0), 2);
}

TEST_F(FaultyTest, ResetEndsBothEnds) {
  Start({.reset_at = 2});
  ASSERT_TRUE(sender_->Put(kOnes, 0).ok());
  ASSERT_TRUE(sender_->Signal().ok());
  EXPECT_EQ(sender_->Put(kTwos, 0).code(), Code::kUnavailable);
  EXPECT_EQ(sender_->Signal().code(), Code::kUnavailable);
  EXPECT_EQ(sender_->Wait(0, Now()).code(), Code::kUnavailable);
  EXPECT_EQ(sender_->Flush(Now()).code(), Code::kUnavailable);
  EXPECT_TRUE(Signalled(1)) << "what arrived before stays";
  EXPECT_EQ(receiver_->Wait(2, Deadline::Never()).code(), Code::kUnavailable);
}

TEST_F(FaultyTest, HitsOnlyTheChosenChannel) {
  Start({.drop_puts = {0, FaultPlan::kNever}, .only_channel = 1});
  ASSERT_TRUE(sender_->Put(kOnes, 0).ok());
  EXPECT_EQ(At(0), 1);
  auto second = from_->Connect(to_->address(), {}, Now());
  ASSERT_TRUE(second.ok());
  ASSERT_TRUE((*second)->Put(kTwos, 0).ok());
  EXPECT_EQ(At(0), 1);
}

}  // namespace
}  // namespace jaxfabric
