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
  kRaggedAllToAll,
  kAllReduceRmsNorm,  // on GPUs only
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
  float epsilon = 0;           // all_reduce_rms_norm
  // On GPUs, of a call whose arrays may be in windows (gpu/windows.h): the groups' members, one
  // group after the other, as positions in the list of the executable's devices. Else empty.
  std::vector<int64_t> positions;

  // Equal for calls with equal attributes, on every process.
  uint64_t Hash() const;
  // Bad attributes (they come from our own lowering, but also from exported programs).
  Status Validate() const;
};

// The shapes of a ragged_all_to_all: an operand and a result of rows, and four arrays that say,
// slice by slice, which rows go where. Rank i gets the slices number i * slices / n and following.
struct RaggedSizes {
  size_t row_bytes = 0;
  size_t input_rows = 0;
  size_t output_rows = 0;
  size_t slices = 0;       // length of each of the arrays
  size_t index_bytes = 8;  // of their elements: 4 on GPUs only
};

// On GPUs the arrays are in device memory, and their elements have the size of RaggedSizes.
struct RaggedBuffers {
  // What the result holds where nothing is written: another buffer, or the result's own.
  const std::byte* initial = nullptr;
  const int64_t* input_offsets = nullptr;   // rows of the operand
  const int64_t* send_sizes = nullptr;      // in rows
  const int64_t* output_offsets = nullptr;  // rows of the receiver's result
  const int64_t* recv_sizes = nullptr;      // the senders' send_sizes
};

// The arrays of an all_reduce_rms_norm beside the operand that is summed and the normalised result,
// all of the same type: rows of `hidden` elements, and one row of weights.
struct NormBuffers {
  size_t hidden = 0;
  const std::byte* residual = nullptr;
  const std::byte* weight = nullptr;
  std::byte* new_residual = nullptr;
};

// One execution's buffers. Sizes and type are those of the compiled program.
struct Buffers {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  size_t input_bytes = 0;
  size_t output_bytes = 0;
  DType dtype = DType::kInvalid;
  RaggedSizes ragged_sizes;
  RaggedBuffers ragged;
  NormBuffers norm;
};

}  // namespace jaxfabric
