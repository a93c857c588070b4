// A collective with inputs and the one right result, for any rank and launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collective/call.h"

namespace jaxfabric::testing {

using Bytes = std::vector<std::byte>;

struct Problem {
  OpKind kind = OpKind::kAllReduce;
  DType dtype = DType::kFloat32;
  size_t count = 1;  // elements of one row
  int size = 2;      // ranks
  ReduceOp reduction = ReduceOp::kSum;
  std::vector<int64_t> pairs;  // permute; empty: a ring
  int64_t root = 0;

  size_t row_bytes() const;
  size_t input_bytes() const;
  size_t output_bytes() const;
  // Different for every position and launch.
  Bytes Input(int position, int launch) const;
  // What the rank must get, by the contract: reductions in rank order.
  Bytes Output(int position, int launch) const;
  // The call on the ranks with these ids.
  CallSpec Spec(const std::vector<int64_t>& ids, uint64_t site) const;
  std::string Describe() const;

 private:
  std::vector<int64_t> Pairs() const;
  Bytes Part(int position, int launch, size_t offset, size_t size_in_bytes) const;
};

// All kinds on `size` ranks, rows of `count` elements.
std::vector<Problem> EveryKind(int size, size_t count, DType dtype = DType::kFloat32);

}  // namespace jaxfabric::testing
