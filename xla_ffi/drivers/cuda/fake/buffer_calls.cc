// Plain device memory and pinned host memory of the fake driver, and the copies that the host waits
// for.
#include <sys/mman.h>

#include <cstring>

#include "drivers/cuda/fake/state.h"

namespace jaxfabric::cuda {
namespace {

using fake::Region;

constexpr size_t kPage = 4096;

size_t Pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

bool Pinned(const Region& region) {
  return region.kind == Region::Kind::kPinned || region.kind == Region::Kind::kRegistered;
}

bool OfHost(const fake::Allocation* allocation) {
  return allocation != nullptr && allocation->gpu() == fake::AllocationHeader::kHost;
}

void* At(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

struct Locked {
  Locked() : state(*fake::Current()), lock(state.mutex) {}

  // What a call that captures may not see begins with.
  CUresult Begin(int* device) {
    if (const CUresult error = state.ForbiddenInCapture(); error != CUDA_SUCCESS) return error;
    return state.CurrentDevice(device);
  }

  // Maps fresh memory, which forked children share if it is pinned.
  CUresult Map(size_t bytes, Region region, CUdeviceptr* address) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const int sharing = region.kind == Region::Kind::kPinned ? MAP_SHARED : MAP_PRIVATE;
    region.bytes = Pages(bytes);
    void* const memory = ::mmap(nullptr, region.bytes, PROT_READ | PROT_WRITE,
                                sharing | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<uintptr_t>(memory);
    state.regions[*address] = std::move(region);
    return CUDA_SUCCESS;
  }

  CUresult Unmap(CUdeviceptr address, Region::Kind kind) {
    const auto found = state.regions.find(address);
    if (found == state.regions.end() || found->second.kind != kind) return CUDA_ERROR_INVALID_VALUE;
    if (kind == Region::Kind::kAllocated) {
      state.devices[static_cast<size_t>(found->second.device)].used_bytes -= found->second.bytes;
    }
    ::munmap(At(address), found->second.bytes);
    state.regions.erase(found);
    return CUDA_SUCCESS;
  }

  // Waits for the legacy stream, as a copy on it does, and checks that the device may use the
  // range.
  CUresult BeginCopy(CUdeviceptr address, size_t bytes) {
    int device = 0;
    if (const CUresult error = Begin(&device); error != CUDA_SUCCESS) return error;
    if (!state.Accessible(device, address, bytes)) return CUDA_ERROR_INVALID_VALUE;
    auto& entry = state.devices[static_cast<size_t>(device)];
    state.host_news.wait(lock, [&] {
      return entry.failed != CUDA_SUCCESS || (entry.legacy.queue.empty() && !entry.legacy.busy);
    });
    return entry.failed;
  }

  FakeDriver::State& state;
  std::unique_lock<std::mutex> lock;
};

}  // namespace

namespace fake {

CUresult Calls::cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  Locked locked;
  int device = 0;
  if (const CUresult error = locked.Begin(&device); error != CUDA_SUCCESS) return error;
  auto& used = locked.state.devices[static_cast<size_t>(device)].used_bytes;
  if (used + Pages(bytes) > locked.state.config.memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  const Region region{Region::Kind::kAllocated, 0, device, uint64_t{1} << device, nullptr};
  const CUresult result = locked.Map(bytes, region, address);
  if (result == CUDA_SUCCESS) used += Pages(bytes);
  return result;
}

CUresult Calls::cuMemFree(CUdeviceptr address) {
  Locked locked;
  if (const CUresult error = locked.state.ForbiddenInCapture(); error != CUDA_SUCCESS) return error;
  int device = 0;
  const CUresult failed = locked.state.CurrentDevice(&device);
  if (failed == CUDA_ERROR_INVALID_CONTEXT) return failed;
  const CUresult result =
      address == 0 ? CUDA_SUCCESS : locked.Unmap(address, Region::Kind::kAllocated);
  // After a fault the call fails, but the memory goes with the context in the end.
  return failed != CUDA_SUCCESS ? failed : result;
}

CUresult Calls::cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  Locked locked;
  int device = 0;
  if (const CUresult error = locked.Begin(&device); error != CUDA_SUCCESS) return error;
  const uint64_t access =
      (flags & kMemHostAllocPortable) != 0 ? ~uint64_t{0} : uint64_t{1} << device;
  CUdeviceptr address = 0;
  const CUresult result =
      locked.Map(bytes, {Region::Kind::kPinned, 0, -1, access, nullptr}, &address);
  if (result == CUDA_SUCCESS) *pointer = At(address);
  return result;
}

CUresult Calls::cuMemFreeHost(void* pointer) {
  Locked locked;
  if (const CUresult error = locked.state.ForbiddenInCapture(); error != CUDA_SUCCESS) return error;
  return locked.Unmap(reinterpret_cast<uintptr_t>(pointer), Region::Kind::kPinned);
}

CUresult Calls::cuMemHostRegister(void* pointer, size_t bytes, unsigned flags) {
  Locked locked;
  int device = 0;
  if (const CUresult error = locked.Begin(&device); error != CUDA_SUCCESS) return error;
  const CUdeviceptr address = reinterpret_cast<uintptr_t>(pointer);
  if (bytes == 0 || bytes % kPage != 0 || address % kPage != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto next = locked.state.regions.lower_bound(address);
  CUdeviceptr start = 0;
  if (locked.state.RegionAt(address, &start) != nullptr ||
      (next != locked.state.regions.end() && next->first < address + bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const uint64_t access =
      (flags & kMemHostRegisterPortable) != 0 ? ~uint64_t{0} : uint64_t{1} << device;
  locked.state.regions[address] = {Region::Kind::kRegistered, bytes, -1, access, nullptr};
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemHostUnregister(void* pointer) {
  Locked locked;
  if (const CUresult error = locked.state.ForbiddenInCapture(); error != CUDA_SUCCESS) return error;
  const auto found = locked.state.regions.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == locked.state.regions.end() || found->second.kind != Region::Kind::kRegistered) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  locked.state.regions.erase(found);
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemHostGetDevicePointer(CUdeviceptr* address, void* pointer, unsigned) {
  const Locked locked;
  CUdeviceptr start = 0;
  const CUdeviceptr wanted = reinterpret_cast<uintptr_t>(pointer);
  const Region* const region = locked.state.RegionAt(wanted, &start);
  if (region == nullptr || !Pinned(*region)) return CUDA_ERROR_INVALID_VALUE;
  *address = wanted;
  return CUDA_SUCCESS;
}

CUresult Calls::cuPointerGetAttribute(void* data, CUpointer_attribute attribute,
                                      CUdeviceptr address) {
  const Locked locked;
  CUdeviceptr start = 0;
  const Region* const region = locked.state.RegionAt(address, &start);
  if (region == nullptr) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(data) = Pinned(*region) || OfHost(region->allocation.get())
                                          ? CU_MEMORYTYPE_HOST
                                          : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = region->device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(data) = start;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<size_t*>(data) = region->bytes;
      return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult Calls::cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
  Locked locked;
  const CUresult error = locked.BeginCopy(to, bytes);
  if (error == CUDA_SUCCESS) std::memcpy(At(to), from, bytes);
  return error;
}

CUresult Calls::cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
  Locked locked;
  const CUresult error = locked.BeginCopy(from, bytes);
  if (error == CUDA_SUCCESS) std::memcpy(to, At(from), bytes);
  return error;
}

CUresult Calls::cuMemsetD8(CUdeviceptr to, unsigned char value, size_t bytes) {
  Locked locked;
  const CUresult error = locked.BeginCopy(to, bytes);
  if (error == CUDA_SUCCESS) std::memset(At(to), value, bytes);
  return error;
}

}  // namespace fake
}  // namespace jaxfabric::cuda
