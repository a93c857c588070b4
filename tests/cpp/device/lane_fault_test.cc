// How a lane ends when a peer does not come, or comes with another call.
#include "device/mixed_calls.h"

namespace jaxfabric::device {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
// Enough for everything that can happen in these tests to have happened.
constexpr uint64_t kTurns = 400'000;

class LaneFault : public testing::TestWithParam<std::string> {};

MixedCall LongCall(std::mt19937_64& random, const ArenaShape& shape, const std::string& kernel) {
  MixedCall call = RandomCall(random, shape, kernel, 6);
  call.blocks = kernel == "barrier" ? 1 : shape.lanes;
  const bool packets = kernel.find("packets") != std::string::npos;
  call.bytes = uint64_t{packets ? shape.packet_bytes : shape.bulk_bytes * 2} * call.blocks;
  return call;
}

TEST_P(LaneFault, WhoIsInAnotherCallFailsAllAtOnce) {
  for (int seed = 0; seed < Rounds(60); ++seed) {
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    const auto ranks = static_cast<uint32_t>(2 + seed % 4);
    const ArenaShape shape{ranks, 3, 128, MixedBulkBytes(ranks)};
    Cluster cluster(shape, random());
    // Every so often all are in calls of their own.
    std::vector<MixedCall> calls(ranks, LongCall(random, shape, GetParam()));
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      if (rank > 0 && rank < ranks - 1 && seed % 3 != 0) continue;
      if (rank == 0 && seed % 2 != 0) continue;
      const uint32_t header = calls[rank].header + 1 + rank;
      // They write what they want into each other's areas, until one notices: a race, and no harm.
      if (kThreadSanitizer) {
      } else if (seed % 5 == 0) {  // the same, of another length
        calls[rank].blocks = 1;
        calls[rank].bytes = 8;
      } else if (seed % 5 != 1) {
        calls[rank] =
            RandomCall(random, shape, MixedKernels()[random() % MixedKernels().size()], 3);
      }
      calls[rank].header = header;
    }
    MixedRanks all(cluster);
    for (uint32_t rank = 0; rank < ranks; ++rank) all[rank].Start(calls[rank]);
    cluster.grid().Run(kTurns);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      ASSERT_TRUE(cluster.ended[rank]) << "rank " << rank << " of " << ranks << ", seed " << seed;
      EXPECT_TRUE(cluster.trapped[rank]);
      const FaultRecord& fault = cluster.fault(rank);
      EXPECT_EQ(cluster.Fault(rank), FaultKind::kMismatch);
      EXPECT_EQ(fault.rank, rank);
      ASSERT_LT(fault.peer, ranks);
      EXPECT_EQ(fault.header, calls[rank].header);
      EXPECT_EQ(fault.peer_header, calls[fault.peer].header);
      EXPECT_NE(fault.header, fault.peer_header);
    }
  }
}

TEST_P(LaneFault, WhoIsDeadIsNamedAfterTheDeadline) {
  for (int seed = 0; seed < Rounds(10); ++seed) {
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    const ArenaShape shape{4, 2, 128, MixedBulkBytes(4)};
    Cluster cluster(shape, random());
    const auto dead = static_cast<uint32_t>(random() % 4);
    const MixedCall warm = RandomCall(random, shape, GetParam());
    ASSERT_TRUE(RunCalls(cluster, 2, [&](uint32_t) { return warm; }));
    const MixedCall call = LongCall(random, shape, GetParam());
    MixedRanks all(cluster);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      const uint64_t id = all[rank].Start(call);
      if (rank == dead) cluster.grid().Kill(id);
    }
    cluster.grid().Run(kTurns / 4);
    cluster.grid().AdvanceClock(30 * kSecond);
    cluster.grid().Run(kTurns / 4);
    for (uint32_t rank = 0; rank < 4; ++rank) EXPECT_FALSE(cluster.ended[rank]);
    cluster.grid().AdvanceClock(31 * kSecond);
    cluster.grid().Run(kTurns / 4);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      if (rank == dead) continue;
      ASSERT_TRUE(cluster.ended[rank] && cluster.trapped[rank]) << GetParam() << ", seed " << seed;
      const FaultRecord& fault = cluster.fault(rank);
      EXPECT_EQ(cluster.Fault(rank), FaultKind::kDeadline);
      EXPECT_EQ(fault.rank, rank);
      EXPECT_EQ(fault.peer, dead);
      EXPECT_LT(fault.lane, call.blocks);
      EXPECT_EQ(fault.header, call.header);
      // It stopped after its last call, in this lane.
      const auto* control = reinterpret_cast<const LaneControl*>(cluster.arena(rank) +
                                                                 shape.ControlOffset(fault.lane));
      EXPECT_EQ(fault.step, control->step + 1);
      EXPECT_EQ(fault.peer_step, control->step);
      EXPECT_EQ(fault.peer_header, control->step == 0 ? 0 : warm.header);
    }
  }
}

TEST_P(LaneFault, WhoDiesInTheMiddleIsAtTheEndOfEveryChain) {
  uint32_t failed = 0;
  for (int seed = 0; seed < Rounds(30); ++seed) {
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    const ArenaShape shape{4, 2, 128, MixedBulkBytes(4)};
    Cluster cluster(shape, random());
    const auto dead = static_cast<uint32_t>(random() % 4);
    const MixedCall call = LongCall(random, shape, GetParam());
    MixedRanks all(cluster);
    std::vector<uint64_t> ids;
    for (uint32_t rank = 0; rank < 4; ++rank) ids.push_back(all[rank].Start(call));
    cluster.grid().Run(random() % (call.Is("barrier") ? 40 : 1500));
    if (cluster.ended[dead]) continue;
    cluster.grid().Kill(ids[dead]);
    cluster.grid().Run(kTurns / 4);
    cluster.grid().AdvanceClock(61 * kSecond);
    cluster.grid().Run(kTurns / 4);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      if (rank == dead) continue;
      ASSERT_TRUE(cluster.ended[rank]) << GetParam() << ", seed " << seed;
      if (!cluster.trapped[rank]) {
        EXPECT_TRUE(all[rank].Check());
        continue;
      }
      ++failed;
      // Who had got more from the dead than others may wait for these.
      uint32_t named = rank;
      for (int hops = 0; hops < 4 && named != dead; ++hops) {
        EXPECT_EQ(cluster.Fault(named), FaultKind::kDeadline);
        named = cluster.fault(named).peer;
      }
      EXPECT_EQ(named, dead);
    }
  }
  if (!kThreadSanitizer) {
    EXPECT_GT(failed, 0u);
  }
}

TEST_P(LaneFault, WhoIsSlowIsWaitedFor) {
  std::mt19937_64 random(5);
  const ArenaShape shape{3, 2, 128, MixedBulkBytes(3)};
  Cluster cluster(shape, 5);
  const MixedCall call = LongCall(random, shape, GetParam());
  MixedRanks all(cluster);
  for (uint32_t rank = 0; rank < 2; ++rank) all[rank].Start(call);
  cluster.grid().Run(kTurns / 4);
  cluster.grid().AdvanceClock(30 * kSecond);
  cluster.grid().Run(kTurns / 4);
  all[2].Start(call);
  cluster.RunAll();
  for (uint32_t rank = 0; rank < 3; ++rank) {
    EXPECT_FALSE(cluster.trapped[rank]);
    EXPECT_EQ(cluster.Fault(rank), FaultKind::kNone);
    EXPECT_TRUE(all[rank].Check());
  }
}

TEST_P(LaneFault, TheHostEndsAWait) {
  std::mt19937_64 random(5);
  const ArenaShape shape{3, 2, 128, MixedBulkBytes(3)};
  Cluster cluster(shape, 6);
  const MixedCall call = LongCall(random, shape, GetParam());
  MixedRanks all(cluster);
  for (uint32_t rank = 0; rank < 2; ++rank) all[rank].Start(call);
  cluster.grid().Run(kTurns / 4);
  EXPECT_FALSE(cluster.ended[0] || cluster.ended[1]);
  __atomic_store_n(&cluster.control(0).abort, 1u, __ATOMIC_RELAXED);
  cluster.grid().Run(kTurns / 4);
  EXPECT_TRUE(cluster.ended[0] && cluster.trapped[0]);
  EXPECT_EQ(cluster.Fault(0), FaultKind::kAborted);
  EXPECT_EQ(cluster.fault(0).peer, 2u);
  EXPECT_FALSE(cluster.ended[1]);
}

TEST_P(LaneFault, AWaitForARankThatHasEndedEnds) {
  std::mt19937_64 random(5);
  const ArenaShape shape{3, 2, 128, MixedBulkBytes(3)};
  Cluster cluster(shape, 6);
  const MixedCall call = LongCall(random, shape, GetParam());
  MixedRanks all(cluster);
  for (uint32_t rank = 0; rank < 2; ++rank) all[rank].Start(call);
  cluster.grid().Run(kTurns / 4);
  EXPECT_FALSE(cluster.ended[0] || cluster.ended[1]);
  __atomic_store_n(&cluster.control(0).gone[2], 1u, __ATOMIC_RELAXED);
  cluster.grid().Run(kTurns / 4);
  EXPECT_TRUE(cluster.ended[0] && cluster.trapped[0]);
  EXPECT_EQ(cluster.Fault(0), FaultKind::kGone);
  EXPECT_EQ(cluster.fault(0).peer, 2u);
  EXPECT_FALSE(cluster.ended[1]);
}

// What it sent before is all that the others need of it.
TEST_P(LaneFault, ARankThatHasSentItsPartMayEnd) {
  if (GetParam().find("packets") == std::string::npos) {
    GTEST_SKIP() << "of several steps: needs it to the end";
  }
  for (int seed = 0; seed < Rounds(30); ++seed) {
    std::mt19937_64 random(static_cast<uint64_t>(seed));
    const ArenaShape shape{3, 2, 128, MixedBulkBytes(3)};
    Cluster cluster(shape, random());
    const MixedCall call = LongCall(random, shape, GetParam());
    MixedRanks all(cluster);
    const uint64_t left = all[2].Start(call);
    cluster.grid().Run(kTurns / 4);
    cluster.grid().Kill(left);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      __atomic_store_n(&cluster.control(rank).gone[2], 1u, __ATOMIC_RELAXED);
      all[rank].Start(call);
    }
    cluster.grid().Run(kTurns / 4);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ASSERT_TRUE(cluster.ended[rank] && !cluster.trapped[rank]) << "seed " << seed;
      EXPECT_TRUE(all[rank].Check());
    }
  }
}

// Another parity than the one awaited cannot be there yet.
TEST_P(LaneFault, WhoIsAheadOfItselfIsAProtocolError) {
  std::mt19937_64 random(5);
  const ArenaShape shape{2, 1, 128, MixedBulkBytes(2)};
  Cluster cluster(shape, 6);
  MixedCall call = LongCall(random, shape, GetParam());
  auto* cells = reinterpret_cast<uint64_t*>(cluster.arena(0) + shape.CellsOffset(0, 1));
  cells[1] = uint64_t{call.header} << 32 | 3;
  MixedRanks all(cluster);
  all[0].Start(call);
  cluster.grid().Run(kTurns);
  EXPECT_TRUE(cluster.trapped[0]);
  EXPECT_EQ(cluster.Fault(0), FaultKind::kProtocol);
  EXPECT_EQ(cluster.fault(0).peer_step, 3u);
}

INSTANTIATE_TEST_SUITE_P(All, LaneFault, testing::ValuesIn(MixedKernels()),
                         [](const auto& tested) { return tested.param; });

TEST(LaneRecord, IsWholeWhenItsKindIsSetAndIsWrittenOnce) {
  for (int seed = 0; seed < 20; ++seed) {
    const ArenaShape shape{3, 3, 128, MixedBulkBytes(3)};
    Cluster cluster(shape, static_cast<uint64_t>(seed));
    cluster.wait_milliseconds = 0;  // all threads and lanes fail at once
    MixedCall call{"all_reduce_packets_sum_uint8", 3, 3, 6, 300, 9, 0, 0, 0};
    MixedRanks all(cluster);
    all[1].Start(call);
    FaultRecord first{};
    while (cluster.grid().Run(1)) {
      if (cluster.Fault(1) == FaultKind::kNone || first.kind != 0) continue;
      first = cluster.fault(1);
      EXPECT_EQ(first.rank, 1u);
      EXPECT_NE(first.peer, 1u);
      EXPECT_EQ(first.step, 1u);
      EXPECT_EQ(first.header, 9u);
    }
    EXPECT_TRUE(cluster.trapped[1]);
    if (first.kind == 0) continue;  // the first to tell ended the kernel
    EXPECT_EQ(std::memcmp(&first, &cluster.fault(1), sizeof(first)), 0);
  }
}

}  // namespace
}  // namespace jaxfabric::device
