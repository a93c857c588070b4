#include "collective/pattern/hierarchy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "collective/pattern/played.h"

namespace jaxfabric {
namespace {

constexpr int kRanks = 17;
constexpr int kHosts = 5;

// Calls with every way to spread up to 17 ranks over up to 5 hosts.
void ForEachSplit(const std::function<void(const std::vector<int32_t>&)>& call) {
  std::vector<int32_t> sizes;
  const std::function<void(int)> extend = [&](int left) {
    if (!sizes.empty()) call(sizes);
    if (sizes.size() == kHosts) return;
    for (int size = 1; size <= left; ++size) {
      sizes.push_back(size);
      extend(left - size);
      sizes.pop_back();
    }
  };
  extend(kRanks);
}

// Ranks of a host next to each other, or dealt out in turns.
std::vector<int32_t> HostOf(std::vector<int32_t> sizes, bool dealt) {
  std::vector<int32_t> host_of;
  if (!dealt) {
    for (size_t host = 0; host < sizes.size(); ++host) {
      host_of.insert(host_of.end(), static_cast<size_t>(sizes[host]),
                     static_cast<int32_t>(host) + 100);
    }
    return host_of;
  }
  for (bool any = true; any;) {
    any = false;
    for (size_t host = 0; host < sizes.size(); ++host) {
      if (sizes[host]-- <= 0) continue;
      host_of.push_back(static_cast<int32_t>(host) + 100);
      any = true;
    }
  }
  return host_of;
}

std::vector<int> RanksOn(const Hierarchy& hierarchy, int host) {
  std::vector<int> positions;
  for (int local = 0; local < hierarchy.RanksOf(host); ++local) {
    positions.push_back(hierarchy.PositionOf(host, local));
  }
  return positions;
}

// What lane `lane` of `host` has for `block` of the pattern before it begins.
Block Gathered(const Hierarchy& hierarchy, OpKind op, int host, int lane, int other) {
  Block block;
  if (op == OpKind::kAllReduce) {
    for (const int rank : RanksOn(hierarchy, host)) {
      const Block own{StrCat(rank)};
      block = block.empty() ? own : Sum(block, own);
    }
  } else if (op == OpKind::kReduceScatter) {
    for (const int target : hierarchy.Carried(other, lane)) {
      Block sum;
      for (const int rank : RanksOn(hierarchy, host)) {
        const Block own{StrCat(rank, ">", target)};
        sum = sum.empty() ? own : Sum(sum, own);
      }
      block.push_back(sum[0]);
    }
  } else if (op == OpKind::kAllGather) {
    if (other != host) return {};
    for (const int rank : hierarchy.Carried(host, lane)) block.push_back(StrCat(rank));
  } else if (op == OpKind::kBroadcast) {
    block = {"root"};
  } else {
    for (const int target : hierarchy.Carried(other, lane)) {
      for (const int rank : RanksOn(hierarchy, host)) block.push_back(StrCat(rank, ">", target));
    }
  }
  return block;
}

// Ranks that an expression has, sorted: "(3>5+1>5)" has 1 and 3.
std::vector<int> RanksIn(const std::string& expression) {
  std::vector<int> ranks;
  bool in_number = false, is_target = false;
  for (const char c : expression) {
    const bool digit = c >= '0' && c <= '9';
    if (digit && !is_target) {
      if (!in_number) ranks.push_back(0);
      ranks.back() = ranks.back() * 10 + (c - '0');
    }
    if (!digit) is_target = c == '>';
    in_number = digit;
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

PatternKind KindFor(OpKind op, int number) {
  std::vector<PatternKind> kinds;
  for (const PatternKind kind : kPatternKinds) {
    if (HasPattern(kind, op)) kinds.push_back(kind);
  }
  return kinds[static_cast<size_t>(number) % kinds.size()];
}

class Run {
 public:
  Run(const Hierarchy& hierarchy, OpKind op, PatternKind kind, int root) : hierarchy_(hierarchy) {
    const int hosts = hierarchy.hosts();
    const auto patterns = MakeAll(kind, op, hosts, hierarchy.HostOf(root));
    const bool scatters = op == OpKind::kAllToAll || op == OpKind::kRaggedAllToAll;
    for (int lane = 0; lane < hierarchy.lanes(); ++lane) {
      std::vector<std::vector<Block>> arrays;
      for (int host = 0; host < hosts; ++host) {
        std::vector<Block> array;
        for (uint32_t block = 0; block < patterns[0].blocks; ++block) {
          const int b = static_cast<int>(block);
          const int other = scatters ? (host + b) % hosts : b;
          const bool silent = op == OpKind::kBroadcast && host != hierarchy.HostOf(root);
          array.push_back(silent ? Block{} : Gathered(hierarchy, op, host, lane, other));
        }
        arrays.push_back(array);
      }
      lanes_.emplace_back(patterns, arrays);
      EXPECT_EQ(lanes_.back().Run(0), "");
    }
  }

  const Played& lane(int lane) const { return lanes_[static_cast<size_t>(lane)]; }
  const Block& At(int lane_number, int host, int block) const {
    return lane(lane_number).At(host, static_cast<uint32_t>(block));
  }

  // One bit for each host.
  uint64_t Heard(int host) const { return lane(0).HeardOf(host); }

 private:
  const Hierarchy& hierarchy_;
  std::vector<Played> lanes_;
};

void Check(const Hierarchy& hierarchy, OpKind op, PatternKind kind, int root) {
  const Run run(hierarchy, op, kind, root);
  const int hosts = hierarchy.hosts();
  std::vector<int> everyone(static_cast<size_t>(hierarchy.ranks()));
  std::iota(everyone.begin(), everyone.end(), 0);
  for (int rank = 0; rank < hierarchy.ranks(); ++rank) {
    const int host = hierarchy.HostOf(rank);
    const int own_lane = hierarchy.LaneOf(rank);
    // Where this rank's thing is among those of its lane.
    const auto carried = hierarchy.Carried(host, own_lane);
    const auto place =
        static_cast<size_t>(std::find(carried.begin(), carried.end(), rank) - carried.begin());
    ASSERT_LT(place, carried.size());
    if (op == OpKind::kAllReduce) {
      for (int lane = 0; lane < hierarchy.lanes(); ++lane) {
        EXPECT_EQ(RanksIn(run.At(lane, host, 0)[0]), everyone);
        EXPECT_EQ(run.At(lane, host, 0), run.At(0, 0, 0));
      }
    } else if (op == OpKind::kReduceScatter) {
      EXPECT_EQ(RanksIn(run.At(own_lane, host, host).at(place)), everyone);
    } else if (op == OpKind::kAllGather) {
      std::vector<int> got;
      for (int lane = 0; lane < hierarchy.lanes(); ++lane) {
        for (int other = 0; other < hosts; ++other) {
          for (const auto& value : run.At(lane, host, other)) got.push_back(std::stoi(value));
        }
      }
      std::sort(got.begin(), got.end());
      EXPECT_EQ(got, everyone);
    } else if (op == OpKind::kBroadcast) {
      for (int lane = 0; lane < hierarchy.lanes(); ++lane) {
        EXPECT_EQ(run.At(lane, host, 0), Block{"root"});
        const int last = kind == PatternKind::kDirect ? hosts - 1 : 0;
        EXPECT_EQ(run.At(lane, host, last), Block{"root"});
      }
    } else if (op == OpKind::kBarrier) {
      EXPECT_EQ(run.Heard(host), (uint64_t{1} << hosts) - 1);
    } else {
      // Receiver by receiver: as many senders as the other host has ranks.
      std::vector<int> senders;
      for (int distance = 0; distance < hosts; ++distance) {
        const int other = (host + hosts - distance) % hosts;
        const auto count = static_cast<size_t>(hierarchy.RanksOf(other));
        const Block& block = run.At(own_lane, host, distance);
        ASSERT_EQ(block.size(), carried.size() * count);
        for (size_t i = place * count; i < (place + 1) * count; ++i) {
          senders.push_back(std::stoi(block[i]));
          EXPECT_EQ(block[i], StrCat(senders.back(), ">", rank));
        }
      }
      std::sort(senders.begin(), senders.end());
      EXPECT_EQ(senders, everyone);
    }
  }
}

class HierarchyOpTest : public testing::TestWithParam<OpKind> {};
INSTANTIATE_TEST_SUITE_P(All, HierarchyOpTest,
                         testing::Values(OpKind::kAllReduce, OpKind::kAllGather,
                                         OpKind::kReduceScatter, OpKind::kAllToAll,
                                         OpKind::kRaggedAllToAll, OpKind::kBroadcast,
                                         OpKind::kBarrier),
                         [](const auto& test) { return std::string(OpKindName(test.param)); });

TEST_P(HierarchyOpTest, EveryRankGetsAllThatIsItsOnceForEverySplit) {
  int number = 0;
  ForEachSplit([&](const std::vector<int32_t>& sizes) {
    if (HasFailure()) return;
    ++number;
    const Hierarchy hierarchy(HostOf(sizes, number % 2 == 0), number % 3 == 0 ? 2 : 0);
    const PatternKind kind = KindFor(GetParam(), number);
    Check(hierarchy, GetParam(), kind, number % hierarchy.ranks());
    if (HasFailure()) {
      ADD_FAILURE() << "by " << PatternName(kind) << " on " << testing::PrintToString(sizes)
                    << ", number " << number;
    }
  });
  EXPECT_TRUE(HasFailure() || number == 9401) << number;
}

TEST(HierarchyTest, LanesAreAsManyAsTheSmallestHostHasRanks) {
  ForEachSplit([&](const std::vector<int32_t>& sizes) {
    for (const bool dealt : {false, true}) {
      const auto host_of = HostOf(sizes, dealt);
      const Hierarchy hierarchy(host_of);
      ASSERT_EQ(hierarchy.lanes(), *std::min_element(sizes.begin(), sizes.end()));
      ASSERT_EQ(hierarchy.hosts(), static_cast<int>(sizes.size()));
      int on_lanes = 0, carried = 0;
      for (int rank = 0; rank < hierarchy.ranks(); ++rank) {
        const int host = hierarchy.HostOf(rank);
        ASSERT_EQ(host, host_of[static_cast<size_t>(rank)] - 100);
        ASSERT_EQ(hierarchy.PositionOf(host, hierarchy.LocalOf(rank)), rank);
        on_lanes += hierarchy.OnLane(rank);
      }
      for (int host = 0; host < hierarchy.hosts(); ++host) {
        for (int lane = 0; lane < hierarchy.lanes(); ++lane) {
          const auto positions = hierarchy.Carried(host, lane);
          carried += static_cast<int>(positions.size());
          ASSERT_TRUE(hierarchy.OnLane(positions.at(0)));
          ASSERT_TRUE(std::is_sorted(positions.begin(), positions.end()));
        }
      }
      ASSERT_EQ(on_lanes, hierarchy.lanes() * hierarchy.hosts());
      ASSERT_EQ(carried, hierarchy.ranks());
    }
  });
}

TEST(HierarchyTest, FewerLanesWhereThatIsAskedFor) {
  const std::vector<int32_t> host_of{7, 7, 7, 7, 3, 3, 3};
  EXPECT_EQ(Hierarchy(host_of, 1).lanes(), 1);
  EXPECT_EQ(Hierarchy(host_of, 9).lanes(), 3);
  EXPECT_EQ(Hierarchy(host_of, 1).Carried(0, 0), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(Hierarchy(host_of, 3).Carried(0, 0), (std::vector<int32_t>{0, 3}));
}

TEST(HierarchyTest, PermuteGoesFromRankToRank) {
  EXPECT_FALSE(StagesOf(OpKind::kPermute).by_host);
  EXPECT_TRUE(StagesOf(OpKind::kBarrier).by_host);
}

}  // namespace
}  // namespace jaxfabric
