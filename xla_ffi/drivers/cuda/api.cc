#include "drivers/cuda/api.h"

#include <dlfcn.h>

namespace jaxfabric::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

enum Kind { kRequired, kOptional };

Code CodeOf(CUresult result) {
  switch (result) {
    case CUDA_SUCCESS:
      return Code::kOk;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_INVALID_HANDLE:
      return Code::kInvalidArgument;
    case CUDA_ERROR_OUT_OF_MEMORY:
    case CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES:
      return Code::kResourceExhausted;
    case CUDA_ERROR_NOT_FOUND:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
      return Code::kNotFound;
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_NOT_READY:
    case CUDA_ERROR_SYSTEM_NOT_READY:
      return Code::kUnavailable;
    case CUDA_ERROR_NOT_PERMITTED:
      return Code::kPermissionDenied;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
      return Code::kUnimplemented;
    case CUDA_ERROR_NOT_INITIALIZED:
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
      return Code::kFailedPrecondition;
    default:
      return Code::kInternal;
  }
}

Status Load(Api* api) {
  JF_RETURN_IF_ERROR(internal::FillApi(kLibrary, api));
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(*api, cuInit, 0));
  int devices = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(*api, cuDeviceGetCount, &devices));
  if (devices == 0) return Status(Code::kUnavailable, "the CUDA driver has no device");
  return OkStatus();
}

}  // namespace

namespace internal {

Status FillApi(const char* library, Api* api) {
  // Never closed: the driver keeps threads of its own.
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const reason = ::dlerror();
    return Status(Code::kUnavailable,
                  StrCat(library, " not found: is an NVIDIA driver installed? (",
                         reason == nullptr ? "" : reason, ")"));
  }
  const auto resolve = [&](Kind kind, const char* symbol, auto* function) -> Status {
    *function =
        reinterpret_cast<std::remove_pointer_t<decltype(function)>>(::dlsym(handle, symbol));
    if (*function != nullptr || kind == kOptional) return OkStatus();
    return Status(Code::kUnavailable,
                  StrCat("the CUDA driver is too old: ", library, " has no ", symbol));
  };
#define JF_CUDA_FUNCTION(kind, name, symbol, parameters) \
  JF_RETURN_IF_ERROR(resolve(kind, #symbol, &api->name));
#include "drivers/cuda/functions.inc"
#undef JF_CUDA_FUNCTION
  return OkStatus();
}

}  // namespace internal

Result<const Api*> LoadApi() {
  static Api api;
  static const Status status = Load(&api);
  if (!status.ok()) return status;
  return &api;
}

Status ToStatus(const Api& api, CUresult result, std::string_view what) {
  if (result == CUDA_SUCCESS) return OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.cuGetErrorName(result, &name) != CUDA_SUCCESS) name = nullptr;
  if (api.cuGetErrorString(result, &text) != CUDA_SUCCESS) text = nullptr;
  if (name == nullptr) {
    return Status(CodeOf(result), StrCat(what, ": CUDA error ", static_cast<unsigned>(result)));
  }
  return Status(CodeOf(result), StrCat(what, ": ", name, " (", text == nullptr ? "" : text, ")"));
}

}  // namespace jaxfabric::cuda
