#include "base/hash.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>

namespace jaxfabric {
namespace {

// The values cross processes and versions: a change of the function must be a decision.
TEST(Hasher, IsPinned) {
  EXPECT_EQ(Hasher().Add("psum").Add(uint64_t{3}).Finish(), 0xdcc98c741908328dull);
}

TEST(Hasher, SeparatesFields) {
  EXPECT_NE(Hasher().Add("ab").Add("c").Finish(), Hasher().Add("a").Add("bc").Finish());
  EXPECT_NE(Hasher().Add("").Finish(), Hasher().Finish());
  const std::array<int64_t, 2> two = {1, 2};
  const std::array<int64_t, 2> swapped = {2, 1};
  EXPECT_NE(Hasher().Add(std::span<const int64_t>(two)).Finish(),
            Hasher().Add(std::span<const int64_t>(swapped)).Finish());
}

TEST(Hasher, SmallNumbersDoNotCollide) {
  std::set<uint64_t> seen;
  for (uint64_t i = 0; i < 10000; ++i) seen.insert(Hasher().Add(i).Finish());
  EXPECT_EQ(seen.size(), 10000u);
  EXPECT_EQ(seen.count(0), 0u);
}

}  // namespace
}  // namespace jaxfabric
