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
  int (*send)(const void* from, size_t count, int type, int peer, void* communicator,
              cuda::CUstream stream);
  int (*receive)(void* to, size_t count, int type, int peer, void* communicator,
                 cuda::CUstream stream);
  int (*group_start)();
  int (*group_end)();
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
      !find("ncclBroadcast", &f.broadcast) || !find("ncclSend", &f.send) ||
      !find("ncclRecv", &f.receive) || !find("ncclGroupStart", &f.group_start) ||
      !find("ncclGroupEnd", &f.group_end)) {
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
         kind == OpKind::kReduceScatter || kind == OpKind::kBroadcast ||
         kind == OpKind::kAllToAll || kind == OpKind::kPermute;
}

// Sends and receives in one group, so that they wait for each other together.
Status Nccl::Exchange(const CallSpec& call, int rank, const Buffers& buffers,
                      cuda::CUstream stream) const {
  const Functions& f = *functions_;
  void* const communicator = communicators_[static_cast<size_t>(rank)];
  const auto ranks = static_cast<int>(communicators_.size());
  const bool permutes = call.kind == OpKind::kPermute;
  const size_t bytes = permutes ? buffers.input_bytes : buffers.input_bytes / communicators_.size();
  const auto part = [&](int peer) { return permutes ? 0 : static_cast<size_t>(peer) * bytes; };
  const auto send = [&](int peer) {
    return Check(
        f.send(buffers.input + part(peer), bytes / 4, kFloat32, peer, communicator, stream),
        "ncclSend");
  };
  const auto receive = [&](int peer) {
    return Check(
        f.receive(buffers.output + part(peer), bytes / 4, kFloat32, peer, communicator, stream),
        "ncclRecv");
  };
  JF_RETURN_IF_ERROR(Check(f.group_start(), "ncclGroupStart"));
  for (int peer = 0; !permutes && peer < ranks; ++peer) {
    JF_RETURN_IF_ERROR(send(peer));
    JF_RETURN_IF_ERROR(receive(peer));
  }
  for (size_t i = 0; permutes && i + 1 < call.pairs.size(); i += 2) {
    if (call.pairs[i] == rank) JF_RETURN_IF_ERROR(send(static_cast<int>(call.pairs[i + 1])));
    if (call.pairs[i + 1] == rank) JF_RETURN_IF_ERROR(receive(static_cast<int>(call.pairs[i])));
  }
  return Check(f.group_end(), "ncclGroupEnd");
}

Status Nccl::Launch(const CallSpec& call, int rank, const Buffers& buffers, cuda::CUstream stream) {
  const Functions& f = *functions_;
  void* const communicator = communicators_[static_cast<size_t>(rank)];
  const size_t sent = buffers.input_bytes / 4, received = buffers.output_bytes / 4;
  switch (call.kind) {
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
                               static_cast<int>(call.root), communicator, stream),
                   "ncclBroadcast");
    case OpKind::kAllToAll:
    case OpKind::kPermute:
      return Exchange(call, rank, buffers, stream);
    default:
      return Status(Code::kUnimplemented, StrCat("NCCL has no ", OpKindName(call.kind)));
  }
}

}  // namespace jaxfabric::testing
