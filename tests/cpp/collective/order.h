// In which order patterns add, written down once more, from their descriptions.
#pragma once

#include <vector>

#include "collective/pattern/pattern.h"
#include "collective/problem.h"

namespace jaxfabric::testing {

// What all members' contributions, `count` elements each, add up to: of an all_reduce, or of the
// block of `owner` in a reduce_scatter (-1: all_reduce).
Bytes SumInOrder(PatternKind kind, int owner, DType dtype, ReduceOp reduction, size_t count,
                 const std::vector<Bytes>& parts);

}  // namespace jaxfabric::testing
