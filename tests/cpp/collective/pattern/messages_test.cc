// Where messages lie, for all patterns of 2 to 17 members: both ends say the same, nothing
// overlaps.
#include "collective/pattern/messages.h"

#include <gtest/gtest.h>

#include <map>
#include <utility>

namespace jaxfabric {
namespace {

constexpr OpKind kOps[] = {OpKind::kAllReduce, OpKind::kAllGather, OpKind::kReduceScatter,
                           OpKind::kAllToAll,  OpKind::kBroadcast, OpKind::kBarrier};

TEST(MessagesTest, SendersPutWhereReceiversLook) {
  for (const OpKind op : kOps) {
    for (const PatternKind kind : kPatternKinds) {
      if (!HasPattern(kind, op)) continue;
      for (int n = 2; n <= 17; ++n) {
        SCOPED_TRACE(std::string(PatternName(kind)) + " " + std::string(OpKindName(op)));
        const int root = n / 2;
        const size_t array = op == OpKind::kBarrier ? 0 : static_cast<size_t>(n) * 200;
        const size_t most = MostMessageBytes(kind, op, n, array);
        std::vector<PatternMessages> all;
        for (int member = 0; member < n; ++member) {
          all.emplace_back(kind, op, n, member, root, array);
          EXPECT_LE(all.back().bytes, most) << member << " of " << n;
        }
        // What has been sent from one to another and not been taken yet.
        std::map<std::pair<int, int>, std::vector<std::pair<PatternMessages::Place, size_t>>> sent;
        for (int member = 0; member < n; ++member) {
          const PatternMessages& own = all[static_cast<size_t>(member)];
          for (size_t i = 0; i < own.pattern.steps.size(); ++i) {
            const Step& step = own.pattern.steps[i];
            if (step.to == kNobody) continue;
            sent[{member, step.to}].emplace_back(own.sent[i], own.cut.Bytes(step.sent));
          }
        }
        for (int member = 0; member < n; ++member) {
          const PatternMessages& own = all[static_cast<size_t>(member)];
          size_t end = own.counter_bytes;
          size_t counters = 0;
          for (size_t i = 0; i < own.pattern.steps.size(); ++i) {
            const Step& step = own.pattern.steps[i];
            if (step.from == kNobody) continue;
            auto& coming = sent[{step.from, member}];
            ASSERT_FALSE(coming.empty());
            const auto [place, bytes] = coming.front();
            coming.erase(coming.begin());
            EXPECT_EQ(place.counter, own.received[i].counter);
            EXPECT_EQ(place.bytes_at, own.received[i].bytes_at);
            EXPECT_EQ(bytes, own.cut.Bytes(step.received));
            EXPECT_EQ(place.counter, counters * sizeof(uint64_t));
            EXPECT_GE(place.bytes_at, end);
            EXPECT_EQ(place.bytes_at % 64, 0u);
            end = place.bytes_at + bytes;
            ++counters;
          }
          EXPECT_LE(end, own.works_beside ? own.work : own.bytes);
          EXPECT_LE(counters * sizeof(uint64_t), own.counter_bytes);
        }
        for (const auto& [pair, left] : sent) EXPECT_TRUE(left.empty());
      }
    }
  }
}

TEST(MessagesTest, BlocksCoverTheArray) {
  for (const size_t bytes : {0, 1, 63, 64, 65, 1000, 65536}) {
    for (uint32_t blocks = 1; blocks <= 9; ++blocks) {
      const BlockCut cut(blocks, bytes, /*rows=*/false);
      size_t end = 0;
      for (uint32_t block = 0; block < blocks; ++block) {
        EXPECT_EQ(cut.Begin(block), end);
        end += cut.Bytes(block);
      }
      EXPECT_EQ(end, bytes);
    }
  }
}

}  // namespace
}  // namespace jaxfabric
