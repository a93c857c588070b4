#include "collective/completion.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <set>
#include <thread>
#include <vector>

namespace jaxfabric {
namespace {

constexpr std::chrono::seconds kPatience{20};

// A completion may run the user's next matmul: it must not delay the others.
TEST(CompletionThreadsTest, OneThatBlocksDoesNotHoldUpTheNext) {
  CompletionThreads threads(3);
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::vector<std::promise<void>> began(3);
  for (std::promise<void>& one : began) {
    threads.Run([&one, released] {
      one.set_value();
      released.wait();
    });
  }
  for (std::promise<void>& one : began) {
    EXPECT_EQ(one.get_future().wait_for(kPatience), std::future_status::ready);
  }
  // At the limit the next one waits for a thread, and gets the first that is free.
  std::promise<std::thread::id> fourth;
  threads.Run([&fourth] { fourth.set_value(std::this_thread::get_id()); });
  std::future<std::thread::id> ran = fourth.get_future();
  EXPECT_EQ(ran.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  release.set_value();
  EXPECT_EQ(ran.wait_for(kPatience), std::future_status::ready);
  threads.Stop();
}

TEST(CompletionThreadsTest, AnIdleThreadIsUsedAgain) {
  CompletionThreads threads(8);
  std::set<std::thread::id> seen;
  for (int i = 0; i < 50; ++i) {
    std::promise<std::thread::id> done;
    threads.Run([&done] { done.set_value(std::this_thread::get_id()); });
    seen.insert(done.get_future().get());
  }
  // A thread that has not gone back to wait yet may be passed over, once in a while.
  EXPECT_LT(seen.size(), 8u);
  threads.Stop();
}

TEST(CompletionThreadsTest, StopRunsWhatIsQueued) {
  CompletionThreads threads(1);
  std::atomic<int> ran{0};
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  threads.Run([released] { released.wait(); });
  for (int i = 0; i < 10; ++i) threads.Run([&ran] { ++ran; });
  std::thread stopper([&threads] { threads.Stop(); });
  release.set_value();
  stopper.join();
  EXPECT_EQ(ran, 10);
}

}  // namespace
}  // namespace jaxfabric
