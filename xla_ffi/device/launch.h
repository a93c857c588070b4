// Which kernel does a call, and on how many blocks: pure functions of what is equal on all ranks,
// so all ranks launch the same. Plain C++; the kernels themselves are in image.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "device/layout.h"
#include "memory/dtype.h"
#include "memory/reduce.h"

namespace jaxfabric::device {

struct Launch {
  std::string kernel;
  uint32_t blocks = 1;
  bool windows = false;  // the kernel is one of windows.cuh
};

// How arrays may get to the peers beside through the areas of arenas.
struct Ways {
  bool multicast = false;  // the communicator has such memory and may use it
  bool windows = false;    // peers may address the arrays themselves
};

// What the kernels of a reduction work on: `count` elements of the array are `count * factor` of
// it.
struct Element {
  DType dtype;      // one of those that have kernels
  uint64_t factor;  // 2 for complex numbers
};
Element KernelElement(DType dtype, ReduceOp op);

// Multicast gains nothing with fewer ranks.
inline constexpr uint32_t kMulticastRanks = 3;

// Whether the switch can combine it, with the result's meaning (sums of floats in another order).
bool MulticastCombines(DType dtype, ReduceOp op);

// The arrays are those of one rank: all of x (all_reduce), a row of x (reduce_scatter). Requires
// CheckReducible(dtype, op).
Launch PlanAllReduce(const ArenaShape& shape, DType dtype, ReduceOp op, uint64_t bytes,
                     Ways ways = {});
Launch PlanReduceScatter(const ArenaShape& shape, DType dtype, ReduceOp op, uint64_t row_bytes,
                         Ways ways = {});

enum class Move { kAllGather, kAllToAll, kPermute, kBroadcast };
// `bytes` go from each sender to each receiver.
Launch PlanMove(const ArenaShape& shape, Move move, uint64_t bytes, Ways ways = {});
Launch PlanBarrier();

// `slices` from each rank to each, whose sizes only the device knows: the input's bytes stand for
// them. kInvalidArgument where the areas do not hold the table of that many slices.
Result<Launch> PlanRaggedAllToAll(const ArenaShape& shape, DType metadata, uint32_t slices,
                                  uint64_t input_bytes);

// Rows of `hidden` elements of float32, float16 or bfloat16. kInvalidArgument for other types, and
// for rows that are no multiple of 16 bytes.
Result<Launch> PlanAllReduceRmsNorm(const ArenaShape& shape, DType dtype, uint64_t rows,
                                    uint64_t hidden);

// The shape of an arena for so many ranks on GPUs that can run `lanes` blocks of every rank at
// once, within `bytes`; an error if there is no room for the smallest.
Result<ArenaShape> ShapeArena(uint32_t ranks, uint32_t lanes, uint64_t bytes);

}  // namespace jaxfabric::device
