// What a compiled program says about one collective: the attributes of the call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "memory/dtype.h"
#include "memory/reduce.h"

namespace jaxfabric {

enum class OpKind : uint32_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kPermute,
  kBroadcast,
  kBarrier,
};

std::string_view OpKindName(OpKind kind);

struct CallSpec {
  OpKind kind = OpKind::kBarrier;
  ReduceOp reduction = ReduceOp::kSum;
  uint64_t site = 0;   // the same on every rank, see docs/matching.md
  uint64_t place = 0;  // module and ordinal alone: equal places with unequal sites are a mismatch
  std::string label;   // "psum float32[4096]"
  std::vector<std::vector<int64_t>> groups;  // device ids, or mesh positions with by_position
  bool by_position = false;
  std::vector<int64_t> pairs;  // permute: source, destination, source, destination, ...
  int64_t root = 0;            // broadcast

  // Equal for calls with equal attributes, on every process.
  uint64_t Hash() const;
  // Bad attributes (they come from our own lowering, but also from exported programs).
  Status Validate() const;
};

// One execution's buffers. Sizes and type are those of the compiled program.
struct Buffers {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t input_bytes = 0;
  size_t output_bytes = 0;
  DType dtype = DType::kInvalid;
};

}  // namespace jaxfabric
