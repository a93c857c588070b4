// NCCL, where there is a library of it, to be timed beside: one communicator for each GPU of this
// process. Calls of different ranks come from threads of their own.
#pragma once

#include <memory>
#include <vector>

#include "base/status.h"
#include "collective/call.h"
#include "drivers/cuda/abi.h"

namespace jaxfabric::testing {

class Nccl {
 public:
  // Of GPUs 0 to ranks - 1. The error says what is missing.
  static Result<std::unique_ptr<Nccl>> Open(const std::string& library, int ranks);
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  // all_reduce, all_gather, reduce_scatter and broadcast, of float32.
  static bool Does(OpKind kind);
  // Queues a sum or a move on the rank's stream; the context of its GPU is current.
  Status Launch(OpKind kind, int rank, const Buffers& buffers, int64_t root, cuda::CUstream stream);

 private:
  struct Functions;
  Nccl() = default;
  Status Check(int result, const char* what) const;

  std::unique_ptr<Functions> functions_;
  std::vector<void*> communicators_;
};

}  // namespace jaxfabric::testing
