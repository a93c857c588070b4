// The functions of NCCL that say where windows are: a table, from the libnccl that is already
// loaded in this process, or from a fake.
//
// XLA loads a libnccl and makes communicators and windows with it; handles of one library mean
// nothing to another, and two in one process are one too many. So nothing is ever loaded here: what
// is not there yet may be there later. A table never changes once it is made; any thread may call
// through it.
#pragma once

#include <cstddef>

#include "base/status.h"

namespace jaxfabric::nccl {

// As in nccl.h; results are an int, 0 for success.
using Communicator = void*;  // ncclComm_t
using Window = void*;        // ncclWindow_t

struct Api {
  const char* (*ncclGetErrorString)(int result) = nullptr;
  int (*ncclCommCount)(Communicator communicator, int* count) = nullptr;
  int (*ncclCommUserRank)(Communicator communicator, int* rank) = nullptr;
  // The address of byte `offset` of the peer's window, for this process's GPU; null where that
  // cannot address it. From NCCL 2.29 on.
  int (*ncclGetPeerDevicePointer)(Window window, size_t offset, int peer, void** address) = nullptr;
  // May be null: where this rank's memory of the window begins.
  int (*ncclWinGetUserPtr)(Communicator communicator, Window window, void** address) = nullptr;
};

// The error says what is missing: a library, or a function of one that is too old.
Result<const Api*> LoadedApi();

// "function: unhandled cuda error", in NCCL's own words.
Status ToStatus(const Api& api, int result, const char* function);

#define JF_NCCL_CALL(api, function, ...) \
  ::jaxfabric::nccl::ToStatus((api), (api).function(__VA_ARGS__), #function)

namespace internal {
// From the library whose file name begins with `name`, if exactly one is loaded; for tests, which
// have no NCCL.
Status FillApi(const char* name, Api* api);
}  // namespace internal

}  // namespace jaxfabric::nccl
