// ragged_all_to_all for 1 to 8 ranks with random schedules, against plain copies.
#include "device/ragged_case.h"

namespace jaxfabric::device {
namespace {

template <class Index>
class RaggedKernels : public testing::Test {
 protected:
  static ArenaShape ShapeFor(uint32_t ranks) { return {ranks, 3, 64, kLineBytes * 3 * ranks}; }
};
using Indices = testing::Types<int32_t, int64_t>;
TYPED_TEST_SUITE(RaggedKernels, Indices);

TYPED_TEST(RaggedKernels, PutRowsWhereTheirSendersWantThem) {
  std::mt19937_64 random(sizeof(TypeParam));
  for (int round = 0; round < Rounds(120); ++round) {
    const uint32_t ranks = 1 + static_cast<uint32_t>(round) % 8;
    const auto slices = static_cast<uint32_t>(1 + random() % 4);
    Cluster cluster(TestFixture::ShapeFor(ranks), random());
    const auto blocks = static_cast<uint32_t>(1 + random() % 3);
    const auto threads = static_cast<uint32_t>(1 + random() % 12);
    // Twice in one communicator: areas and the barrier of the lanes are used again.
    for (int launch = 0; launch < 2; ++launch) {
      auto c =
          MakeRagged<TypeParam>(random, ranks, slices, static_cast<RaggedSizes>(random() % 4 % 3));
      for (uint32_t r = 0; r < ranks; ++r) {
        cluster.Start(r, RaggedKernel<TypeParam>(), blocks, threads, c.Arguments(cluster, r, 3));
      }
      cluster.RunAll();
      for (uint32_t r = 0; r < ranks; ++r) {
        ASSERT_FALSE(cluster.trapped[r]);
        ASSERT_EQ(c.rank[r].output.Copy(), c.Expected(r))
            << "rank " << r << " of " << ranks << ", slices " << slices << ", row bytes "
            << c.row_bytes << ", blocks " << blocks << ", threads " << threads;
        EXPECT_TRUE(c.rank[r].output.GuardsIntact());
      }
    }
  }
}

TYPED_TEST(RaggedKernels, FailOnAllRanksWhereArraysDoNotFit) {
  std::mt19937_64 random(sizeof(TypeParam) + 1);
  enum Mistake { kInputOffset, kNegativeSize, kTooMany, kOutputOffset, kNegativeOffset, kRecvSize };
  for (int round = 0; round < Rounds(120); ++round) {
    const auto ranks = static_cast<uint32_t>(1 + random() % 5);
    const uint32_t slices = 2;
    Cluster cluster(TestFixture::ShapeFor(ranks), random());
    auto c = MakeRagged<TypeParam>(random, ranks, slices, RaggedSizes::kAny);
    const auto sender = static_cast<uint32_t>(random() % ranks);
    const auto receiver = static_cast<uint32_t>(random() % ranks);
    const auto i = static_cast<uint32_t>(random() % slices);
    RaggedRank<TypeParam>& from = c.rank[sender];
    const uint32_t sent = c.Number(receiver, i), received = c.Number(sender, i);
    if (from.send_sizes[sent] == 0) continue;
    // Who finds it, and what is the number of the slice there.
    uint32_t finder = sender, number = sent, peer = sender;
    switch (static_cast<Mistake>(round % 6)) {
      case kInputOffset:
        from.input_offsets[sent] = static_cast<TypeParam>(c.input_rows);
        break;
      case kNegativeSize:
        from.send_sizes[sent] = -1;
        break;
      case kTooMany:
        from.send_sizes[sent] = static_cast<TypeParam>(c.input_rows + 1);
        from.input_offsets[sent] = 0;
        break;
      case kOutputOffset:
        from.output_offsets[sent] =
            static_cast<TypeParam>(c.output_rows) - from.send_sizes[sent] + 1;
        finder = receiver, number = i;
        break;
      case kNegativeOffset:
        from.output_offsets[sent] = -1;
        finder = receiver, number = i;
        break;
      case kRecvSize:
        c.rank[receiver].recv_sizes[received] -= 1;
        finder = receiver, number = i;
        break;
    }
    std::vector<std::vector<std::byte>> before;
    for (uint32_t r = 0; r < ranks; ++r) {
      c.in_place = true;
      before.push_back(c.rank[r].output.Copy());
      cluster.Start(r, RaggedKernel<TypeParam>(), 1 + static_cast<uint32_t>(round) % 3, 5,
                    c.Arguments(cluster, r, 3));
    }
    cluster.grid().Run(400'000);
    for (uint32_t r = 0; r < ranks; ++r) {
      ASSERT_TRUE(cluster.ended[r] && cluster.trapped[r]) << "rank " << r << ", round " << round;
      EXPECT_EQ(cluster.Fault(r), FaultKind::kRagged);
      // What could not be checked is written nowhere.
      if (r == finder) {
        EXPECT_EQ(c.rank[r].output.Copy(), before[r]);
      } else {
        EXPECT_EQ(cluster.fault(r).peer_step, kNoSlice);
      }
    }
    EXPECT_EQ(cluster.fault(finder).peer, peer);
    EXPECT_EQ(cluster.fault(finder).peer_step, number) << "round " << round;
  }
}

TYPED_TEST(RaggedKernels, WorkWithTablesThatFillTheAreaButForALine) {
  std::mt19937_64 random(9);
  const uint32_t slices = 15;  // 256 bytes with the head: one line is left for rows
  ASSERT_EQ(RaggedTableBytes(slices), 2 * kLineBytes);
  Cluster cluster(TestFixture::ShapeFor(3), 9);
  auto c = MakeRagged<TypeParam>(random, 3, slices, RaggedSizes::kAny);
  for (uint32_t r = 0; r < 3; ++r)
    cluster.Start(r, RaggedKernel<TypeParam>(), 2, 7, c.Arguments(cluster, r, 3));
  cluster.RunAll();
  for (uint32_t r = 0; r < 3; ++r) EXPECT_EQ(c.rank[r].output.Copy(), c.Expected(r));
}

}  // namespace
}  // namespace jaxfabric::device
