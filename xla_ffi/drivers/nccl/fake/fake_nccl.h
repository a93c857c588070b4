// NCCL without NCCL, for tests: communicators and windows of ranks that are threads of one process
// and address each other's memory as it is.
//
// Threading: any; what a handle is made of never changes.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "drivers/nccl/api.h"

namespace jaxfabric::nccl {

class FakeNccl {
 public:
  FakeNccl();
  const Api& api() const { return api_; }

  // Handles live as long as this. Rank `rank` of a communicator of `count`.
  Communicator MakeCommunicator(int rank, int count);
  // This rank's end of a window: where that of each rank begins, null for one that is not
  // addressable.
  Window MakeWindow(Communicator communicator, std::vector<std::byte*> begins);

 private:
  struct Comm {
    int rank, count;
  };
  struct Win {
    Comm* comm;
    std::vector<std::byte*> begins;
  };
  std::mutex mutex_;  // guards what follows
  std::deque<Comm> comms_;
  std::deque<Win> windows_;
  Api api_;
};

}  // namespace jaxfabric::nccl
