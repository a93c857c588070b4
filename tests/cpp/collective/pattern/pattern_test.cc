#include "collective/pattern/pattern.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>

#include "collective/pattern/played.h"

namespace jaxfabric {
namespace {

constexpr int kLargest = 17;
constexpr uint32_t kSeeds = 5;
constexpr OpKind kOps[] = {OpKind::kAllReduce, OpKind::kAllGather,      OpKind::kReduceScatter,
                           OpKind::kAllToAll,  OpKind::kRaggedAllToAll, OpKind::kBroadcast,
                           OpKind::kBarrier};

struct Case {
  PatternKind kind;
  OpKind op;
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const PatternKind kind : kPatternKinds) {
    for (const OpKind op : kOps) {
      if (HasPattern(kind, op)) cases.push_back({kind, op});
    }
  }
  return cases;
}

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  std::string name = StrCat(OpKindName(info.param.op), "_", PatternName(info.param.kind));
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

bool Reduces(OpKind op) { return op == OpKind::kAllReduce || op == OpKind::kReduceScatter; }
bool Scatters(OpKind op) { return op == OpKind::kAllToAll || op == OpKind::kRaggedAllToAll; }

// What a member starts with.
std::vector<Block> Start(OpKind op, int n, int member, uint32_t blocks, int root) {
  std::vector<Block> array(blocks);
  for (uint32_t block = 0; block < blocks; ++block) {
    const int b = static_cast<int>(block);
    if (Reduces(op)) array[block] = {StrCat(member, ".", b)};
    if (op == OpKind::kAllGather && b == member) array[block] = {StrCat(member)};
    if (op == OpKind::kBroadcast && member == root) array[block] = {"root"};
    if (Scatters(op)) array[block] = {StrCat(member, ">", (member + b) % n)};
  }
  return array;
}

std::string Term(int member, int block) { return StrCat(member, ".", block); }

std::string Chain(int n, int first, int block) {
  std::string sum = Term(first % n, block);
  for (int i = 1; i < n; ++i) sum = StrCat("(", sum, "+", Term((first + i) % n, block), ")");
  return sum;
}

// The tree over the leaves [first, first + count * stride): pairs of neighbours last, or first.
std::string Tree(const std::vector<std::string>& leaves, size_t first, size_t stride, size_t count,
                 bool distant_first) {
  if (count == 1) return leaves[first];
  const size_t half = count / 2;
  const auto part = [&](size_t from, size_t step) {
    return Tree(leaves, from, step, half, distant_first);
  };
  return distant_first
             ? StrCat("(", part(first, 2 * stride), "+", part(first + stride, 2 * stride), ")")
             : StrCat("(", part(first, stride), "+", part(first + half * stride, stride), ")");
}

// What the header says of the order of additions.
std::string Expected(PatternKind kind, int n, int block) {
  if (kind == PatternKind::kRing) return Chain(n, block + 1, block);
  if (kind == PatternKind::kDirect || kind == PatternKind::kOneShot) return Chain(n, 0, block);
  const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  std::vector<std::string> leaves;
  for (int member = 0; member < n; ++member) {
    if (member < 2 * (n - power)) {
      leaves.push_back(StrCat("(", Term(member, block), "+", Term(member + 1, block), ")"));
      ++member;
    } else {
      leaves.push_back(Term(member, block));
    }
  }
  return Tree(leaves, 0, 1, leaves.size(), kind == PatternKind::kHalvingDoubling);
}

void CheckResult(const Case& test, const Played& played, int n, uint32_t blocks) {
  for (int member = 0; member < n; ++member) {
    for (uint32_t block = 0; block < blocks; ++block) {
      const int b = static_cast<int>(block);
      const Block& value = played.At(member, block);
      const bool own = test.op == OpKind::kReduceScatter && b == member;
      if (test.op == OpKind::kAllReduce || own) {
        EXPECT_EQ(value, Block{Expected(test.kind, n, b)});
      }
      if (test.op == OpKind::kAllGather) {
        EXPECT_EQ(value, Block{StrCat(b)});
      }
      if (Scatters(test.op)) {
        EXPECT_EQ(value, Block{StrCat((member + n - b) % n, ">", member)});
      }
      if (test.op == OpKind::kBroadcast) {
        EXPECT_EQ(value, Block{"root"});
      }
    }
    if (test.op == OpKind::kBarrier) {
      EXPECT_EQ(played.HeardOf(member), (uint64_t{1} << n) - 1);
    }
  }
}

class PatternTest : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, PatternTest, testing::ValuesIn(Cases()), CaseName);

TEST_P(PatternTest, EveryMemberEndsWithTheResultInAnyOrderOfArrivals) {
  const auto [kind, op] = GetParam();
  for (int n = 1; n <= kLargest; ++n) {
    for (int root = 0; root < (op == OpKind::kBroadcast ? n : 1); ++root) {
      const auto patterns = MakeAll(kind, op, n, root);
      std::vector<std::vector<Block>> arrays;
      for (int member = 0; member < n; ++member) {
        arrays.push_back(Start(op, n, member, patterns[0].blocks, root));
      }
      for (uint32_t seed = 0; seed < kSeeds; ++seed) {
        for (const bool separate : {false, true}) {
          if (separate && (!Scatters(op) || kind == PatternKind::kBruck)) continue;
          SCOPED_TRACE(StrCat(n, " members, root ", root, ", seed ", seed));
          Played played(patterns, arrays, separate);
          ASSERT_EQ(played.Run(seed), "");
          CheckResult(GetParam(), played, n, patterns[0].blocks);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(PatternTest, WhatIsSentIsWhatIsReceived) {
  const auto [kind, op] = GetParam();
  for (int n = 1; n <= kLargest; ++n) {
    // By sender and receiver: the blocks of each message.
    std::map<std::pair<int, int>, std::vector<std::vector<uint32_t>>> sent, received;
    for (const Pattern& pattern : MakeAll(kind, op, n, n / 2)) {
      uint32_t number = 0;
      for (const Step& step : pattern.steps) {
        EXPECT_LE(step.needs, number++);
        EXPECT_NE(step.to, pattern.member);
        EXPECT_NE(step.from, pattern.member);
        const auto list = [&](const Blocks& blocks) {
          std::vector<uint32_t> numbers;
          for (uint32_t i = 0; i < blocks.count; ++i) {
            numbers.push_back(blocks.At(i, pattern.blocks));
            EXPECT_EQ(std::count(numbers.begin(), numbers.end(), numbers.back()), 1);
          }
          return numbers;
        };
        if (step.to != kNobody) sent[{pattern.member, step.to}].push_back(list(step.sent));
        if (step.from != kNobody) {
          received[{step.from, pattern.member}].push_back(list(step.received));
        }
      }
    }
    EXPECT_EQ(sent, received) << n << " members";
  }
}

// The most that a member sends, in blocks, and its steps.
struct Most {
  uint64_t sent = 0;
  uint64_t received = 0;
  size_t steps = 0;
};

Most MostOf(PatternKind kind, OpKind op, int n) {
  Most most;
  for (const Pattern& pattern : MakeAll(kind, op, n)) {
    uint64_t sent = 0, received = 0;
    for (const Step& step : pattern.steps) {
      sent += step.sent.count;
      received += step.received.count;
    }
    most.sent = std::max(most.sent, sent);
    most.received = std::max(most.received, received);
    most.steps = std::max(most.steps, pattern.steps.size());
  }
  return most;
}

TEST(PatternTest, BytesAndStepsAreTheKnownOnes) {
  using enum PatternKind;
  for (int n = 1; n <= kLargest; ++n) {
    SCOPED_TRACE(n);
    const auto members = static_cast<unsigned>(n);
    const uint64_t others = members - 1;
    const size_t log = static_cast<size_t>(std::bit_width(others));  // of n, rounded up
    const uint64_t power = std::bit_floor(members);
    const bool is_power = power == members;
    const size_t folds = is_power ? 0 : 2;
    const auto expect = [&](PatternKind kind, OpKind op, uint64_t sent, size_t steps) {
      const Most most = MostOf(kind, op, n);
      EXPECT_EQ(most.sent, n == 1 ? 0 : sent) << PatternName(kind) << " " << OpKindName(op);
      EXPECT_EQ(most.steps, n == 1 ? 0 : steps) << PatternName(kind) << " " << OpKindName(op);
    };
    for (const PatternKind kind : {kDirect, kRing}) {  // 2 (n-1)/n and (n-1)/n of the array
      expect(kind, OpKind::kAllReduce, 2 * others, 2 * others);
      expect(kind, OpKind::kReduceScatter, others, others);
      expect(kind, OpKind::kAllGather, others, others);
    }
    expect(kOneShot, OpKind::kAllReduce, others, others);
    expect(kBruck, OpKind::kAllGather, others, log);
    for (const PatternKind kind : {kDirect, kPairwise}) {
      expect(kind, OpKind::kAllToAll, others, others);
      expect(kind, OpKind::kRaggedAllToAll, others, others);
    }
    uint64_t forwarded = 0;  // a block goes as many times as its distance has bits
    for (unsigned distance = 1; distance < members; ++distance) {
      forwarded += static_cast<uint64_t>(std::popcount(distance));
    }
    expect(kBruck, OpKind::kAllToAll, forwarded, log);
    expect(kDissemination, OpKind::kBarrier, 0, log);
    expect(kTree, OpKind::kBroadcast, log, log);
    expect(kDirect, OpKind::kBroadcast, 2 * others, 2 * others);
    EXPECT_EQ(MostOf(kDirect, OpKind::kBroadcast, n).received, n == 1 ? 0 : others + 1);
    const size_t rounds = static_cast<size_t>(std::bit_width(power)) - 1 + folds;
    expect(kRecursiveDoubling, OpKind::kAllReduce, rounds - folds / 2, rounds);
    expect(kRecursiveDoubling, OpKind::kBarrier, 0, rounds);
    expect(kHalvingDoubling, OpKind::kAllReduce, 2 * (power - 1) + (is_power ? 0 : power),
           2 * (rounds - folds) + folds);
    if (is_power) {
      expect(kRecursiveDoubling, OpKind::kAllGather, others, log);
      expect(kHalvingDoubling, OpKind::kReduceScatter, others, log);
    }
    EXPECT_EQ(MostOf(kRecursiveDoubling, OpKind::kAllGather, n).received, others);
    EXPECT_EQ(MostOf(kTree, OpKind::kBroadcast, n).received, n == 1 ? 0 : 1);
  }
}

TEST(PatternTest, PermuteSendsAlongItsPairs) {
  for (int n = 1; n <= kLargest; ++n) {
    for (int shift = 0; shift < n; ++shift) {
      std::vector<int64_t> pairs;
      for (int source = 0; source < n; ++source) {
        if (source % 5 != 4) pairs.insert(pairs.end(), {source, (source + shift) % n});
      }
      std::vector<Pattern> patterns;
      std::vector<std::vector<Block>> arrays;
      for (int member = 0; member < n; ++member) {
        patterns.push_back(MakePermute(pairs, n, member));
        arrays.push_back({{StrCat(member)}});
      }
      for (uint32_t seed = 0; seed < kSeeds; ++seed) {
        Played played(patterns, arrays);
        ASSERT_EQ(played.Run(seed), "");
        for (size_t i = 0; i < pairs.size(); i += 2) {
          EXPECT_EQ(played.At(static_cast<int>(pairs[i + 1]), 0), Block{StrCat(pairs[i])});
        }
      }
    }
  }
}

TEST(PatternTest, OneMemberOfManyIsCheap) {
  constexpr int kMembers = 65536;
  for (const auto& [kind, op] : Cases()) {
    const Pattern pattern = MakePattern(kind, op, kMembers, kMembers - 1);
    EXPECT_LE(pattern.steps.size(), size_t{2} * kMembers);
  }
  EXPECT_EQ(MakePattern(PatternKind::kBruck, OpKind::kAllToAll, kMembers, 7).steps.size(), 16);
}

// The player itself finds what is wrong.
TEST(PatternTest, AMissingStepIsNoticed) {
  auto patterns = MakeAll(PatternKind::kRing, OpKind::kAllReduce, 4);
  patterns[2].steps.pop_back();
  std::vector<std::vector<Block>> arrays;
  for (int member = 0; member < 4; ++member) {
    arrays.push_back(Start(OpKind::kAllReduce, 4, member, 4, 0));
  }
  EXPECT_NE(Played(patterns, arrays).Run(2), "");
  patterns = MakeAll(PatternKind::kRing, OpKind::kAllReduce, 4);
  patterns[1].steps[2].sent.count = 2;
  patterns[1].steps[2].sent.run = 2;
  EXPECT_NE(Played(patterns, arrays).Run(2), "");
}

}  // namespace
}  // namespace jaxfabric
