#include "gpu_nccl.h"

#include <dlfcn.h>

#include <numeric>

namespace jaxfabric::testing {
namespace {

// Of nccl.h, whose values have been the same since its version 2.
constexpr int kFloat32 = 7;
constexpr int kSum = 0;

}  // namespace

struct Nccl::Functions {
  int (*init_all)(void** communicators, int count, const int* devices);
  int (*destroy)(void* communicator);
  const char* (*error_string)(int result);
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int op, void* communicator,
                    cuda::CUstream stream);
  int (*reduce_scatter)(const void* from, void* to, size_t count, int type, int op,
                        void* communicator, cuda::CUstream stream);
  int (*all_gather)(const void* from, void* to, size_t count, int type, void* communicator,
                    cuda::CUstream stream);
  int (*broadcast)(const void* from, void* to, size_t count, int type, int root, void* communicator,
                   cuda::CUstream stream);
};

Result<std::unique_ptr<Nccl>> Nccl::Open(const std::string& library, int ranks) {
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Status(Code::kUnavailable, StrCat("no ", library));
  std::unique_ptr<Nccl> nccl(new Nccl);
  nccl->functions_ = std::make_unique<Functions>();
  Functions& f = *nccl->functions_;
  const auto find = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(::dlsym(handle, name));
    return *function != nullptr;
  };
  if (!find("ncclCommInitAll", &f.init_all) || !find("ncclCommDestroy", &f.destroy) ||
      !find("ncclGetErrorString", &f.error_string) || !find("ncclAllReduce", &f.all_reduce) ||
      !find("ncclReduceScatter", &f.reduce_scatter) || !find("ncclAllGather", &f.all_gather) ||
      !find("ncclBroadcast", &f.broadcast)) {
    return Status(Code::kUnavailable, StrCat(library, " lacks functions of NCCL 2"));
  }
  std::vector<int> devices(static_cast<size_t>(ranks));
  std::iota(devices.begin(), devices.end(), 0);
  std::vector<void*> communicators(devices.size());
  JF_RETURN_IF_ERROR(
      nccl->Check(f.init_all(communicators.data(), ranks, devices.data()), "ncclCommInitAll"));
  nccl->communicators_ = std::move(communicators);
  return nccl;
}

Nccl::~Nccl() {
  for (void* communicator : communicators_) (void)functions_->destroy(communicator);
}

Status Nccl::Check(int result, const char* what) const {
  if (result == 0) return OkStatus();
  return Status(Code::kInternal, StrCat(what, ": ", functions_->error_string(result)));
}

bool Nccl::Does(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kAllGather ||
         kind == OpKind::kReduceScatter || kind == OpKind::kBroadcast;
}

Status Nccl::Launch(OpKind kind, int rank, const Buffers& buffers, int64_t root,
                    cuda::CUstream stream) {
  const Functions& f = *functions_;
  void* const communicator = communicators_[static_cast<size_t>(rank)];
  const size_t sent = buffers.input_bytes / 4, received = buffers.output_bytes / 4;
  switch (kind) {
    case OpKind::kAllReduce:
      return Check(
          f.all_reduce(buffers.input, buffers.output, sent, kFloat32, kSum, communicator, stream),
          "ncclAllReduce");
    case OpKind::kReduceScatter:
      return Check(f.reduce_scatter(buffers.input, buffers.output, received, kFloat32, kSum,
                                    communicator, stream),
                   "ncclReduceScatter");
    case OpKind::kAllGather:
      return Check(
          f.all_gather(buffers.input, buffers.output, sent, kFloat32, communicator, stream),
          "ncclAllGather");
    case OpKind::kBroadcast:
      return Check(f.broadcast(buffers.input, buffers.output, sent, kFloat32,
                               static_cast<int>(root), communicator, stream),
                   "ncclBroadcast");
    default:
      return Status(Code::kUnimplemented, StrCat("NCCL has no ", OpKindName(kind)));
  }
}

}  // namespace jaxfabric::testing
