#include "collective/started_call.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

namespace jaxfabric::testing {
namespace {

TEST(StartedCallTest, GivesTheResultToWhoComesLater) {
  const auto [number, call] = StartedCalls::Get().Make(4, 8);
  std::memset(call->output(), 7, call->output_bytes());
  call->Finish(OkStatus());
  const auto taken = StartedCalls::Get().Take(number);
  ASSERT_EQ(taken, call);
  std::vector<std::byte> result(8);
  const auto status = taken->Wait(result.data(), []() -> StartedCall::Finished {
    ADD_FAILURE() << "there is nothing to wait for";
    return nullptr;
  });
  ASSERT_TRUE(status.has_value() && status->ok());
  EXPECT_EQ(result, std::vector<std::byte>(8, std::byte{7}));
  EXPECT_EQ(StartedCalls::Get().Take(number), nullptr);
  EXPECT_EQ(StartedCalls::Get().Take(0), nullptr);
}

TEST(StartedCallTest, GivesTheResultToWhoWaits) {
  for (const Status& end : {OkStatus(), Status(Code::kUnavailable, "rank 1 died")}) {
    const auto [number, call] = StartedCalls::Get().Make(0, 1 << 16);
    std::vector<std::byte> result(1 << 16);
    Status told(Code::kInternal, "not told");
    const auto status = call->Wait(result.data(), [&]() -> StartedCall::Finished {
      return [&](const Status& s) { told = s; };
    });
    EXPECT_FALSE(status.has_value());
    std::memset(call->output(), 5, call->output_bytes());
    std::thread([&call = call, &end] { call->Finish(end); }).join();
    EXPECT_EQ(told.ToString(), end.ToString());
    EXPECT_EQ(result.back(), end.ok() ? std::byte{5} : std::byte{0});
    StartedCalls::Get().Take(number);
  }
}

TEST(StartedCallTest, ThoseThatNobodyWaitsForAreForgotten) {
  StartedCalls::Get().Clear();
  const auto first = StartedCalls::Get().Make(8, 8);
  first.call->Finish(OkStatus());
  const auto second = StartedCalls::Get().Make(8, 8);
  for (int i = 0; i < 3000; ++i) StartedCalls::Get().Make(8, 8).call->Finish(OkStatus());
  EXPECT_EQ(StartedCalls::Get().Take(first.number), nullptr);
  // This one is under way.
  EXPECT_EQ(StartedCalls::Get().Take(second.number), second.call);
  second.call->Finish(OkStatus());
  StartedCalls::Get().Clear();
}

TEST(StartedCallTest, MemoryIsUsedAgain) {
  StartedCalls::Get().Clear();
  const auto first = StartedCalls::Get().Make(100, 200);
  const std::byte* input = first.call->input();
  first.call->Finish(Status(Code::kCancelled, "enough"));
  StartedCalls::Get().Recycle(StartedCalls::Get().Take(first.number));
  const auto other = StartedCalls::Get().Make(100, 201);
  const auto second = StartedCalls::Get().Make(100, 200);
  EXPECT_NE(other.call->input(), input);
  EXPECT_EQ(second.call->input(), input);
  // Nothing of the first one is left.
  std::vector<std::byte> result(200);
  EXPECT_FALSE(
      second.call
          ->Wait(result.data(), []() -> StartedCall::Finished { return [](const Status&) {}; })
          .has_value());
  second.call->Finish(OkStatus());
  StartedCalls::Get().Clear();
  EXPECT_EQ(StartedCalls::Get().Take(second.number), nullptr);
}

}  // namespace
}  // namespace jaxfabric::testing
