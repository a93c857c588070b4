// Modules, streams, events, and what is queued on streams, of the fake driver.
#include <algorithm>
#include <cstring>
#include <thread>

#include "drivers/cuda/fake/state.h"

namespace jaxfabric::cuda {

using fake::Region;

namespace {

constexpr unsigned kMaxThreads = 1024;

struct CopyArguments {
  void* to;
  const void* from;  // null: the bytes follow the arguments
  size_t bytes;
};

// Copies and fills are kernels of one thread, which others overtake.
constexpr size_t kPiece = 64 * 1024;

void CopyKernel(const void* arguments) {
  const auto& copy = *static_cast<const CopyArguments*>(arguments);
  const auto* from = static_cast<const std::byte*>(copy.from);
  if (from == nullptr) from = static_cast<const std::byte*>(arguments) + sizeof(CopyArguments);
  for (size_t done = 0; done < copy.bytes; done += kPiece) {
    std::memcpy(static_cast<std::byte*>(copy.to) + done, from + done,
                std::min(kPiece, copy.bytes - done));
    emulation::MaybeSwitch();
  }
}

struct FillArguments {
  void* to;
  size_t bytes;
  unsigned char value;
};

void FillKernel(const void* arguments) {
  const auto& fill = *static_cast<const FillArguments*>(arguments);
  std::memset(fill.to, fill.value, fill.bytes);
  emulation::MaybeSwitch();
}

void* At(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

template <class Arguments>
fake::Work MakeWork(CUgraphNodeType type, emulation::Kernel kernel, const Arguments& arguments) {
  fake::Work work;
  work.type = type;
  work.kernel = kernel;
  work.arguments.resize(sizeof(arguments));
  std::memcpy(work.arguments.data(), &arguments, sizeof(arguments));
  return work;
}

// The lock, and the stream that a call names.
struct OnStream {
  explicit OnStream(CUstream wanted) : state(*fake::Current()), lock(state.mutex) {
    error = state.FindStream(wanted, &stream);
  }
  FakeDriver::State& state;
  std::unique_lock<std::mutex> lock;
  CUstream stream = nullptr;
  CUresult error;
};

// The lock, and the event that a call names.
struct OnEvent {
  explicit OnEvent(CUevent wanted) : state(*fake::Current()), lock(state.mutex) {
    if (state.events.contains(wanted)) event = wanted;
  }
  CUresult Check() const {
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return event->captured ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
  }
  CUresult Failed() const { return state.devices[static_cast<size_t>(event->device)].failed; }
  FakeDriver::State& state;
  std::unique_lock<std::mutex> lock;
  CUevent event = nullptr;
};

}  // namespace

CUresult FakeDriver::State::FindStream(CUstream stream, CUstream* found) {
  if (stream == nullptr) {
    int device = 0;
    if (const CUresult error = CurrentDevice(&device); error != CUDA_SUCCESS) return error;
    *found = &devices[static_cast<size_t>(device)].legacy;
    return CUDA_SUCCESS;
  }
  if (!streams.contains(stream)) return CUDA_ERROR_INVALID_HANDLE;
  *found = stream;
  return devices[static_cast<size_t>(stream->device)].failed;
}

namespace fake {

CUresult Calls::cuModuleLoadData(CUmodule* loaded, const void* image) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  if (const CUresult error = state.ForbiddenInCapture(); error != CUDA_SUCCESS) return error;
  int device = 0;
  if (const CUresult error = state.CurrentDevice(&device); error != CUDA_SUCCESS) return error;
  if (image == nullptr) return CUDA_ERROR_INVALID_IMAGE;
  auto made = std::make_unique<CUmod_st>();
  made->device = device;
  *loaded = made.get();
  state.modules[*loaded] = std::move(made);
  return CUDA_SUCCESS;
}

CUresult Calls::cuModuleUnload(CUmodule loaded) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  std::erase_if(state.functions, [&](const auto& entry) { return entry.first->loaded == loaded; });
  return state.modules.erase(loaded) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult Calls::cuModuleGetFunction(CUfunction* function, CUmodule loaded, const char* name) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  if (!state.modules.contains(loaded)) return CUDA_ERROR_INVALID_HANDLE;
  const auto kernel = state.kernels.find(name);
  if (kernel == state.kernels.end()) return CUDA_ERROR_NOT_FOUND;
  auto made = std::make_unique<CUfunc_st>();
  *made = {loaded->device, loaded, kernel->second};
  *function = made.get();
  state.functions[*function] = std::move(made);
  return CUDA_SUCCESS;
}

CUresult Calls::cuFuncGetAttribute(int* value, CUfunction_attribute attribute,
                                   CUfunction function) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  if (!state.functions.contains(function)) return CUDA_ERROR_INVALID_HANDLE;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = kMaxThreads;
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = 32;
      break;
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = state.config.compute_capability;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult Calls::cuFuncSetAttribute(CUfunction function, CUfunction_attribute, int) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  return state.functions.contains(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult Calls::cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function,
                                                            int threads, size_t) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  if (!state.functions.contains(function)) return CUDA_ERROR_INVALID_HANDLE;
  if (threads <= 0 || threads > static_cast<int>(kMaxThreads)) return CUDA_ERROR_INVALID_VALUE;
  *blocks = state.config.blocks_per_multiprocessor;
  return CUDA_SUCCESS;
}

CUresult Calls::cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned, CUstream wanted, void** parameters,
                               void** extra) {
  const OnStream on(wanted);
  if (on.error != CUDA_SUCCESS) return on.error;
  if (!on.state.functions.contains(function)) return CUDA_ERROR_INVALID_HANDLE;
  int device = 0;
  if (const CUresult error = on.state.CurrentDevice(&device); error != CUDA_SUCCESS) return error;
  // Function, stream and current context belong together.
  if (function->device != device || on.stream->device != device) return CUDA_ERROR_INVALID_HANDLE;
  if (grid_x == 0 || block_x == 0 || block_x > kMaxThreads) return CUDA_ERROR_INVALID_VALUE;
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || extra != nullptr) {
    return CUDA_ERROR_NOT_SUPPORTED;  // by the fake
  }
  Work work;
  work.function = function;
  work.kernel = function->entry.kernel;
  work.dim = {grid_x, block_x};
  work.arguments.resize(function->entry.argument_bytes);
  if (!work.arguments.empty()) {
    if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::memcpy(work.arguments.data(), parameters[0], work.arguments.size());
  }
  return on.state.Submit(on.stream, std::move(work));
}

CUresult Calls::cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream wanted) {
  const OnStream on(wanted);
  if (on.error != CUDA_SUCCESS) return on.error;
  if (!on.state.Accessible(on.stream->device, to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr start = 0;
  const bool pinned = on.state.RegionAt(reinterpret_cast<uintptr_t>(from), &start) != nullptr;
  Work work = MakeWork(CU_GRAPH_NODE_TYPE_MEMCPY, &CopyKernel,
                       CopyArguments{At(to), pinned ? from : nullptr, bytes});
  // Pageable memory has been read when the call returns.
  if (!pinned && bytes > 0) {
    const auto* const begin = static_cast<const std::byte*>(from);
    work.arguments.insert(work.arguments.end(), begin, begin + bytes);
  }
  return on.state.Submit(on.stream, std::move(work));
}

CUresult Calls::cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream wanted) {
  OnStream on(wanted);
  if (on.error != CUDA_SUCCESS) return on.error;
  if (!on.state.Accessible(on.stream->device, from, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return on.state.Submit(on.stream, MakeWork(CU_GRAPH_NODE_TYPE_MEMCPY, &CopyKernel,
                                             CopyArguments{to, At(from), bytes}));
}

CUresult Calls::cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream wanted) {
  const OnStream on(wanted);
  if (on.error != CUDA_SUCCESS) return on.error;
  const int device = on.stream->device;
  if (!on.state.Accessible(device, to, bytes) || !on.state.Accessible(device, from, bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return on.state.Submit(on.stream, MakeWork(CU_GRAPH_NODE_TYPE_MEMCPY, &CopyKernel,
                                             CopyArguments{At(to), At(from), bytes}));
}

CUresult Calls::cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes,
                                CUstream wanted) {
  const OnStream on(wanted);
  if (on.error != CUDA_SUCCESS) return on.error;
  if (!on.state.Accessible(on.stream->device, to, bytes)) return CUDA_ERROR_INVALID_VALUE;
  return on.state.Submit(on.stream, MakeWork(CU_GRAPH_NODE_TYPE_MEMSET, &FillKernel,
                                             FillArguments{At(to), bytes, value}));
}

CUresult Calls::cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  int device = 0;
  if (const CUresult error = state.CurrentDevice(&device); error != CUDA_SUCCESS) return error;
  auto made = std::make_unique<CUstream_st>();
  made->device = device;
  *stream = made.get();
  state.streams[*stream] = std::move(made);
  return CUDA_SUCCESS;
}

CUresult Calls::cuStreamDestroy(CUstream stream) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  const auto found = state.streams.find(stream);
  if (found == state.streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->capture != nullptr) stream->capture->invalidated = true;
  // What is queued is still done.
  if (stream->busy || !stream->queue.empty()) {
    state.dying_streams.push_back(std::move(found->second));
  }
  state.streams.erase(found);
  return CUDA_SUCCESS;
}

CUresult Calls::cuStreamQuery(CUstream wanted) {
  const OnStream on(wanted);
  if (on.error != CUDA_SUCCESS) return on.error;
  if (on.stream->capture != nullptr) {
    on.stream->capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return on.stream->busy || !on.stream->queue.empty() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult Calls::cuStreamSynchronize(CUstream wanted) {
  OnStream on(wanted);
  if (on.error != CUDA_SUCCESS) return on.error;
  if (on.stream->capture != nullptr) {
    on.stream->capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  const auto& device = on.state.devices[static_cast<size_t>(on.stream->device)];
  on.state.host_news.wait(on.lock, [&] {
    return device.failed != CUDA_SUCCESS || (!on.stream->busy && on.stream->queue.empty());
  });
  return device.failed;
}

CUresult Calls::cuCtxSynchronize() {
  FakeDriver::State& state = *Current();
  std::unique_lock lock(state.mutex);
  int ordinal = 0;
  if (const CUresult error = state.CurrentDevice(&ordinal); error != CUDA_SUCCESS) return error;
  if (const CUresult error = state.ForbiddenInCapture(); error != CUDA_SUCCESS) return error;
  const auto& device = state.devices[static_cast<size_t>(ordinal)];
  const auto idle = [&](const auto& stream) {
    return stream.device != ordinal || (!stream.busy && stream.queue.empty());
  };
  state.host_news.wait(lock, [&] {
    return device.failed != CUDA_SUCCESS ||
           (std::all_of(state.streams.begin(), state.streams.end(),
                        [&](const auto& entry) { return idle(*entry.second); }) &&
            std::all_of(state.dying_streams.begin(), state.dying_streams.end(),
                        [&](const auto& stream) { return idle(*stream); }));
  });
  return device.failed;
}

CUresult Calls::cuEventCreate(CUevent* event, unsigned flags) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  int device = 0;
  if (const CUresult error = state.CurrentDevice(&device); error != CUDA_SUCCESS) return error;
  auto made = std::make_unique<CUevent_st>();
  made->device = device;
  made->flags = flags;
  *event = made.get();
  state.events[*event] = std::move(made);
  return CUDA_SUCCESS;
}

CUresult Calls::cuEventDestroy(CUevent event) {
  FakeDriver::State& state = *Current();
  const std::lock_guard lock(state.mutex);
  return state.events.erase(event) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult Calls::cuEventQuery(CUevent wanted) {
  const OnEvent on(wanted);
  if (const CUresult error = on.state.ForbiddenInCapture(); error != CUDA_SUCCESS) return error;
  if (const CUresult error = on.Check(); error != CUDA_SUCCESS) return error;
  if (const CUresult error = on.Failed(); error != CUDA_SUCCESS) return error;
  const auto& recorded = on.event->recorded;
  return recorded == nullptr || recorded->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult Calls::cuEventSynchronize(CUevent wanted) {
  OnEvent on(wanted);
  if (const CUresult error = on.state.ForbiddenInCapture(); error != CUDA_SUCCESS) return error;
  if (const CUresult error = on.Check(); error != CUDA_SUCCESS) return error;
  const auto recorded = on.event->recorded;
  const auto& device = on.state.devices[static_cast<size_t>(on.event->device)];
  on.state.host_news.wait(on.lock, [&] {
    return device.failed != CUDA_SUCCESS || recorded == nullptr || recorded->done;
  });
  return device.failed;
}

CUresult Calls::cuEventElapsedTime(float* milliseconds, CUevent begin, CUevent end) {
  const OnEvent from(begin);
  if (const CUresult error = from.Check(); error != CUDA_SUCCESS) return error;
  if (!from.state.events.contains(end)) return CUDA_ERROR_INVALID_HANDLE;
  for (const CUevent event : {begin, end}) {
    if ((event->flags & CU_EVENT_DISABLE_TIMING) != 0 || event->recorded == nullptr) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!event->recorded->done) return CUDA_ERROR_NOT_READY;
  }
  const std::chrono::duration<float, std::milli> elapsed = end->recorded->at - begin->recorded->at;
  *milliseconds = elapsed.count();
  return CUDA_SUCCESS;
}

}  // namespace fake
}  // namespace jaxfabric::cuda
