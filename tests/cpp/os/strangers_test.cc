// Strangers at an acceptor: each is counted by what is wrong with it, and one line is logged.
#include "os/strangers.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "os/acceptor.h"
#include "os/poll.h"

namespace jaxfabric {
namespace {

class StrangersTest : public ::testing::TestWithParam<Stranger> {};

TEST_P(StrangersTest, OfAKindAreCountedAndLoggedOnce) {
  constexpr Refusal kReasons[] = {Refusal::kSecret, Refusal::kMalformed, Refusal::kTooSlow,
                                  Refusal::kMalformed, Refusal::kIncarnation};
  constexpr uint64_t kCount = 50;
  const Refusal reason = kReasons[static_cast<size_t>(GetParam())];
  JobIdentity identity{"0123456789abcdef0123456789abcdef", 7, 0, 4};
  TcpAddress address = *TcpAddress::FromIp("127.0.0.1", 0);
  auto listener = ListenTcp(&address, {});
  ASSERT_TRUE(listener.ok()) << listener.status().ToString();
  auto acceptor = Acceptor::Create(*std::move(listener), identity, Purpose::kData,
                                   {.pending = 256, .patience = std::chrono::milliseconds(100)});
  ASSERT_TRUE(acceptor.ok()) << acceptor.status().ToString();
  identity.process = 3;
  ::testing::internal::CaptureStderr();
  const auto strangers = CallByStrangers(GetParam(), kCount, address, identity, 0, Purpose::kData);
  const Deadline deadline = Deadline::AfterSeconds(20);
  while ((*acceptor)->refused() < kCount && !deadline.expired()) {
    WaitForSocket((*acceptor)->fd(), POLLIN, deadline);
    EXPECT_TRUE((*acceptor)->Advance().empty());
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(LinesIn(log), 1) << log;
  EXPECT_NE(log.find("was refused: it " + std::string(RefusalText(reason))), std::string::npos)
      << log;
  EXPECT_EQ((*acceptor)->refused(reason), kCount);
  EXPECT_EQ((*acceptor)->pending(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Each, StrangersTest, ::testing::ValuesIn(kStrangers), StrangerName);

}  // namespace
}  // namespace jaxfabric
