// Plans of every call: that the kernel exists, and that what it needs fits into the arena.
#include "device/launch.h"

#include "device/bytes.cuh"
#include "device/cluster.h"
#include "memory/reduce_reference.h"

namespace jaxfabric::device {
namespace {

constexpr uint64_t kMiB = 1 << 20;

std::vector<uint64_t> Sizes(uint64_t unit) {
  std::vector<uint64_t> sizes = {0};
  for (uint64_t size = unit; size <= 1024 * kMiB; size *= 2) {
    sizes.insert(sizes.end(), {size - size % unit, size, size + unit});
  }
  return sizes;
}

std::vector<ArenaShape> Shapes() {
  std::vector<ArenaShape> shapes;
  for (uint32_t ranks : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 16u, 17u, 32u, 36u, 71u, 72u}) {
    for (uint32_t lanes : {1u, 7u, 32u, 64u}) {
      for (uint64_t bytes : {2 * kMiB, 64 * kMiB}) {
        Result<ArenaShape> shape = ShapeArena(ranks, lanes, bytes);
        EXPECT_TRUE(shape.ok()) << ranks << " ranks, " << lanes << " lanes, " << bytes;
        if (shape.ok()) shapes.push_back(*shape);
      }
    }
  }
  return shapes;
}

// `words`: what one rank sends to another as packets.
void CheckLaunch(const ArenaShape& shape, const Launch& launch, uint64_t words_bytes,
                 size_t arguments) {
  ASSERT_EQ(FindKernel(launch.kernel).argument_bytes, arguments) << launch.kernel;
  ASSERT_GE(launch.blocks, 1u);
  ASSERT_LE(launch.blocks, shape.lanes);
  if (launch.kernel.find("_packets") == std::string::npos) return;
  for (uint32_t block : {0u, launch.blocks - 1}) {
    const Slice words(Words::Count(words_bytes), block, launch.blocks, 1);
    ASSERT_LE(words.size() * kPacketData, shape.packet_bytes)
        << launch.kernel << ", " << words_bytes << " bytes in " << launch.blocks;
  }
}

TEST(ShapeArena, IsValidAndWithinItsBytes) {
  for (uint32_t ranks = 1; ranks <= kMaxRanks; ++ranks) {
    for (uint32_t lanes : {1u, 2u, 3u, 16u, 63u, 64u, 132u}) {
      for (uint64_t bytes = 4096; bytes <= 1024 * kMiB; bytes *= 4) {
        const Result<ArenaShape> shape = ShapeArena(ranks, lanes, bytes);
        if (!shape.ok()) {
          // The smallest: one lane with an area of a line for each rank.
          EXPECT_LT(bytes, 4 * kMiB) << ranks;
          EXPECT_EQ(shape.status().code(), Code::kResourceExhausted);
          continue;
        }
        EXPECT_TRUE(shape->Valid());
        EXPECT_EQ(shape->ranks, ranks);
        EXPECT_LE(shape->lanes, std::min(lanes, kMaxLanes));
        EXPECT_LE(shape->Bytes(), bytes);
      }
    }
  }
}

TEST(ShapeArena, HasNoOverlaps) {
  const ArenaShape shape{5, 3, 128, kLineBytes * 5};
  EXPECT_EQ(shape.ControlOffset(0), sizeof(ArenaHead));
  EXPECT_EQ(shape.NoticesOffset(), shape.ControlOffset(2) + sizeof(LaneControl));
  EXPECT_GE(shape.CellsOffset(0, 0), shape.NoticesOffset() + 5 * 8);
  EXPECT_GE(shape.CellsOffset(0, 1), shape.CellsOffset(0, 0) + 5 * 8);
  EXPECT_GE(shape.PacketsOffset(0, 0, 0), shape.CellsOffset(2, 1) + 5 * 8);
  EXPECT_EQ(shape.PacketsOffset(0, 0, 1), shape.PacketsOffset(0, 0, 0) + 128 * 2);
  EXPECT_EQ(shape.BulkOffset(0, 0), shape.PacketsOffset(2, 1, 4) + 128 * 2);
  EXPECT_EQ(shape.Bytes(), shape.BulkOffset(2, 1) + shape.bulk_bytes);
}

class PlanReductions : public testing::TestWithParam<DType> {};

TEST_P(PlanReductions, FitForEveryShapeAndSize) {
  const std::vector<uint64_t> sizes = Sizes(DTypeSize(GetParam()));
  for (const ArenaShape& shape : Shapes()) {
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      if (!CheckReducible(GetParam(), op).ok()) continue;
      for (bool multicast : {false, true}) {
        for (uint64_t size : sizes) {
          CheckLaunch(shape, PlanAllReduce(shape, GetParam(), op, size, {multicast}), size,
                      sizeof(ReduceArguments));
          CheckLaunch(shape, PlanReduceScatter(shape, GetParam(), op, size, {multicast}), size,
                      sizeof(ReduceArguments));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlanReductions, testing::ValuesIn(AllDTypes()),
                         [](const auto& tested) { return std::string(DTypeName(tested.param)); });

TEST(PlanMoves, FitForEveryShapeAndSize) {
  const std::vector<uint64_t> sizes = Sizes(1);
  for (const ArenaShape& shape : Shapes()) {
    CheckLaunch(shape, PlanBarrier(), 0, sizeof(MoveArguments));
    for (Move move : {Move::kAllGather, Move::kAllToAll, Move::kPermute, Move::kBroadcast}) {
      for (bool multicast : {false, true}) {
        for (uint64_t size : sizes) {
          CheckLaunch(shape, PlanMove(shape, move, size, {multicast}), size, sizeof(MoveArguments));
        }
      }
    }
  }
}

TEST(PlanMulticast, IsForLargeArraysOfMoreThanTwoRanks) {
  const auto kernel = [](uint32_t ranks, DType dtype, ReduceOp op, uint64_t bytes, bool multicast) {
    return PlanAllReduce(*ShapeArena(ranks, 32, 64 * kMiB), dtype, op, bytes, {multicast}).kernel;
  };
  using enum DType;
  EXPECT_EQ(kernel(8, kFloat32, ReduceOp::kSum, kMiB, true),
            "jaxfabric_all_reduce_multicast_sum_float32");
  EXPECT_EQ(kernel(8, kInt64, ReduceOp::kMax, kMiB, true),
            "jaxfabric_all_reduce_multicast_max_int64");
  EXPECT_EQ(kernel(8, kFloat32, ReduceOp::kSum, kMiB, false),
            "jaxfabric_all_reduce_two_shot_sum_float32");
  EXPECT_EQ(kernel(2, kFloat32, ReduceOp::kSum, kMiB, true),
            "jaxfabric_all_reduce_two_shot_sum_float32");
  EXPECT_EQ(kernel(8, kFloat16, ReduceOp::kMax, kMiB, true),
            "jaxfabric_all_reduce_two_shot_max_float16");
  EXPECT_EQ(kernel(8, kInt8, ReduceOp::kSum, kMiB, true),
            "jaxfabric_all_reduce_two_shot_sum_uint8");
  EXPECT_EQ(kernel(8, kFloat32, ReduceOp::kSum, 64, true),
            "jaxfabric_all_reduce_packets_sum_float32");
}

TEST(PlanWindows, AreForWhatDoesNotFitIntoPackets) {
  const Ways ways{.windows = true};
  uint32_t windows = 0;
  for (const ArenaShape& shape : Shapes()) {
    for (uint64_t size : Sizes(4)) {
      const auto check = [&](const Launch& launch, const Launch& without, size_t arguments,
                             size_t window_arguments) {
        CheckLaunch(shape, launch, size, launch.windows ? window_arguments : arguments);
        ASSERT_EQ(launch.blocks, without.blocks);
        ASSERT_EQ(launch.windows, launch.kernel.find("_window") != std::string::npos);
        const bool moves = arguments == sizeof(MoveArguments);
        const bool scatters = launch.kernel.find("reduce_scatter") != std::string::npos;
        const uint64_t operand = scatters ? size * shape.ranks : size;
        ASSERT_EQ(launch.windows, without.kernel.find("_packets") == std::string::npos &&
                                      (moves || (size % 16 == 0 && operand < 32768 * kMiB)));
        windows += launch.windows;
      };
      for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
        const auto op = ReduceOp::kSum;
        check(PlanAllReduce(shape, dtype, op, size, ways), PlanAllReduce(shape, dtype, op, size),
              sizeof(ReduceArguments), sizeof(WindowReduceArguments));
        check(PlanReduceScatter(shape, dtype, op, size, ways),
              PlanReduceScatter(shape, dtype, op, size), sizeof(ReduceArguments),
              sizeof(WindowReduceArguments));
      }
      for (Move move : {Move::kAllGather, Move::kAllToAll, Move::kPermute, Move::kBroadcast}) {
        check(PlanMove(shape, move, size, ways), PlanMove(shape, move, size), sizeof(MoveArguments),
              sizeof(WindowMoveArguments));
      }
    }
  }
  EXPECT_GT(windows, 1000u);
  const ArenaShape shape = *ShapeArena(8, 32, 64 * kMiB);
  EXPECT_FALSE(PlanAllReduce(shape, DType::kInt32, ReduceOp::kSum, kMiB, ways).windows);
  EXPECT_FALSE(PlanAllReduce(shape, DType::kFloat32, ReduceOp::kMax, kMiB, ways).windows);
}

TEST(PlanRaggedAllToAll, HasRoomForTablesAndRowsOrSaysWhyNot) {
  for (const ArenaShape& shape : Shapes()) {
    const uint64_t region = shape.bulk_bytes / shape.ranks;
    for (uint32_t slices = 0; slices < 5000; slices = slices * 2 + 1) {
      for (DType metadata : {DType::kInt32, DType::kInt64}) {
        const Result<Launch> launch = PlanRaggedAllToAll(shape, metadata, slices, 10 * kMiB);
        EXPECT_EQ(launch.ok(), RaggedTableBytes(slices) + kLineBytes <= region);
        if (launch.ok()) {
          CheckLaunch(shape, *launch, 0, sizeof(RaggedArguments));
        } else {
          EXPECT_EQ(launch.status().code(), Code::kInvalidArgument);
        }
      }
    }
  }
  // What the message offers is true.
  const ArenaShape shape{3, 3, 64, kLineBytes * 9};
  EXPECT_TRUE(PlanRaggedAllToAll(shape, DType::kInt32, 15, 1).ok());
  EXPECT_EQ(PlanRaggedAllToAll(shape, DType::kInt32, 16, 1).status().message(),
            "ragged_all_to_all: 16 slices from each rank to each, but for 3 ranks the "
            "communicator's memory holds tables of 15; use fewer, or give it more memory");
  EXPECT_EQ(PlanRaggedAllToAll(shape, DType::kUint32, 1, 1).status().message(),
            "ragged_all_to_all: offsets and sizes are uint32, but must be int32 or int64");
}

TEST(PlanAllReduceRmsNorm, KeepsRowsOfPacketsWholeInALane) {
  uint32_t packets = 0;
  for (const ArenaShape& shape : Shapes()) {
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBfloat16}) {
      const uint64_t size = DTypeSize(dtype);
      for (uint64_t hidden : {16 / size, uint64_t{2048}, uint64_t{7168}, uint64_t{16384}}) {
        for (uint64_t rows : {0, 1, 2, 63, 64, 65, 200, 8192}) {
          const Result<Launch> launch = PlanAllReduceRmsNorm(shape, dtype, rows, hidden);
          ASSERT_TRUE(launch.ok());
          CheckLaunch(shape, *launch, 0, sizeof(RmsNormArguments));
          if (launch->kernel.find("_packets") == std::string::npos) continue;
          ++packets;
          const Slice in_lane(rows, 0, launch->blocks, 1);
          EXPECT_LE(in_lane.size() * hidden * size, shape.packet_bytes);
        }
      }
    }
  }
  EXPECT_GT(packets, 100u);
  const ArenaShape shape = *ShapeArena(8, 32, 64 * kMiB);
  EXPECT_EQ(PlanAllReduceRmsNorm(shape, DType::kBfloat16, 8, 4096)->kernel,
            "jaxfabric_all_reduce_rms_norm_packets_bfloat16");
  EXPECT_EQ(PlanAllReduceRmsNorm(shape, DType::kBfloat16, 8, 4095).status().message(),
            "all_reduce_rms_norm: rows have 4095 elements of bfloat16, but must have a multiple of "
            "8, at least one and at most 4294967295");
  EXPECT_FALSE(PlanAllReduceRmsNorm(shape, DType::kFloat64, 8, 4096).ok());
}

}  // namespace
}  // namespace jaxfabric::device
