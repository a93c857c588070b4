// The protocol of lanes: that areas and counters serve any number of calls, and what happens where
// counters wrap.
#include "device/mixed_calls.h"

namespace jaxfabric::device {
namespace {

constexpr uint32_t kCalls = Rounds(10000);

TEST(Lane, ThousandsOfMixedCallsGiveWhatTheyShould) {
  const ArenaShape shape{3, 4, 64, MixedBulkBytes(3)};
  Cluster cluster(shape, 7);
  std::mt19937_64 random(1);
  std::vector<MixedCall> calls;
  for (uint32_t i = 0; i < kCalls; ++i) {
    calls.push_back(RandomCall(random, shape, MixedKernels()[random() % MixedKernels().size()], 2));
  }
  EXPECT_TRUE(RunCalls(cluster, kCalls, [&](uint32_t i) { return calls[i]; }));
}

TEST(Lane, TwoRanksGoAroundEachOther) {
  const ArenaShape shape{2, 2, 64, MixedBulkBytes(2)};
  for (uint64_t seed = 0; seed < MixedKernels().size() * (kThreadSanitizer ? 1 : 2); ++seed) {
    Cluster cluster(shape, seed);
    std::mt19937_64 random(seed);
    std::vector<MixedCall> calls;
    // Calls of one kind follow each other: the same areas, with both parities.
    const std::string& kernel = MixedKernels()[seed % MixedKernels().size()];
    for (int i = 0; i < 20; ++i) calls.push_back(RandomCall(random, shape, kernel, 4));
    ASSERT_TRUE(RunCalls(cluster, 20, [&](uint32_t i) { return calls[i]; })) << "seed " << seed;
  }
}

// Packets as they would be left from the time when the counters had these values before.
void PlantPackets(Cluster& cluster, uint32_t first_step) {
  const ArenaShape& shape = cluster.shape();
  for (uint32_t rank = 0; rank < shape.ranks; ++rank) {
    for (uint32_t lane = 0; lane < shape.lanes; ++lane) {
      for (uint32_t parity = 0; parity < 2; ++parity) {
        for (uint32_t source = 0; source < shape.ranks; ++source) {
          auto* packets = reinterpret_cast<Packet*>(cluster.arena(rank) +
                                                    shape.PacketsOffset(lane, parity, source));
          for (uint32_t i = 0; i < shape.packet_bytes / kPacketData; ++i) {
            const uint32_t flag = ((first_step + i % 16) & ~1u) | parity;
            packets[i] = {0xDEADBEEF, flag, 0xDEADBEEF, flag};
          }
        }
      }
    }
  }
}

class LaneCounter : public testing::TestWithParam<uint32_t> {};

TEST_P(LaneCounter, GoesPastWhereOldPacketsWouldBeTaken) {
  for (uint32_t before = 1; before < 5; ++before) {
    for (uint64_t seed = 0; seed < (kThreadSanitizer ? 2u : 12u); ++seed) {
      const auto ranks = static_cast<uint32_t>(2 + seed % 4);
      const ArenaShape shape{ranks, 1, 128, MixedBulkBytes(ranks)};
      Cluster cluster(shape, seed);
      cluster.SetStep(GetParam() - before);
      // Ten steps without packets and two of cleaning: then the areas are used, one parity after
      // the other.
      PlantPackets(cluster, GetParam() + 4);
      std::mt19937_64 random(seed);
      std::vector<MixedCall> calls;
      for (uint32_t i = 0; i < 20; ++i) {
        calls.push_back(RandomCall(random, shape, i < 10 ? "barrier" : "all_to_all_packets", 1));
        calls.back().bytes = 128;
      }
      ASSERT_TRUE(RunCalls(cluster, 20, [&](uint32_t i) { return calls[i]; }))
          << "seed " << seed << ", " << before << " before";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Wraps, LaneCounter, testing::Values(1u << 30, 1u << 31, 3u << 30, 0u),
                         [](const auto& tested) {
                           return "At" + std::to_string(tested.param >> 30);
                         });

TEST(Lane, CountersAreEqualAfterEqualCalls) {
  const ArenaShape shape{3, 2, 128, kLineBytes * 3};
  Cluster cluster(shape, 3);
  cluster.SetStep(0xFFFFFFFE);
  MixedCall call{"all_gather_push", 3, 2, 4, 900, 1, 0, 0, 0};
  ASSERT_TRUE(RunCalls(cluster, 1, [&](uint32_t) { return call; }));
  // Four steps of 128 bytes: 0xFFFFFFFF, 2, 3, 4. 0 is what fresh packets show, and 1 would break
  // the parity. Then two of cleaning.
  for (uint32_t rank = 0; rank < 3; ++rank) {
    for (uint32_t lane = 0; lane < 2; ++lane) {
      EXPECT_EQ(
          reinterpret_cast<LaneControl*>(cluster.arena(rank) + shape.ControlOffset(lane))->step,
          6u);
    }
  }
}

}  // namespace
}  // namespace jaxfabric::device
