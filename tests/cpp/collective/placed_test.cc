// Bytes that peers on other hosts put straight into a rank's output.
#include <gtest/gtest.h>

#include <algorithm>

#include "collective/world.h"

namespace jaxfabric::testing {
namespace {

constexpr size_t kCount = 1 << 20;  // of float32

std::vector<Problem> Placed(int ranks, size_t count) {
  std::vector<Problem> problems = EveryKind(ranks, count);
  std::erase_if(problems, [](const Problem& problem) {
    return problem.kind != OpKind::kPermute && problem.kind != OpKind::kAllToAll &&
           problem.kind != OpKind::kAllGather && problem.kind != OpKind::kBroadcast;
  });
  return problems;
}

// One rank fails while the other's bytes arrive. Whoever has its output back uses it for something
// else at once, which what arrives later must leave alone.
TEST(PlacedTest, AFailedExecutionTakesNothingMore) {
  const Shape shape{2, 1, 2};
  for (const Problem& problem : Placed(2, kCount)) {
    World world(shape);
    const size_t call = world.Add(problem);
    EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
      std::string failures = Text(ranks.Run(call, local, 0));
      auto execution = ranks.Enter(call, local, 1);
      if (ranks.position(local) == 0) {
        ranks.fabric().ReportFailure(Status(Code::kUnavailable, "rank 77 died"));
      }
      const Status status = ranks.Check(call, local, 1, *execution);
      if (status.ok()) return failures;  // all had come before
      if (status.ToString().find("rank 77 died") == std::string::npos) failures += Text(status);
      std::fill(execution->output.begin(), execution->output.end(), std::byte{0x5a});
      ranks.fabric().Shutdown();  // whatever was on its way has come, or never will
      if (std::any_of(execution->output.begin(), execution->output.end(),
                      [](std::byte byte) { return byte != std::byte{0x5a}; })) {
        failures += "something came later\n";
      }
      return failures;
    }),
              "");
  }
}

// The last rank does not come: those that have bytes for it name it.
TEST(PlacedTest, AReaderThatDoesNotComeIsNamed) {
  Options options = TestOptions();
  options.deadline = 1;
  World world({3, 1, 3}, options);
  Problem problem = Placed(3, kCount)[0];
  problem.kind = OpKind::kPermute;
  problem.pairs = {0, 2};
  const size_t call = world.Add(problem);
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) -> std::string {
    std::string failures = Text(ranks.Run(call, local, 0));
    if (ranks.position(local) != 0) return failures;
    const std::string text = Text(ranks.Run(call, local, 1));
    const bool named = text.find("process 2") != std::string::npos;
    return failures + (named ? "" : "not named: " + text);
  }),
            "");
}

}  // namespace
}  // namespace jaxfabric::testing
