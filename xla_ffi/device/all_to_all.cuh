// x[ranks, bytes] -> y[ranks, bytes]: rank i gets every rank's x[i], in rank order.
#pragma once

#include "device/move.cuh"

namespace jaxfabric::device {

struct AllToAll {
  static constexpr Sources kSources = Sources::kAll;
  static JF_DEVICE bool SendsTo(const MoveArguments&, uint32_t) { return true; }
  static JF_DEVICE bool ReceivesFrom(const MoveArguments&, uint32_t) { return true; }
  static JF_DEVICE uint64_t SendOffset(const MoveArguments& a, uint32_t peer) {
    return peer * a.bytes;
  }
  static JF_DEVICE uint64_t ReceiveOffset(const MoveArguments& a, uint32_t source) {
    return source * a.bytes;
  }
  static JF_DEVICE void Keep(const MoveArguments& a, uint64_t at, uint64_t bytes) {
    const uint64_t own = a.communicator.rank * a.bytes + at;
    CopyBlock(static_cast<std::byte*>(a.output) + own, static_cast<const std::byte*>(a.input) + own,
              bytes);
  }
};

}  // namespace jaxfabric::device
