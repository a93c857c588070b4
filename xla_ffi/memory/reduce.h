// Element-wise reductions over the ranks' contributions.
//
// Order and precision are part of the contract: sources are combined in the order given (rank
// order), float16, bfloat16 and float8 accumulate in float32 and round once at the end, so every
// rank that reduces the same sources gets the same bits, whatever the CPU.
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"
#include "memory/dtype.h"

namespace jaxfabric {

enum class ReduceOp : int32_t { kSum = 0, kMax = 1, kMin = 2 };

std::string_view ReduceOpName(ReduceOp op);

// kInvalidArgument, naming type and operation, where the pair has no meaning: kSum of kBool, kMax
// and kMin of complex, any type with DTypeSize 0.
Status CheckReducible(DType dtype, ReduceOp op);

// How the destination is written. kNonTemporal stores bypass the cache: for destinations larger
// than it that nobody reads soon. The function ends with the fence that makes them visible.
enum class Store { kCached, kNonTemporal };

// destination[i] = sources[0][i] op sources[1][i] op ... for i < count.
//
// `destination` may be exactly one of the sources, or disjoint from all; any alignment. For kMax
// and kMin a NaN in any source gives NaN. Integer sums wrap. kMax/kMin of kBool are or/and.
// Requires CheckReducible(dtype, op).
void Reduce(DType dtype, ReduceOp op, void* destination, std::span<const void* const> sources,
            size_t count, Store store = Store::kCached);

}  // namespace jaxfabric
