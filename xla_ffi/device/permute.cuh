// x[bytes] -> y[bytes]: the source's x, or zeros where no rank is the source.
#pragma once

#include "device/move.cuh"

namespace jaxfabric::device {

struct Permute {
  static constexpr Sources kSources = Sources::kOne;
  static JF_DEVICE bool SendsTo(const MoveArguments& a, uint32_t peer) {
    return a.target == static_cast<int32_t>(peer);
  }
  static JF_DEVICE bool ReceivesFrom(const MoveArguments& a, uint32_t source) {
    return a.source == static_cast<int32_t>(source);
  }
  static JF_DEVICE uint64_t SendOffset(const MoveArguments&, uint32_t) { return 0; }
  static JF_DEVICE uint64_t ReceiveOffset(const MoveArguments&, uint32_t) { return 0; }
  static JF_DEVICE void Keep(const MoveArguments& a, uint64_t at, uint64_t bytes) {
    auto* output = static_cast<std::byte*>(a.output) + at;
    if (a.source < 0) ZeroBlock(output, bytes);
    if (a.source == static_cast<int32_t>(a.communicator.rank)) {
      CopyBlock(output, static_cast<const std::byte*>(a.input) + at, bytes);
    }
  }
};

}  // namespace jaxfabric::device
