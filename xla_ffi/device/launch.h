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
};

// What the kernels of a reduction work on: `count` elements of the array are `count * factor` of
// it.
struct Element {
  DType dtype;      // one of those that have kernels
  uint64_t factor;  // 2 for complex numbers
};
Element KernelElement(DType dtype, ReduceOp op);

// The arrays are those of one rank: all of x (all_reduce), a row of x (reduce_scatter). Requires
// CheckReducible(dtype, op).
Launch PlanAllReduce(const ArenaShape& shape, DType dtype, ReduceOp op, uint64_t bytes);
Launch PlanReduceScatter(const ArenaShape& shape, DType dtype, ReduceOp op, uint64_t row_bytes);

enum class Move { kAllGather, kAllToAll, kPermute, kBroadcast };
// `bytes` go from each sender to each receiver.
Launch PlanMove(const ArenaShape& shape, Move move, uint64_t bytes);
Launch PlanBarrier();
// `bytes`: the larger of the input and the output. Offsets and sizes are int32 or int64. An error
// if the tables of so many slices from each rank to each do not fit into the arenas.
Result<Launch> PlanRaggedAllToAll(const ArenaShape& shape, size_t index_bytes, uint64_t slices,
                                  uint64_t bytes);

// The shape of an arena for so many ranks on GPUs that can run `lanes` blocks of every rank at
// once, within `bytes`; an error if there is no room for the smallest.
Result<ArenaShape> ShapeArena(uint32_t ranks, uint32_t lanes, uint64_t bytes);

}  // namespace jaxfabric::device
