#include "device/launch.h"

#include <algorithm>
#include <string_view>

namespace jaxfabric::device {
namespace {

// Data that one block sends to a peer as packets before another block is worth its start.
constexpr uint64_t kPacketBytesPerBlock = uint64_t{kBlockThreads} * kPacketData;
// The same for what goes through the bulk areas.
constexpr uint64_t kBulkBytesPerBlock = 16 << 10;
// Up to here packets win, by the data that a rank receives from all others: from published times of
// one-shot and two-shot kernels on 2, 4 and 8 H100 (512, 256 and 64 KiB from each).
constexpr uint64_t kPacketsLimit = 512 << 10;

uint32_t Blocks(uint64_t bytes, uint64_t bytes_per_block, uint32_t lanes) {
  return static_cast<uint32_t>(
      std::clamp<uint64_t>((bytes + bytes_per_block - 1) / bytes_per_block, 1, lanes));
}

bool TakesPackets(const ArenaShape& shape, uint64_t bytes) {
  return bytes <= uint64_t{shape.packet_bytes} * shape.lanes &&
         bytes * (shape.ranks - 1) <= kPacketsLimit;
}

// Enough blocks for the packet areas to hold it.
uint32_t PacketBlocks(const ArenaShape& shape, uint64_t bytes) {
  return Blocks(bytes, std::min<uint64_t>(kPacketBytesPerBlock, shape.packet_bytes), shape.lanes);
}

Launch Plan(const ArenaShape& shape, std::string_view op, std::string_view bulk_algorithm,
            std::string_view suffix, uint64_t bytes) {
  if (TakesPackets(shape, bytes)) {
    return {StrCat("jaxfabric_", op, "_packets", suffix), PacketBlocks(shape, bytes)};
  }
  return {StrCat("jaxfabric_", op, "_", bulk_algorithm, suffix),
          Blocks(bytes, kBulkBytesPerBlock, shape.lanes)};
}

std::string ReductionSuffix(DType dtype, ReduceOp op) {
  return StrCat("_", ReduceOpName(op), "_", DTypeName(KernelElement(dtype, op).dtype));
}

}  // namespace

Element KernelElement(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kBool:
      return {DType::kUint8, 1};
    case DType::kComplex64:
      return {DType::kFloat32, 2};
    case DType::kComplex128:
      return {DType::kFloat64, 2};
    default:
      break;
  }
  if (op == ReduceOp::kSum) {
    switch (dtype) {
      case DType::kInt8:
        return {DType::kUint8, 1};
      case DType::kInt16:
        return {DType::kUint16, 1};
      case DType::kInt32:
        return {DType::kUint32, 1};
      case DType::kInt64:
        return {DType::kUint64, 1};
      default:
        break;
    }
  }
  return {dtype, 1};
}

Launch PlanAllReduce(const ArenaShape& shape, DType dtype, ReduceOp op, uint64_t bytes) {
  return Plan(shape, "all_reduce", "two_shot", ReductionSuffix(dtype, op), bytes);
}

Launch PlanReduceScatter(const ArenaShape& shape, DType dtype, ReduceOp op, uint64_t row_bytes) {
  return Plan(shape, "reduce_scatter", "pull", ReductionSuffix(dtype, op), row_bytes);
}

Launch PlanMove(const ArenaShape& shape, Move move, uint64_t bytes) {
  switch (move) {
    case Move::kAllGather:
      return Plan(shape, "all_gather", "push", "", bytes);
    case Move::kAllToAll:
      return Plan(shape, "all_to_all", "push", "", bytes);
    case Move::kPermute:
      return Plan(shape, "permute", "push", "", bytes);
    case Move::kBroadcast:
      return Plan(shape, "broadcast", "push", "", bytes);
  }
  return {};
}

Result<Launch> PlanRaggedAllToAll(const ArenaShape& shape, size_t index_bytes, uint64_t slices,
                                  uint64_t bytes) {
  const uint64_t region = shape.bulk_bytes / shape.ranks;
  // Behind the table there is room for rows, or nothing would ever arrive.
  const uint64_t most = (region - kLineBytes - sizeof(RaggedTable)) / sizeof(RaggedEntry);
  if (slices > most || RaggedTableBytes(static_cast<uint32_t>(slices)) + kLineBytes > region) {
    return Status(Code::kUnimplemented,
                  StrCat("ragged_all_to_all with ", slices, " slices from each of ", shape.ranks,
                         " ranks to each: at most ", most, " fit into an arena on GPUs"));
  }
  return Launch{index_bytes == 4 ? "jaxfabric_ragged_all_to_all_push_int32"
                                 : "jaxfabric_ragged_all_to_all_push_int64",
                Blocks(bytes, kBulkBytesPerBlock, shape.lanes)};
}

Launch PlanBarrier() { return {"jaxfabric_barrier", 1}; }

Result<ArenaShape> ShapeArena(uint32_t ranks, uint32_t lanes, uint64_t bytes) {
  ArenaShape shape{ranks, std::min(lanes, kMaxLanes), 0, 0};
  const auto round_down = [](uint64_t value, uint32_t unit) {
    return static_cast<uint32_t>(value / unit * unit);
  };
  // Half for either area, and no more packets than are ever used.
  for (; shape.lanes > 0; shape.lanes /= 2) {
    const uint64_t fixed = shape.CellsOffset(shape.lanes, 0);
    if (bytes <= fixed) continue;
    const uint64_t half = (bytes - fixed) / 2;
    const uint64_t packets = std::min(half / (uint64_t{shape.lanes} * 4 * ranks),
                                      kPacketsLimit / std::max(ranks - 1, 1u) / shape.lanes + 64);
    shape.packet_bytes = round_down(packets, kLineBytes / 2);
    shape.bulk_bytes = round_down(std::min<uint64_t>(half / (uint64_t{shape.lanes} * 2), 128 << 10),
                                  kLineBytes * ranks);
    if (shape.Valid()) return shape;
  }
  return Status(Code::kResourceExhausted,
                StrCat(bytes, " bytes hold no arena for ", ranks, " ranks and ", lanes, " lanes"));
}

}  // namespace jaxfabric::device
