// Windows: memory of all ranks of a communicator that each of them addresses, made by XLA around
// its own arrays when a call asks for them in its prepare stage (windows/stages.cc).
//
// What is here lies between two shared objects of one build: the core, and the module that is
// compiled against the headers of an XLA that has windows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "collective/call.h"
#include "drivers/cuda/abi.h"

namespace jaxfabric {

// What XLA has for one execution of a call. Null where it has none.
struct GpuWindows {
  struct Place {
    void* window = nullptr;  // ncclWindow_t
    size_t offset = 0;       // of the array in it
  };
  void* communicator = nullptr;  // ncclComm_t
  Place input, output;
};

// Which arrays of a call peers address.
constexpr bool PeersReadInput(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter;
}
constexpr bool PeersWriteOutput(OpKind kind) { return kind != OpKind::kReduceScatter; }

// The core as the other module knows it.
struct WindowCore {
  // Of what this header describes. Both modules are built together; a change needs no other number,
  // but the two must not be mixed.
  static constexpr uint32_t kVersion = 1;
  uint32_t version = kVersion;
  uint32_t sizes = static_cast<uint32_t>(sizeof(Buffers) << 16 | sizeof(GpuWindows));
  // The FFI type id of a call's state, once XLA has given it one.
  int64_t (*type_id)() = nullptr;
  // Sets a call up for the launches of this execution, which has these arrays. `state` is what the
  // instantiate stage made.
  Status (*attach)(void* state, int ordinal, cuda::CUstream stream, const Buffers& buffers,
                   const GpuWindows& windows) = nullptr;
};

}  // namespace jaxfabric
