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
// From here the switch wins, by the data of all ranks together: from published times on 4 and 8
// H100.
constexpr uint64_t kMulticastFrom = 2 << 20;
// Packet areas of a lane hold at least this, where there is memory: a row of all_reduce_rms_norm.
constexpr uint64_t kRowBytes = 16 << 10;

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

// `total`: the bytes of all ranks together where the switch may do it, else 0. `windows`: there is
// such a kernel, and the arrays may be in windows.
Launch Plan(const ArenaShape& shape, std::string_view op, std::string_view bulk_algorithm,
            std::string_view suffix, uint64_t bytes, uint64_t total, bool windows) {
  if (TakesPackets(shape, bytes)) {
    return {StrCat("jaxfabric_", op, "_packets", suffix), PacketBlocks(shape, bytes)};
  }
  const bool multicast = total >= kMulticastFrom && shape.ranks >= kMulticastRanks;
  if (multicast) {
    bulk_algorithm = "multicast";
  } else if (windows) {
    bulk_algorithm = "window";
  }
  return {StrCat("jaxfabric_", op, "_", bulk_algorithm, suffix),
          Blocks(bytes, kBulkBytesPerBlock, shape.lanes), windows && !multicast};
}

// Whether windows.cu has a kernel for it, which takes whole vectors, of the operand no more than it
// counts in 32 bits.
bool WindowCombines(DType dtype, ReduceOp op, uint64_t bytes, uint64_t operand_bytes) {
  return op == ReduceOp::kSum && bytes % sizeof(Packet) == 0 &&
         operand_bytes / sizeof(Packet) < uint64_t{1} << 31 &&
         (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBfloat16);
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

bool MulticastCombines(DType dtype, ReduceOp op) {
  switch (KernelElement(dtype, op).dtype) {
    case DType::kUint32:
    case DType::kUint64:
    case DType::kInt32:
    case DType::kInt64:
      return true;
    case DType::kFloat16:
    case DType::kBfloat16:
    case DType::kFloat32:
    case DType::kFloat64:
      return op == ReduceOp::kSum;
    default:
      return false;
  }
}

Launch PlanAllReduce(const ArenaShape& shape, DType dtype, ReduceOp op, uint64_t bytes, Ways ways) {
  return Plan(shape, "all_reduce", "two_shot", ReductionSuffix(dtype, op), bytes,
              ways.multicast && MulticastCombines(dtype, op) ? bytes * shape.ranks : 0,
              ways.windows && WindowCombines(dtype, op, bytes, bytes));
}

Launch PlanReduceScatter(const ArenaShape& shape, DType dtype, ReduceOp op, uint64_t row_bytes,
                         Ways ways) {
  return Plan(
      shape, "reduce_scatter", "pull", ReductionSuffix(dtype, op), row_bytes,
      ways.multicast && MulticastCombines(dtype, op) ? row_bytes * shape.ranks * shape.ranks : 0,
      ways.windows && WindowCombines(dtype, op, row_bytes, row_bytes * shape.ranks));
}

Launch PlanMove(const ArenaShape& shape, Move move, uint64_t bytes, Ways ways) {
  switch (move) {
    case Move::kAllGather:
      return Plan(shape, "all_gather", "push", "", bytes,
                  ways.multicast ? bytes * shape.ranks * shape.ranks : 0, ways.windows);
    case Move::kAllToAll:
      return Plan(shape, "all_to_all", "push", "", bytes, 0, ways.windows);
    case Move::kPermute:
      return Plan(shape, "permute", "push", "", bytes, 0, ways.windows);
    case Move::kBroadcast:
      return Plan(shape, "broadcast", "push", "", bytes, 0, ways.windows);
  }
  return {};
}

Result<Launch> PlanRaggedAllToAll(const ArenaShape& shape, DType metadata, uint32_t slices,
                                  uint64_t input_bytes) {
  if (metadata != DType::kInt32 && metadata != DType::kInt64) {
    return Status(Code::kInvalidArgument,
                  StrCat("ragged_all_to_all: offsets and sizes are ", DTypeName(metadata),
                         ", but must be int32 or int64"));
  }
  const uint64_t region = shape.bulk_bytes / shape.ranks;
  if (RaggedTableBytes(slices) + kLineBytes > region) {
    const uint64_t entries = region < 2 * kLineBytes ? 0
                                                     : region / kLineBytes * kLineBytes -
                                                           kLineBytes - sizeof(RaggedTable);
    return Status(Code::kInvalidArgument,
                  StrCat("ragged_all_to_all: ", slices, " slices from each rank to each, but for ",
                         shape.ranks, " ranks the communicator's memory holds tables of ",
                         entries / sizeof(RaggedEntry), "; use fewer, or give it more memory"));
  }
  return Launch{StrCat("jaxfabric_ragged_all_to_all_push_", DTypeName(metadata)),
                Blocks(input_bytes, kBulkBytesPerBlock, shape.lanes)};
}

Result<Launch> PlanAllReduceRmsNorm(const ArenaShape& shape, DType dtype, uint64_t rows,
                                    uint64_t hidden) {
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBfloat16) {
    return Status(Code::kInvalidArgument,
                  StrCat("all_reduce_rms_norm: the array is ", DTypeName(dtype),
                         ", but must be float32, float16 or bfloat16"));
  }
  const uint64_t size = DTypeSize(dtype);
  if (hidden == 0 || hidden > UINT32_MAX || hidden * size % sizeof(Packet) != 0) {
    return Status(Code::kInvalidArgument,
                  StrCat("all_reduce_rms_norm: rows have ", hidden, " elements of ",
                         DTypeName(dtype), ", but must have a multiple of ", sizeof(Packet) / size,
                         ", at least one and at most ", UINT32_MAX));
  }
  const uint64_t row_bytes = hidden * size;
  // Whole rows in every lane, one each if there are lanes enough.
  const auto blocks = static_cast<uint32_t>(std::clamp<uint64_t>(rows, 1, shape.lanes));
  const uint64_t rows_in_lane = rows / blocks + (rows % blocks != 0);
  const bool packets = rows_in_lane <= shape.packet_bytes / row_bytes &&
                       rows * row_bytes * (shape.ranks - 1) <= kPacketsLimit;
  return Launch{StrCat("jaxfabric_all_reduce_rms_norm_", packets ? "packets" : "two_shot", "_",
                       DTypeName(dtype)),
                blocks};
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
    const uint64_t used = kPacketsLimit / std::max(ranks - 1, 1u) / shape.lanes + 64;
    const uint64_t packets =
        std::min(half / (uint64_t{shape.lanes} * 4 * ranks), std::max(used, kRowBytes));
    shape.packet_bytes = round_down(packets, kLineBytes / 2);
    shape.bulk_bytes = round_down(std::min<uint64_t>(half / (uint64_t{shape.lanes} * 2), 128 << 10),
                                  kLineBytes * ranks);
    if (shape.Valid()) return shape;
  }
  return Status(Code::kResourceExhausted,
                StrCat(bytes, " bytes hold no arena for ", ranks, " ranks and ", lanes, " lanes"));
}

}  // namespace jaxfabric::device
