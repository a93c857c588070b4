// The arrays of one rank in a mixed call, by the kind of the call.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "device/cluster.h"
#include "device/mixed_call.h"
#include "device/ragged_case.h"
#include "device/rms_norm_case.h"

namespace jaxfabric::device {

class MixedArrays {
 public:
  using Finished = std::function<void(bool trapped)>;
  MixedArrays(const MixedCall& call, uint32_t rank) : call_(call), rank_(rank) {}
  virtual ~MixedArrays() = default;
  // Puts the rank's launch in flight.
  virtual uint64_t Start(Cluster& cluster, Finished finished) = 0;
  // When that has ended: whether results are what they should be, and nothing else was written.
  virtual testing::AssertionResult Check() = 0;

 protected:
  template <class Arguments>
  uint64_t Launch(Cluster& cluster, const Arguments& arguments, Finished finished) const {
    return cluster.Start(rank_, "jaxfabric_" + call_.kernel, call_.blocks, call_.threads, arguments,
                         std::move(finished));
  }
  ReduceArguments ReduceOf(Cluster& cluster, const void* input, void* output) const {
    return {cluster.View(rank_), call_.header, input, output, call_.bytes / call_.ElementBytes()};
  }
  MoveArguments MoveOf(Cluster& cluster, const void* input, void* output) const {
    return {cluster.View(rank_), call_.header, call_.root, call_.Target(rank_),
            call_.Source(rank_), input,        output,     call_.bytes};
  }
  void FillInput(std::byte* input) const {
    for (uint64_t i = 0; i < call_.InputBytes(); ++i) input[i] = std::byte{call_.Input(rank_, i)};
  }
  testing::AssertionResult CheckOutput(const std::byte* output) const {
    for (uint64_t i = 0; i < call_.OutputBytes(); ++i) {
      if (output[i] == std::byte{call_.Expected(rank_, i)}) continue;
      return testing::AssertionFailure() << "byte " << i << " of " << call_.OutputBytes();
    }
    return testing::AssertionSuccess();
  }

  const MixedCall call_;
  const uint32_t rank_;
};

// Calls that combine or move bytes through the areas.
class OwnArrays : public MixedArrays {
 public:
  OwnArrays(const MixedCall& call, uint32_t rank)
      : MixedArrays(call, rank),
        input_(call.InputBytes(), call.header % 16 / call.Alignment() * call.Alignment()),
        output_(call.OutputBytes()) {
    FillInput(input_.data());
  }
  uint64_t Start(Cluster& cluster, Finished finished) override {
    std::byte *input = input_.data(), *output = output_.data();
    if (call_.Combines()) return Launch(cluster, ReduceOf(cluster, input, output), finished);
    return Launch(cluster, MoveOf(cluster, input, output), finished);
  }
  testing::AssertionResult Check() override {
    const testing::AssertionResult right = CheckOutput(output_.data());
    if (!right || output_.GuardsIntact()) return right;
    return testing::AssertionFailure() << "guards";
  }

 private:
  Bytes input_, output_;
};

// Memory of every rank that its peers address. Outside calls in windows nobody reads or writes it.
class MixedWindows {
 public:
  explicit MixedWindows(const ArenaShape& shape) {
    // Two arrays of the largest calls: of all tests' segments.
    const uint64_t bytes = uint64_t{2} * shape.bulk_bytes * shape.lanes * (6 + 2 * shape.ranks);
    for (uint32_t rank = 0; rank < shape.ranks; ++rank) windows_.emplace_back(bytes);
  }
  Bytes& operator[](uint32_t rank) { return windows_[rank]; }
  uint32_t ranks() const { return static_cast<uint32_t>(windows_.size()); }

 private:
  std::vector<Bytes> windows_;
};

// Each rank's arrays are elsewhere in its window, and in every call. After it they are erased: who
// comes too late, reads or writes what is wrong.
class ArraysInWindows : public MixedArrays {
 public:
  ArraysInWindows(const MixedCall& call, uint32_t rank, MixedWindows& windows)
      : MixedArrays(call, rank), window_(windows[rank]) {
    untouched_ = Erased();
    input_ = Place(1);
    output_ = (input_ + call.InputBytes() + 15) / 16 * 16 + Place(2);
    if (output_ + call.OutputBytes() > window_.size()) ADD_FAILURE() << "small window";
    FillInput(window_.data() + input_);
    if (!call.HasWindow(rank)) return;
    table_ = {At(input_), At(output_), input_, output_, {}};
    for (uint32_t peer = 0; peer < windows.ranks(); ++peer) {
      table_.base[peer] = {windows[peer].data(), windows[peer].data()};
    }
  }
  uint64_t Start(Cluster& cluster, Finished finished) override {
    // Without a window: no table, or one that is not about these arrays.
    const bool no_table = !call_.HasWindow(rank_) && call_.header % 8 == 0;
    const WindowTable* table = no_table ? nullptr : &table_;
    if (call_.Combines()) {
      const ReduceArguments a = ReduceOf(cluster, At(input_), At(output_));
      return Launch(cluster, WindowReduceArguments{a, table}, finished);
    }
    const MoveArguments a = MoveOf(cluster, At(input_), At(output_));
    return Launch(cluster, WindowMoveArguments{a, table}, finished);
  }
  testing::AssertionResult Check() override {
    const testing::AssertionResult right = CheckOutput(At(output_));
    std::memset(At(output_), 0xEE, call_.OutputBytes());
    for (uint64_t i = 0; i < call_.InputBytes(); ++i) {
      untouched_ &= At(input_)[i] == std::byte{call_.Input(rank_, i)};
    }
    std::memset(At(input_), 0xEE, call_.InputBytes());
    untouched_ &= Erased() && window_.GuardsIntact();
    if (!right || untouched_) return right;
    return testing::AssertionFailure() << "the window beside the output";
  }

 private:
  std::byte* At(uint64_t place) { return window_.data() + place; }
  bool Erased() {
    return std::all_of(At(0), At(window_.size()), [](std::byte b) { return b == std::byte{0xEE}; });
  }
  uint64_t Place(uint32_t array) const {
    const uint32_t any = (call_.header * 2654435761u + rank_ * 40503u + array * 31u) >> 9;
    return any % 64 / call_.Alignment() * call_.Alignment();
  }

  Bytes& window_;
  WindowTable table_{};
  uint64_t input_, output_;
  bool untouched_;
};

// Each rank makes the arrays of all by itself: they come of the header.
template <class Index>
class RaggedArrays : public MixedArrays {
 public:
  RaggedArrays(const MixedCall& call, uint32_t rank) : MixedArrays(call, rank) {
    std::mt19937_64 random(call.header);
    const auto slices = static_cast<uint32_t>(1 + random() % 4);
    case_ = MakeRagged<Index>(random, call.ranks, slices, static_cast<RaggedSizes>(random() % 3));
  }
  uint64_t Start(Cluster& cluster, Finished finished) override {
    return Launch(cluster, case_.Arguments(cluster, rank_, call_.header), finished);
  }
  testing::AssertionResult Check() override {
    Bytes& output = case_.rank[rank_].output;
    if (output.Copy() == case_.Expected(rank_) && output.GuardsIntact()) {
      return testing::AssertionSuccess();
    }
    return testing::AssertionFailure()
           << case_.slices << " slices of " << case_.row_bytes << " bytes a row";
  }

 private:
  RaggedCase<Index> case_;
};

template <class Codec>
class NormArrays : public MixedArrays {
 public:
  NormArrays(const MixedCall& call, uint32_t rank) : MixedArrays(call, rank), case_(Make(call)) {}
  uint64_t Start(Cluster& cluster, Finished finished) override {
    return Launch(cluster, case_.Arguments(cluster, rank_, call_.header), finished);
  }
  testing::AssertionResult Check() override { return case_.Check(rank_); }

 private:
  static RmsNormCase<Codec> Make(const MixedCall& call) {
    std::mt19937_64 random(call.header);
    // As many rows fill the packets of a lane.
    const uint32_t row_bytes = 16u << random() % 3;
    return {random, call.ranks, (call.bytes + row_bytes - 1) / row_bytes, row_bytes};
  }

  RmsNormCase<Codec> case_;
};

inline std::unique_ptr<MixedArrays> MakeArrays(const MixedCall& call, uint32_t rank,
                                               MixedWindows& windows) {
  const bool bfloat16 = call.kernel.ends_with("bfloat16");
  if (call.IsNorm() && bfloat16) return std::make_unique<NormArrays<Bfloat16Codec>>(call, rank);
  if (call.IsNorm()) return std::make_unique<NormArrays<PlainCodec<float>>>(call, rank);
  if (call.kernel.ends_with("int64")) return std::make_unique<RaggedArrays<int64_t>>(call, rank);
  if (call.Is("ragged")) return std::make_unique<RaggedArrays<int32_t>>(call, rank);
  if (call.InWindows()) return std::make_unique<ArraysInWindows>(call, rank, windows);
  return std::make_unique<OwnArrays>(call, rank);
}

}  // namespace jaxfabric::device
