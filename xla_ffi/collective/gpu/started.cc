// Calls in two halves: they run on a stream of their own beside XLA's.
#include <utility>

#include "collective/gpu/domain.h"

namespace jaxfabric {

Status GpuDomain::StartBeside(int local, cuda::CUstream stream, uint64_t site,
                              const std::function<Status(cuda::CUstream)>& launch) {
  Local& owner = gpus_[static_cast<size_t>(local)];
  std::lock_guard lock(owner.started_mutex);
  const cuda::ScopedContext current(*api_, owner.gpu->context());
  JF_RETURN_IF_ERROR(current.status());
  if (!owner.side.get()) {
    JF_ASSIGN_OR_RETURN(owner.side, cuda::Stream::Create(*api_, cuda::Stream::Priority::kHighest));
    JF_ASSIGN_OR_RETURN(owner.fork, cuda::Event::Create(*api_));
  }
  // The operand is there once the stream has come so far.
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(*api_, cuEventRecord, owner.fork.get(), stream));
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(*api_, cuStreamWaitEvent, owner.side.get(), owner.fork.get(), 0));
  // Before the kernel, which nobody could wait for without it.
  cuda::Event end;
  if (owner.spare.empty()) {
    JF_ASSIGN_OR_RETURN(end, cuda::Event::Create(*api_));
  } else {
    end = std::move(owner.spare.back());
    owner.spare.pop_back();
  }
  JF_RETURN_IF_ERROR(launch(owner.side.get()));
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(*api_, cuEventRecord, end.get(), owner.side.get()));
  owner.started[site].push_back(std::move(end));
  return OkStatus();
}

Status GpuDomain::Finish(int ordinal, cuda::CUstream stream, uint64_t site) {
  const int local = LocalIndex(ordinal);
  if (local < 0) {
    return Status(Code::kInternal,
                  StrCat("GPU ", ordinal, " was not there when the fabric was initialized"));
  }
  if (failed()) return failure();
  Local& owner = gpus_[static_cast<size_t>(local)];
  std::lock_guard lock(owner.started_mutex);
  const auto found = owner.started.find(site);
  if (found == owner.started.end() || found->second.empty()) {
    return Status(Code::kFailedPrecondition,
                  "a collective is waited for that was not started, or in a fabric that has been "
                  "shut down");
  }
  // Equal calls may be waited for in any order; the last to be started is the last to end.
  std::deque<cuda::Event>& ends = found->second;
  const auto wait = [&]() -> Status {
    const cuda::ScopedContext current(*api_, owner.gpu->context());
    JF_RETURN_IF_ERROR(current.status());
    return JF_CUDA_CALL(*api_, cuStreamWaitEvent, stream, ends.back().get(), 0);
  };
  JF_RETURN_IF_ERROR(FailUnlessOk(wait()));
  // So the oldest event goes, and the newest stays until all have been waited for.
  owner.spare.push_back(std::move(ends.front()));
  ends.pop_front();
  if (ends.empty()) owner.started.erase(found);
  return OkStatus();
}

Status GpuDomain::Copy(int ordinal, cuda::CUstream stream, void* to, const void* from,
                       size_t bytes) {
  const int local = LocalIndex(ordinal);
  const auto copy = [&]() -> Status {
    const cuda::ScopedContext current(*api_, gpu(local).context());
    JF_RETURN_IF_ERROR(current.status());
    return JF_CUDA_CALL(*api_, cuMemcpyDtoDAsync, reinterpret_cast<cuda::CUdeviceptr>(to),
                        reinterpret_cast<cuda::CUdeviceptr>(from), bytes, stream);
  };
  return FailUnlessOk(copy());
}

}  // namespace jaxfabric
