// x[bytes] -> y[ranks, bytes]: every rank gets what all ranks have.
#pragma once

#include "device/move.cuh"

namespace jaxfabric::device {

struct AllGather {
  static constexpr Sources kSources = Sources::kAll;
  static JF_DEVICE bool SendsTo(const MoveArguments&, uint32_t) { return true; }
  static JF_DEVICE bool ReceivesFrom(const MoveArguments&, uint32_t) { return true; }
  static JF_DEVICE uint64_t SendOffset(const MoveArguments&, uint32_t) { return 0; }
  static JF_DEVICE uint64_t ReceiveOffset(const MoveArguments& a, uint32_t source) {
    return source * a.bytes;
  }
  static JF_DEVICE void Keep(const MoveArguments& a, uint64_t at, uint64_t bytes) {
    CopyBlock(static_cast<std::byte*>(a.output) + a.communicator.rank * a.bytes + at,
              static_cast<const std::byte*>(a.input) + at, bytes);
  }
};

}  // namespace jaxfabric::device
