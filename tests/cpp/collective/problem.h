// A collective with inputs and the one right result, for any rank and launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "collective/call.h"
#include "collective/pattern/pattern.h"

namespace jaxfabric::testing {

using Bytes = std::vector<std::byte>;

// What ragged_all_to_all is told on one rank: one entry per slice, in rows.
struct Slices {
  std::vector<int64_t> input_offsets, send_sizes, output_offsets, recv_sizes;
};

struct Problem {
  OpKind kind = OpKind::kAllReduce;
  DType dtype = DType::kFloat32;
  size_t count = 1;  // elements of one row
  int size = 2;      // ranks
  ReduceOp reduction = ReduceOp::kSum;
  std::vector<int64_t> pairs;  // permute; empty: a ring
  int64_t root = 0;
  // Ragged: rows of how many elements, and how often each rank sends to each; the operand and the
  // result have size * count elements. Unless `slices` says otherwise, every rank has `count`
  // elements of the result for each rank to write anything to.
  size_t row_elements = 1;  // all_reduce_rms_norm: of its rows, `count` being those of all
  size_t slices_each = 0;   // 0: one to three, by `count`
  std::function<Slices(int position, int launch)> slices{};
  // By position, where each host's operands are added first, then hosts in order; else in rank
  // order.
  std::vector<int> host_of{};
  // The hosts' sums are added in its order.
  std::optional<PatternKind> pattern{};

  size_t row_bytes() const;
  size_t input_bytes() const;
  size_t output_bytes() const;
  // Different for every position and launch.
  Bytes Input(int position, int launch) const;
  // What the rank must get, by the contract: reductions in rank order.
  Bytes Output(int position, int launch) const;
  // Ragged: what the result holds before, and the slices.
  Bytes Initial(int position, int launch) const;
  Slices SlicesOf(int position, int launch) const;
  RaggedSizes Ragged() const;
  // all_reduce_rms_norm: small integers, so that the squares of a row have one sum. Output() is y.
  Bytes Residual(int position, int launch) const;
  Bytes Weight() const;
  Bytes NewResidual(int position, int launch) const;
  // The call on the ranks with these ids.
  CallSpec Spec(const std::vector<int64_t>& ids, uint64_t site) const;
  std::string Describe() const;

 private:
  size_t SlicesEach() const { return slices_each > 0 ? slices_each : 1 + count % 3; }
  void AddSlice(Slices& all, int position, int launch, int peer, size_t index) const;
  Bytes RaggedOutput(int position, int launch) const;
  Bytes Integers(uint64_t seed, size_t elements) const;
  Bytes Normalised(int position, int launch) const;
  std::vector<int64_t> Pairs() const;
  Bytes Part(int position, int launch, size_t offset, size_t size_in_bytes) const;
};

// All kinds that CPUs have on `size` ranks, rows of `count` elements.
std::vector<Problem> EveryKind(int size, size_t count, DType dtype = DType::kFloat32);

}  // namespace jaxfabric::testing
