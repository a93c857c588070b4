#include "collective/cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "collective/pattern/messages.h"
#include "collective/pattern/played.h"
#include "collective/simulate.h"

namespace jaxfabric {
namespace {

constexpr OpKind kOps[] = {OpKind::kAllReduce, OpKind::kAllGather,     OpKind::kReduceScatter,
                           OpKind::kAllToAll,  OpKind::kPermute,       OpKind::kBroadcast,
                           OpKind::kBarrier,   OpKind::kRaggedAllToAll};

size_t Take(OpKind op, uint64_t bytes, GroupShape shape, const CostModel& model = {}) {
  return Cheapest(Candidates(op, bytes, shape, model));
}

PatternKind KindOf(OpKind op, uint64_t bytes, GroupShape shape, const CostModel& model = {}) {
  return Candidates(op, bytes, shape, model)[Take(op, bytes, shape, model)].kind;
}

TEST(CostTest, FormulasAgreeWithTheSchedulesRoundByRound) {
  const FatTree flat{.hosts_per_leaf = 1000, .oversubscription = 1, .hop = 0};
  for (int hosts = 1; hosts <= 40; ++hosts) {
    for (const OpKind op : kOps) {
      const GroupShape shape{.hosts = hosts, .ranks_per_host = 4, .lanes = 4};
      for (const Candidate& candidate : Candidates(op, 1 << 20, shape, {})) {
        const double played = SimulateBetween(candidate, op, 1 << 20, shape, {}, flat);
        EXPECT_NEAR(candidate.between, played, 1e-9 * (1 + candidate.between))
            << hosts << " hosts, " << OpKindName(op) << ", " << PatternName(candidate.kind);
      }
    }
  }
}

TEST(CostTest, PeersAreThoseOfTheBusiestMember) {
  for (int n = 1; n <= 40; ++n) {
    for (const OpKind op : kOps) {
      for (const PatternKind kind : kPatternKinds) {
        if (!HasPattern(kind, op) || op == OpKind::kPermute) continue;
        size_t most = 0;
        for (const Pattern& pattern : MakeAll(kind, op, n)) {
          std::set<int32_t> peers;
          for (const Step& step : pattern.steps) peers.insert({step.to, step.from});
          peers.erase(kNobody);
          most = std::max(most, peers.size());
        }
        EXPECT_EQ(EffortOf(kind, op, n).peers, static_cast<int32_t>(most))
            << n << " members, " << OpKindName(op) << ", " << PatternName(kind);
      }
    }
  }
}

TEST(CostTest, FewRoundsForLittleAndFewBytesForMuch) {
  using enum PatternKind;
  const GroupShape pair{.hosts = 2};
  EXPECT_EQ(KindOf(OpKind::kAllReduce, 8, pair), kOneShot);
  EXPECT_EQ(KindOf(OpKind::kAllReduce, 8, {.hosts = 4}), kOneShot);
  EXPECT_EQ(KindOf(OpKind::kAllReduce, 8, {.hosts = 512}), kRecursiveDoubling);
  EXPECT_EQ(KindOf(OpKind::kAllReduce, 1 << 20, {.hosts = 512}), kHalvingDoubling);
  EXPECT_EQ(KindOf(OpKind::kAllReduce, 64 << 20, {.hosts = 16}), kDirect);
  EXPECT_EQ(KindOf(OpKind::kAllToAll, 1 << 10, {.hosts = 512}), kBruck);
  EXPECT_EQ(KindOf(OpKind::kAllToAll, 64 << 20, {.hosts = 64}), kDirect);
  EXPECT_EQ(KindOf(OpKind::kBroadcast, 1 << 10, {.hosts = 64}), kTree);
  EXPECT_EQ(KindOf(OpKind::kBroadcast, 64 << 20, {.hosts = 64}), kDirect);
  EXPECT_EQ(KindOf(OpKind::kAllGather, 1 << 10, {.hosts = 500}), kBruck);
}

TEST(CostTest, ManyPeersAreRefusedUnlessThereIsNoOtherWay) {
  CostModel model;
  model.most_peers = 8;
  const GroupShape shape{.hosts = 16};
  EXPECT_EQ(KindOf(OpKind::kAllReduce, 64 << 20, shape, model), PatternKind::kHalvingDoubling);
  EXPECT_EQ(KindOf(OpKind::kRaggedAllToAll, 64 << 20, shape, model), PatternKind::kDirect);
  const auto candidates = Candidates(OpKind::kAllReduce, 64 << 20, shape, model);
  const PatternKind asked[] = {PatternKind::kDirect};
  EXPECT_EQ(candidates[Cheapest(candidates, asked)].kind, PatternKind::kDirect);
  // A kind that the op does not have leaves the choice to the model.
  const PatternKind tree[] = {PatternKind::kTree};
  EXPECT_EQ(Cheapest(candidates, tree), Cheapest(candidates));
}

TEST(CostTest, LanesAreUsedWhereOneSenderIsSlowerThanTheNetwork) {
  CostModel model;
  model.host_beta = model.between.beta / 8;
  const GroupShape shape{.hosts = 4, .ranks_per_host = 8, .lanes = 8};
  const auto large = Candidates(OpKind::kAllReduce, 64 << 20, shape, model);
  EXPECT_EQ(large[Cheapest(large)].lanes, 8);
  const auto small = Candidates(OpKind::kAllReduce, 8, shape, model);
  EXPECT_EQ(small[Cheapest(small)].lanes, 1);
  const auto one_host = Candidates(OpKind::kAllReduce, 1 << 20, {.ranks_per_host = 8}, model);
  EXPECT_EQ(one_host[0].between, 0);
  EXPECT_GT(one_host[0].inside, 0);
}

TEST(CostTest, MoreBytesNeverCostLess) {
  for (const OpKind op : kOps) {
    for (const int hosts : {2, 3, 16, 100, 8192}) {
      const GroupShape shape{.hosts = hosts, .ranks_per_host = 8, .lanes = 8};
      double before = 0;
      for (uint64_t bytes = 1; bytes <= 1u << 30; bytes *= 2) {
        const auto candidates = Candidates(op, bytes, shape, {});
        const double seconds = candidates[Cheapest(candidates)].seconds();
        EXPECT_GE(seconds, before);
        before = seconds;
      }
    }
  }
}

TEST(CostTest, TheChoiceCanBeReadWithItsReason) {
  const auto candidates = Candidates(OpKind::kAllReduce, 1 << 10, {.hosts = 4}, {});
  const std::string text = Explain(candidates, Cheapest(candidates));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 5);
  EXPECT_EQ(std::count(text.begin(), text.end(), '*'), 1);
  EXPECT_NE(text.find("* one-shot, 1 lane: "), std::string::npos) << text;
}

TEST(SimulateTest, OversubscriptionSlowsWhatLeavesTheLeafOnly) {
  const GroupShape shape{.hosts = 256};
  const auto candidates = Candidates(OpKind::kAllReduce, 64 << 20, shape, {});
  for (const Candidate& candidate : candidates) {
    const auto seconds = [&](double oversubscription) {
      return SimulateBetween(candidate, OpKind::kAllReduce, 64 << 20, shape, {},
                             {.oversubscription = oversubscription});
    };
    // One host of a leaf has its neighbour under another one.
    const bool local = candidate.kind == PatternKind::kRing;
    EXPECT_EQ(seconds(1) < seconds(8), !local) << PatternName(candidate.kind);
  }
}

TEST(SimulateTest, SixtyFiveThousandRanksTakeMilliseconds) {
  const GroupShape shape{.hosts = 8192, .ranks_per_host = 8, .lanes = 8};
  for (const OpKind op : kOps) {
    for (const Candidate& candidate : Candidates(op, 1 << 20, shape, {})) {
      EXPECT_GT(SimulateBetween(candidate, op, 1 << 20, shape, {}, {}), 0);
    }
  }
}

PatternCall Call(OpKind op, uint64_t bytes, int32_t hosts, bool one_shot = true) {
  return {op, bytes, hosts, 1, hosts - 1, one_shot};
}

TEST(ChoicePatternTest, FewHostsDoWithoutAndManyDoNot) {
  const PatternChoice choice;
  for (const OpKind op : {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kBarrier}) {
    for (int hosts = 2; hosts <= 4; ++hosts) {
      EXPECT_EQ(ChoosePattern(Call(op, 64, hosts), choice), std::nullopt) << hosts;
    }
    const auto chosen = ChoosePattern(Call(op, 64, 64), choice);
    ASSERT_TRUE(chosen) << OpKindName(op);
    EXPECT_TRUE(HasPattern(*chosen, op));
  }
  EXPECT_EQ(ChoosePattern(Call(OpKind::kBroadcast, 8, 2), choice), std::nullopt);
  // What everybody sends to everybody is the cheapest way to send it.
  EXPECT_EQ(ChoosePattern(Call(OpKind::kAllToAll, 64 * 1024, 8), choice), std::nullopt);
  // The root sends the whole array to each.
  EXPECT_NE(ChoosePattern(Call(OpKind::kBroadcast, 256 * 1024, 8), choice), std::nullopt);
  // More than a rank should be connected with.
  PatternChoice few = choice;
  few.model.most_peers = 2;
  EXPECT_EQ(ChoosePattern(Call(OpKind::kAllReduce, 256 * 1024, 8, false), few), PatternKind::kRing);
  EXPECT_EQ(ChoosePattern(Call(OpKind::kPermute, 64, 64), choice), std::nullopt);
}

// One rank for all of a host, where there are many of both.
TEST(ChoicePatternTest, HostsWithSeveralRanks) {
  const PatternChoice choice;
  for (const OpKind op : {OpKind::kAllReduce, OpKind::kBarrier}) {
    EXPECT_EQ(ChoosePattern({op, 64, 2, 2, 2}, choice), std::nullopt);
    const auto chosen = ChoosePattern({op, 64, 8, 8, 56}, choice);
    ASSERT_TRUE(chosen);
    EXPECT_FALSE(Collects(*chosen, op));
    // All of a host in one process: no more connections than hosts.
    EXPECT_EQ(ChoosePattern({op, 64, 3, 8, 2}, choice), std::nullopt);
  }
  EXPECT_EQ(ChoosePattern({OpKind::kAllReduce, kMostSharedBytes + 1, 8, 8, 56}, choice),
            std::nullopt);
  EXPECT_EQ(ChoosePattern({OpKind::kAllGather, 64, 8, 8, 56}, choice), std::nullopt);
}

// Which pattern adds decides over bits, and no two jobs measure the same.
TEST(ChoicePatternTest, SumsDoNotDependOnMeasurements) {
  const PatternChoice defaults;
  bool any = false;
  for (double alpha : {1e-6, 1e-4, 1e-2}) {
    PatternChoice measured = defaults;
    measured.measured = PathCost{.alpha = alpha, .overhead = alpha / 100, .beta = 1e-10};
    for (int32_t hosts : {2, 3, 5, 8, 16, 64, 300}) {
      for (uint64_t bytes : {64, 4096, 65536, 1048576}) {
        for (OpKind op : {OpKind::kAllReduce, OpKind::kReduceScatter}) {
          EXPECT_EQ(ChoosePattern(Call(op, bytes, hosts), measured),
                    ChoosePattern(Call(op, bytes, hosts), defaults));
        }
        const auto call = Call(OpKind::kAllGather, bytes, hosts);
        any |= ChoosePattern(call, measured) != ChoosePattern(call, defaults);
      }
    }
  }
  EXPECT_TRUE(any) << "nor does anything else";
}

TEST(ChoicePatternTest, NamedOnesAreTakenWhereTheyFit) {
  PatternChoice choice = *PatternChoice::Parse("tree,bruck");
  EXPECT_EQ(ChoosePattern(Call(OpKind::kBroadcast, 8, 2), choice), PatternKind::kTree);
  EXPECT_EQ(ChoosePattern(Call(OpKind::kAllToAll, 8, 3), choice), PatternKind::kBruck);
  EXPECT_EQ(ChoosePattern(Call(OpKind::kAllReduce, 8, 2), choice), std::nullopt);
  // Too much for its receivers.
  EXPECT_EQ(ChoosePattern(Call(OpKind::kAllToAll, 64 << 20, 3), choice), std::nullopt);
  choice = *PatternChoice::Parse("none");
  EXPECT_EQ(ChoosePattern(Call(OpKind::kBarrier, 0, 1000), choice), std::nullopt);
  const auto bad = PatternChoice::Parse("ring,,tree");
  ASSERT_FALSE(bad.ok());
  EXPECT_NE(bad.status().ToString().find("halving-doubling"), std::string::npos);
}

}  // namespace
}  // namespace jaxfabric
