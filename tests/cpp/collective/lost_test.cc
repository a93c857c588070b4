// Processes whose connections end.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <filesystem>
#include <thread>
#include <vector>

#include "collective/world.h"

namespace jaxfabric::testing {
namespace {

class LostTest : public ::testing::TestWithParam<Shape> {};

// Ends every connection of this process, as if who is at the other end had died.
void SeverConnections() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ::shutdown(std::stoi(entry.path().filename()), SHUT_RDWR);  // fails for what is no socket
  }
}

// Whoever waits must not take a process that is gone for one that has left before it is told why.
TEST_P(LostTest, AProcessThatIsLostHasNotLeft) {
  const Shape shape = GetParam();
  for (int round = 0; round < 10; ++round) {
    World world(shape);
    const size_t call = world.Add(EveryKind(shape.size(), 500)[0]);
    EXPECT_EQ(world.OnEveryRank(
                  [&](LocalRanks& ranks, int local) { return Text(ranks.Run(call, local, 0)); }),
              "");
    const auto waiting = world.ranks(0).Enter(call, 0, 1);
    // What a failure needs as well is busy: it takes its time to be told.
    std::atomic<bool> ended{false};
    std::vector<std::jthread> readers;
    for (int i = 0; i < 8; ++i) {
      readers.emplace_back([&] {
        while (!ended.load()) (void)world.fabric(0).failure();
      });
    }
    SeverConnections();
    const std::string text = world.ranks(0).Check(call, 0, 1, *waiting).ToString();
    ended = true;
    EXPECT_NE(text.find("died"), std::string::npos) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LostTest,
                         ::testing::Values(Shape{2, 1}, Shape{2, 2}, Shape{3, 1}, Shape{4, 1, 2}),
                         ShapeName);

}  // namespace
}  // namespace jaxfabric::testing
