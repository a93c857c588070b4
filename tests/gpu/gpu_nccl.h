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

  // Sums and moves of float32, as XLA would have NCCL do them: all but barriers, norms and ragged
  // calls, whose sizes XLA first brings to the host.
  static bool Does(OpKind kind);
  // Queues a call of all ranks on the rank's stream; the context of its GPU is current.
  Status Launch(const CallSpec& call, int rank, const Buffers& buffers, cuda::CUstream stream);

 private:
  struct Functions;
  Nccl() = default;
  Status Check(int result, const char* what) const;
  Status Exchange(const CallSpec& call, int rank, const Buffers& buffers,
                  cuda::CUstream stream) const;

  std::unique_ptr<Functions> functions_;
  std::vector<void*> communicators_;
};

}  // namespace jaxfabric::testing
