// Devices, contexts, modules and errors of the fake driver.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "drivers/cuda/fake/state.h"

namespace jaxfabric::cuda {
namespace {

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE",
     "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not ended in the same stream as it began"},
    {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "capturing stream has unjoined work"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* Find(CUresult code) {
  const auto* const found = std::find_if(std::begin(kErrors), std::end(kErrors),
                                         [&](const ErrorText& e) { return e.code == code; });
  return found == std::end(kErrors) ? nullptr : found;
}

// The thread's stack of contexts; those of an earlier fake are forgotten.
struct ContextStack {
  uint64_t owner = 0;
  std::vector<CUcontext> contexts;
};

std::vector<CUcontext>& Contexts(const FakeDriver::State& state) {
  thread_local ContextStack stack;
  if (stack.owner != state.id) stack = {state.id, {}};
  return stack.contexts;
}

// Looks a device up, with the lock held.
struct Access {
  explicit Access(CUdevice device)
      : state(*fake::Current()), lock(state.mutex), known(state.KnownDevice(device)) {}
  FakeDriver::State& state;
  std::lock_guard<std::mutex> lock;
  const bool known;
};

}  // namespace

CUresult FakeDriver::State::CurrentDevice(int* device) const {
  const auto& contexts = Contexts(*this);
  if (contexts.empty() || contexts.back() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *device = contexts.back()->device;
  return devices[static_cast<size_t>(*device)].failed;
}

namespace fake {

CUresult Calls::cuInit(unsigned flags) {
  return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Calls::cuDriverGetVersion(int* version) {
  *version = Current()->config.multicast_functions ? 12080 : 12000;
  return CUDA_SUCCESS;
}

CUresult Calls::cuGetErrorName(CUresult error, const char** name) {
  const ErrorText* const found = Find(error);
  *name = found == nullptr ? nullptr : found->name;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult Calls::cuGetErrorString(CUresult error, const char** text) {
  const ErrorText* const found = Find(error);
  *text = found == nullptr ? nullptr : found->text;
  return found == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult Calls::cuDeviceGetCount(int* count) {
  *count = static_cast<int>(Current()->devices.size());
  return CUDA_SUCCESS;
}

CUresult Calls::cuDeviceGet(CUdevice* device, int ordinal) {
  if (!Current()->KnownDevice(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult Calls::cuDeviceGetName(char* name, int bytes, CUdevice device) {
  const Access access(device);
  if (!access.known) return CUDA_ERROR_INVALID_DEVICE;
  std::snprintf(name, static_cast<size_t>(bytes), "Fake GPU %d",
                access.state.devices[static_cast<size_t>(device)].gpu);
  return CUDA_SUCCESS;
}

CUresult Calls::cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  const Access access(device);
  if (!access.known) return CUDA_ERROR_INVALID_DEVICE;
  const int gpu = access.state.devices[static_cast<size_t>(device)].gpu;
  std::memcpy(uuid->bytes, "fake gpu    ", 12);
  std::memcpy(uuid->bytes + 12, &gpu, 4);
  return CUDA_SUCCESS;
}

CUresult Calls::cuDeviceGetPCIBusId(char* id, int bytes, CUdevice device) {
  const Access access(device);
  if (!access.known) return CUDA_ERROR_INVALID_DEVICE;
  if (bytes < 13) return CUDA_ERROR_INVALID_VALUE;
  std::snprintf(id, static_cast<size_t>(bytes), "0000:%02x:00.0",
                static_cast<unsigned>(access.state.devices[static_cast<size_t>(device)].gpu & 255));
  return CUDA_SUCCESS;
}

CUresult Calls::cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const Access access(device);
  if (!access.known) return CUDA_ERROR_INVALID_DEVICE;
  const FakeConfig& config = access.state.config;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      *value = 48 * 1024;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *value = config.multiprocessors;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      *value = 2048;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      *value = 32;
      break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      *value = access.state.devices[static_cast<size_t>(device)].gpu;
      break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = config.compute_capability / 10;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = config.compute_capability % 10;
      break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = 1;
      break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
      *value = config.fabric_handles;
      break;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
      *value = 0;
      break;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      *value = config.host_memory;
      break;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
      *value = config.multicast && config.multicast_functions;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

CUresult Calls::cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  const Access access(device);
  if (!access.known || !access.state.KnownDevice(peer)) return CUDA_ERROR_INVALID_DEVICE;
  const auto& devices = access.state.devices;
  *can = device != peer && access.state.PeerAccess(devices[static_cast<size_t>(device)].gpu,
                                                   devices[static_cast<size_t>(peer)].gpu);
  return CUDA_SUCCESS;
}

CUresult Calls::cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  const Access access(device);
  if (!access.known) return CUDA_ERROR_INVALID_DEVICE;
  auto& entry = access.state.devices[static_cast<size_t>(device)];
  ++entry.retained;
  *context = &entry.context;
  return CUDA_SUCCESS;
}

CUresult Calls::cuDevicePrimaryCtxRelease(CUdevice device) {
  const Access access(device);
  if (!access.known) return CUDA_ERROR_INVALID_DEVICE;
  auto& entry = access.state.devices[static_cast<size_t>(device)];
  if (entry.retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  // A context that is made anew has not failed.
  if (--entry.retained == 0) entry.failed = CUDA_SUCCESS;
  return CUDA_SUCCESS;
}

CUresult Calls::cuCtxPushCurrent(CUcontext context) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  for (auto& device : state.devices) {
    if (&device.context != context) continue;
    if (device.retained == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    Contexts(state).push_back(context);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_CONTEXT;
}

CUresult Calls::cuCtxPopCurrent(CUcontext* context) {
  auto& contexts = Contexts(*Current());
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult Calls::cuCtxGetCurrent(CUcontext* context) {
  const auto& contexts = Contexts(*Current());
  *context = contexts.empty() ? nullptr : contexts.back();
  return CUDA_SUCCESS;
}

CUresult Calls::cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  const FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  int device;
  return state.CurrentDevice(&device);
}

}  // namespace fake
}  // namespace jaxfabric::cuda
