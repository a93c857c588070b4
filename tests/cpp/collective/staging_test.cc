#include "collective/staging.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace jaxfabric {
namespace {

TEST(StagingPoolTest, HandsOutDisjointBlocksAndMergesThemAgain) {
  constexpr uint64_t kBegin = 4096;
  constexpr uint64_t kEnd = kBegin + (1 << 20);
  StagingPool pool(kBegin, kEnd);
  std::mt19937_64 random(5);
  std::map<uint64_t, uint64_t> taken;
  uint64_t used = 0;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const uint64_t bytes = 1 + random() % 40000;
      const auto block = pool.TryAllocate(bytes);
      if (!block) continue;
      ASSERT_GE(block->bytes, bytes);
      ASSERT_EQ(block->offset % 64, 0u);
      ASSERT_GE(block->offset, kBegin);
      ASSERT_LE(block->offset + block->bytes, kEnd);
      const auto next = taken.lower_bound(block->offset);
      if (next != taken.end()) {
        ASSERT_LE(block->offset + block->bytes, next->first);
      }
      if (next != taken.begin()) {
        const auto previous = std::prev(next);
        ASSERT_LE(previous->first + previous->second, block->offset);
      }
      taken[block->offset] = block->bytes;
      used += block->bytes;
    } else if (!taken.empty()) {
      auto victim = taken.lower_bound(kBegin + random() % (kEnd - kBegin));
      if (victim == taken.end()) victim = taken.begin();
      pool.Free({victim->first, victim->second});
      used -= victim->second;
      taken.erase(victim);
    }
    ASSERT_EQ(pool.free_bytes(), kEnd - kBegin - used);
  }
  for (auto [offset, bytes] : taken) pool.Free({offset, bytes});
  // One block again.
  EXPECT_TRUE(pool.TryAllocate(kEnd - kBegin).has_value());
  EXPECT_FALSE(pool.TryAllocate(1).has_value());
}

TEST(StagingPoolTest, NothingIsFreedForAnEmptyBlock) {
  StagingPool pool(64, 128);
  pool.Free({});
  EXPECT_EQ(pool.free_bytes(), 64u);
}

TEST(StagingPoolTest, AnEmptyPoolGivesNothing) {
  StagingPool pool(64, 64);
  EXPECT_FALSE(pool.TryAllocate(1).has_value());
}

TEST(CellAllocatorTest, HandsOutEveryCellOnce) {
  CellAllocator cells(5);
  std::set<uint32_t> seen;
  for (int i = 0; i < 5; ++i) seen.insert(cells.TryAllocate().value());
  EXPECT_EQ(seen, (std::set<uint32_t>{0, 1, 2, 3, 4}));
  EXPECT_FALSE(cells.TryAllocate().has_value());
  cells.Free(3);
  EXPECT_EQ(cells.TryAllocate(), 3u);
}

}  // namespace
}  // namespace jaxfabric
