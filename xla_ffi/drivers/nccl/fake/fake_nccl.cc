#include "drivers/nccl/fake/fake_nccl.h"

#include <utility>

namespace jaxfabric::nccl {

// ncclInvalidArgument.
constexpr int kInvalidArgument = 4;

FakeNccl::FakeNccl() {
  api_.ncclGetErrorString = [](int) { return "invalid argument"; };
  api_.ncclCommCount = [](Communicator communicator, int* count) {
    *count = static_cast<Comm*>(communicator)->count;
    return 0;
  };
  api_.ncclCommUserRank = [](Communicator communicator, int* rank) {
    *rank = static_cast<Comm*>(communicator)->rank;
    return 0;
  };
  api_.ncclGetPeerDevicePointer = [](Window window, size_t offset, int peer, void** address) {
    const Win& own = *static_cast<Win*>(window);
    if (peer < 0 || peer >= own.comm->count) return kInvalidArgument;
    std::byte* const begin = own.begins[static_cast<size_t>(peer)];
    *address = begin == nullptr ? nullptr : begin + offset;
    return 0;
  };
  api_.ncclWinGetUserPtr = [](Communicator communicator, Window window, void** address) {
    const Win& own = *static_cast<Win*>(window);
    if (own.comm != communicator) return kInvalidArgument;
    *address = own.begins[static_cast<size_t>(own.comm->rank)];
    return 0;
  };
}

Communicator FakeNccl::MakeCommunicator(int rank, int count) {
  std::lock_guard lock(mutex_);
  return &comms_.emplace_back(Comm{rank, count});
}

Window FakeNccl::MakeWindow(Communicator communicator, std::vector<std::byte*> begins) {
  std::lock_guard lock(mutex_);
  return &windows_.emplace_back(Win{static_cast<Comm*>(communicator), std::move(begins)});
}

}  // namespace jaxfabric::nccl
