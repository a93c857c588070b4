// x[bytes] -> y[bytes]: the root's x.
#pragma once

#include "device/move.cuh"

namespace jaxfabric::device {

struct Broadcast {
  static constexpr Sources kSources = Sources::kOne;
  static JF_DEVICE bool SendsTo(const MoveArguments& a, uint32_t) {
    return a.communicator.rank == a.root;
  }
  static JF_DEVICE bool ReceivesFrom(const MoveArguments& a, uint32_t source) {
    return source == a.root;
  }
  static JF_DEVICE uint64_t SendOffset(const MoveArguments&, uint32_t) { return 0; }
  static JF_DEVICE uint64_t ReceiveOffset(const MoveArguments&, uint32_t) { return 0; }
  static JF_DEVICE void Keep(const MoveArguments& a, uint64_t at, uint64_t bytes) {
    if (a.communicator.rank != a.root) return;
    CopyBlock(static_cast<std::byte*>(a.output) + at, static_cast<const std::byte*>(a.input) + at,
              bytes);
  }
};

}  // namespace jaxfabric::device
