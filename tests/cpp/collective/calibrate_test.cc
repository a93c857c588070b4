// What a message between hosts costs: all processes of a job take it to be the same.
#include <gtest/gtest.h>

#include "collective/world.h"

namespace jaxfabric::testing {
namespace {

// Which figures they are does not matter, but all must have the same, or they choose differently.
TEST(CalibrationTest, AllProcessesHaveTheFiguresThatTwoHaveMeasured) {
  Options options = TestOptions();
  options.network_cost = kMeasured;
  World world({4, 1, 3}, options);
  const CostModel model = world.fabric(0).patterns().ModelFor(OpKind::kBroadcast);
  const CostModel defaults;
  EXPECT_GT(model.between.alpha, 0);
  EXPECT_LE(model.between.overhead, model.between.alpha);
  for (int process = 0; process < 4; ++process) {
    auto counters = world.fabric(process).Counters();
    // On a busy machine it may take too long, for all alike.
    EXPECT_EQ(counters["network_cost_measured"],
              world.fabric(0).Counters()["network_cost_measured"]);
    const PathCost cost = world.fabric(process).patterns().ModelFor(OpKind::kBroadcast).between;
    EXPECT_EQ(cost.alpha, model.between.alpha);
    EXPECT_EQ(cost.overhead, model.between.overhead);
    EXPECT_EQ(cost.beta, model.between.beta);
    if (counters["network_cost_measured"] == 0) {
      EXPECT_EQ(cost.alpha, defaults.between.alpha);
    }
  }
  // What was left in the mirrors disturbs nobody.
  size_t calls = 0;
  for (const Problem& problem : EveryKind(4, 5000)) calls = world.Add(problem) + 1;
  EXPECT_EQ(world.OnEveryRank([&](LocalRanks& ranks, int local) {
    std::string failures;
    for (size_t call = 0; call < calls; ++call) failures += Text(ranks.Run(call, local, 0));
    return failures;
  }),
            "");
}

// The one that measures, or the one that answers, has no time for it.
TEST(CalibrationTest, WithoutAMeasurementAllHaveTheDefaults) {
  for (const int hasty : {0, 1}) {
    const auto options = [hasty](int process) {
      Options own = TestOptions();
      own.network_cost = kMeasured;
      if (process == hasty) own.measuring_seconds = 0;
      return own;
    };
    EXPECT_EQ(InForkedProcesses(
                  {3, 1, 3}, options,
                  [](LocalRanks& ranks) -> std::string {
                    Fabric& fabric = ranks.fabric();
                    const PathCost cost = fabric.patterns().ModelFor(OpKind::kBroadcast).between;
                    const PathCost defaults = CostModel().between;
                    const bool measured = fabric.Counters()["network_cost_measured"] != 0;
                    if (measured || cost.alpha != defaults.alpha ||
                        cost.overhead != defaults.overhead || cost.beta != defaults.beta) {
                      return "not the defaults";
                    }
                    const size_t call = ranks.Add(EveryKind(3, 1000)[0]);
                    return Text(ranks.Run(call, 0, 0));
                  }),
              "")
        << hasty;
  }
}

TEST(CalibrationTest, FiguresByHandAreTaken) {
  Options options = TestOptions();
  options.network_cost = "12.5,4";
  World world({2, 1, 2}, options);
  const CostModel& model = world.fabric(1).patterns().model;
  EXPECT_DOUBLE_EQ(model.between.alpha, 12.5e-6);
  EXPECT_DOUBLE_EQ(model.between.beta, 0.25e-9);
  EXPECT_DOUBLE_EQ(model.host_beta, 0.25e-9);
  for (const char* bad : {"12", "0,4", "1,x", "1,2,3"}) {
    options.network_cost = bad;
    EXPECT_FALSE(Fabric::Create(0, 1, {0}, options).ok()) << bad;
  }
  options.network_cost = "";
  options.pattern = "ring,square";
  EXPECT_FALSE(Fabric::Create(0, 1, {0}, options).ok());
}

}  // namespace
}  // namespace jaxfabric::testing
