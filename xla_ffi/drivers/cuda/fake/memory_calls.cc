// Virtual memory of the fake driver: allocations, addresses, multicast objects.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "drivers/cuda/fake/state.h"

namespace jaxfabric::cuda {

using fake::Allocation;
using fake::Region;

namespace {

// cuMulticastBindMem() and cuMemMap() wait for the whole team, the real ones for ever.
constexpr auto kTeamDeadline = std::chrono::seconds(20);

// A fabric handle of the fake: where to find the memfd, with no socket between the processes.
struct FabricHandle {
  uint64_t magic;
  int32_t clique;
  int32_t pid;
  int32_t fd;
  uint64_t inode;
};
static_assert(sizeof(FabricHandle) <= sizeof(CUmemFabricHandle));

void* At(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

CUdeviceptr AddressOf(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

bool Multiple(size_t value, size_t granularity) { return value % granularity == 0; }

bool WaitForTeam(Allocation& object) {
  const auto deadline = std::chrono::steady_clock::now() + kTeamDeadline;
  while (!object.Complete()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    ::sched_yield();
  }
  return true;
}

struct Locked {
  Locked() : state(*fake::Current()), lock(state.mutex) {}
  std::shared_ptr<Allocation> Find(CUmemGenericAllocationHandle handle) const {
    const auto found = state.handles.find(handle);
    return found == state.handles.end() ? nullptr : found->second;
  }
  CUmemGenericAllocationHandle Add(std::shared_ptr<Allocation> allocation) {
    const auto handle = state.next_handle++;
    state.handles[handle] = std::move(allocation);
    return handle;
  }
  FakeDriver::State& state;
  std::unique_lock<std::mutex> lock;
};

}  // namespace

bool FakeDriver::State::PeerAccess(int from_gpu, int to_gpu) const {
  if (to_gpu == fake::AllocationHeader::kHost) return true;
  return std::none_of(
      config.no_peer_access.begin(), config.no_peer_access.end(), [&](const auto& pair) {
        return pair == std::pair(from_gpu, to_gpu) || pair == std::pair(to_gpu, from_gpu);
      });
}

const Region* FakeDriver::State::RegionAt(CUdeviceptr address, CUdeviceptr* start) const {
  auto region = regions.upper_bound(address);
  if (region == regions.begin()) return nullptr;
  --region;
  if (address - region->first >= region->second.bytes) return nullptr;
  *start = region->first;
  return &region->second;
}

bool FakeDriver::State::Accessible(int device, CUdeviceptr address, size_t bytes) const {
  while (bytes > 0) {
    CUdeviceptr start = 0;
    const Region* const region = RegionAt(address, &start);
    if (region == nullptr || region->kind == Region::Kind::kMulticast) return false;
    if ((region->access >> device & 1) == 0) return false;
    const size_t here = std::min<size_t>(bytes, start + region->bytes - address);
    address += here;
    bytes -= here;
  }
  return true;
}

namespace fake {

CUresult Calls::cuMemGetAllocationGranularity(size_t* granularity,
                                              const CUmemAllocationProp* properties,
                                              CUmemAllocationGranularity_flags) {
  if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
      !Current()->KnownDevice(properties->location.id)) {
    return CUDA_ERROR_INVALID_DEVICE;
  }
  *granularity = Current()->config.granularity;
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                            const CUmemAllocationProp* properties, unsigned long long flags) {
  Locked locked;
  FakeDriver::State& state = locked.state;
  if (const CUresult error = state.ForbiddenInCapture(); error != CUDA_SUCCESS) return error;
  if (flags != 0 || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED || bytes == 0 ||
      !Multiple(bytes, state.config.granularity)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const bool host = properties->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
  if (host ? properties->location.id != 0
           : properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (host && !state.config.host_memory) return CUDA_ERROR_NOT_SUPPORTED;
  if (!host && !state.KnownDevice(properties->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  if ((properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0 &&
      !state.config.fabric_handles) {
    return CUDA_ERROR_NOT_PERMITTED;  // as without the fabric's daemon
  }
  if (host) {
    auto made =
        Allocation::Create(bytes, AllocationHeader::kHost, properties->requestedHandleTypes);
    if (!made.ok()) return CUDA_ERROR_OPERATING_SYSTEM;
    *handle = locked.Add(*std::move(made));
    return CUDA_SUCCESS;
  }
  auto& device = state.devices[static_cast<size_t>(properties->location.id)];
  if (device.used_bytes + bytes > state.config.memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  auto made = Allocation::Create(bytes, device.gpu, properties->requestedHandleTypes);
  if (!made.ok()) return CUDA_ERROR_OPERATING_SYSTEM;
  // The books are balanced when the last handle and mapping have gone.
  device.used_bytes += bytes;
  std::shared_ptr<Allocation> counted(
      made->get(), [made = *made, &device](Allocation*) { device.used_bytes -= made->bytes(); });
  *handle = locked.Add(std::move(counted));
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemRelease(CUmemGenericAllocationHandle handle) {
  Locked locked;
  return locked.state.handles.erase(handle) == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult Calls::cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type,
                                             unsigned long long flags) {
  const Locked locked;
  const auto allocation = locked.Find(handle);
  if (allocation == nullptr || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if ((allocation->handle_types() & type) == 0) return CUDA_ERROR_INVALID_VALUE;
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    const int fd = ::fcntl(allocation->fd(), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *static_cast<int*>(shareable) = fd;
    return CUDA_SUCCESS;
  }
  const FabricHandle fabric{AllocationHeader::kMagic, locked.state.config.clique, locked.state.pid,
                            allocation->fd(), allocation->inode()};
  std::memset(shareable, 0, sizeof(CUmemFabricHandle));
  std::memcpy(shareable, &fabric, sizeof(fabric));
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                               void* shareable, CUmemAllocationHandleType type) {
  Locked locked;
  UniqueFd fd;
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    const int given = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
    fd = UniqueFd(::fcntl(given, F_DUPFD_CLOEXEC, 0));
  } else if (type == CU_MEM_HANDLE_TYPE_FABRIC && locked.state.config.fabric_handles) {
    FabricHandle fabric;
    std::memcpy(&fabric, shareable, sizeof(fabric));
    if (fabric.magic != AllocationHeader::kMagic || fabric.clique != locked.state.config.clique) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    auto opened = Allocation::OpenOf(fabric.pid, fabric.fd, fabric.inode);
    if (!opened.ok()) return CUDA_ERROR_INVALID_VALUE;
    fd = std::move(*opened);
  } else {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (!fd.valid()) return CUDA_ERROR_INVALID_VALUE;
  auto imported = Allocation::Import(std::move(fd));
  if (!imported.ok()) return CUDA_ERROR_INVALID_VALUE;
  *handle = locked.Add(std::move(*imported));
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment,
                                    CUdeviceptr, unsigned long long flags) {
  Locked locked;
  const size_t granularity = locked.state.config.granularity;
  if (alignment == 0) alignment = granularity;
  if (flags != 0 || bytes == 0 || !Multiple(bytes, granularity) ||
      (alignment & (alignment - 1)) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  alignment = std::max(alignment, granularity);
  void* const space = ::mmap(nullptr, bytes + alignment, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const CUdeviceptr begin = AddressOf(space);
  const CUdeviceptr aligned = (begin + alignment - 1) / alignment * alignment;
  if (aligned > begin) ::munmap(space, aligned - begin);
  ::munmap(At(aligned + bytes), begin + alignment - aligned);
  locked.state.reservations[aligned] = bytes;
  *address = aligned;
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  Locked locked;
  const auto reservation = locked.state.reservations.find(address);
  if (reservation == locked.state.reservations.end() || reservation->second != bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const auto region = locked.state.regions.lower_bound(address);
  if (region != locked.state.regions.end() && region->first < address + bytes) {
    return CUDA_ERROR_INVALID_VALUE;  // something is still mapped
  }
  ::munmap(At(address), bytes);
  locked.state.reservations.erase(reservation);
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemMap(CUdeviceptr address, size_t bytes, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long flags) {
  Locked locked;
  FakeDriver::State& state = locked.state;
  const auto allocation = locked.Find(handle);
  if (allocation == nullptr || flags != 0 || offset != 0 || bytes != allocation->bytes() ||
      !Multiple(address, state.config.granularity)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (allocation->multicast()) {
    locked.lock.unlock();
    if (!WaitForTeam(*allocation)) return CUDA_ERROR_ILLEGAL_STATE;
    locked.lock.lock();
  }
  auto reservation = state.reservations.upper_bound(address);
  if (reservation == state.reservations.begin()) return CUDA_ERROR_INVALID_VALUE;
  --reservation;
  if (address + bytes > reservation->first + reservation->second) return CUDA_ERROR_INVALID_VALUE;
  CUdeviceptr start = 0;
  const auto next = state.regions.lower_bound(address);
  if (state.RegionAt(address, &start) != nullptr ||
      (next != state.regions.end() && next->first < address + bytes)) {
    return CUDA_ERROR_ALREADY_MAPPED;
  }
  Region region{Region::Kind::kMapped, bytes, -1, 0, allocation};
  if (allocation->multicast()) {
    // Only the multimem instructions can use such an address; anything else faults.
    region.kind = Region::Kind::kMulticast;
    // Weakly: the registry keeps what it ever had.
    emulation::RegisterMulticast(
        At(address), bytes, [weak = std::weak_ptr<Allocation>(allocation)](size_t at) {
          const auto object = weak.lock();
          return object == nullptr ? emulation::MulticastTargets() : object->Targets(at);
        });
  } else {
    if (::mmap(At(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd(), 0) ==
        MAP_FAILED) {
      return CUDA_ERROR_MAP_FAILED;
    }
    for (const auto& device : state.devices) {
      if (device.gpu == allocation->gpu()) region.device = device.context.device;
    }
    NoteMapping(allocation->inode(), static_cast<std::byte*>(At(address)));
  }
  state.regions[address] = std::move(region);
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemUnmap(CUdeviceptr address, size_t bytes) {
  Locked locked;
  auto& regions = locked.state.regions;
  const auto begin = regions.find(address);
  auto end = begin;
  CUdeviceptr reached = address;
  for (; end != regions.end() && end->first == reached && reached < address + bytes; ++end) {
    if (end->second.allocation == nullptr) return CUDA_ERROR_INVALID_VALUE;
    reached += end->second.bytes;
  }
  if (begin == regions.end() || reached != address + bytes) return CUDA_ERROR_INVALID_VALUE;
  for (auto region = begin; region != end; ++region) {
    if (region->second.kind == Region::Kind::kMulticast) {
      emulation::UnregisterMulticast(At(region->first));
    } else {
      ForgetMapping(region->second.allocation->inode(), static_cast<std::byte*>(At(region->first)));
    }
  }
  ::mmap(At(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
  regions.erase(begin, end);
  return CUDA_SUCCESS;
}

CUresult Calls::cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                               size_t count) {
  Locked locked;
  FakeDriver::State& state = locked.state;
  for (CUdeviceptr at = address; at < address + bytes;) {
    const auto found = state.regions.find(at);
    if (found == state.regions.end() || found->second.allocation == nullptr ||
        at + found->second.bytes > address + bytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    Region& region = found->second;
    uint64_t allowed = region.access;
    for (const CUmemAccessDesc& entry : std::span(access, count)) {
      if (entry.location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
      if (!state.KnownDevice(entry.location.id)) return CUDA_ERROR_INVALID_DEVICE;
      const int gpu = state.devices[static_cast<size_t>(entry.location.id)].gpu;
      if (region.kind == Region::Kind::kMulticast
              ? !region.allocation->HasGpu(gpu)
              : !state.PeerAccess(gpu, region.allocation->gpu())) {
        return CUDA_ERROR_INVALID_DEVICE;
      }
      const uint64_t bit = uint64_t{1} << entry.location.id;
      allowed = entry.flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ? allowed & ~bit : allowed | bit;
    }
    region.access = allowed;
    if (region.kind != Region::Kind::kMulticast) {
      ::mprotect(At(at), region.bytes, allowed != 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
    at += region.bytes;
  }
  return CUDA_SUCCESS;
}

CUresult Calls::cuMulticastGetGranularity(size_t* granularity, const CUmulticastObjectProp*,
                                          CUmulticastGranularity_flags) {
  *granularity = Current()->config.granularity;
  return CUDA_SUCCESS;
}

CUresult Calls::cuMulticastCreate(CUmemGenericAllocationHandle* handle,
                                  const CUmulticastObjectProp* properties) {
  Locked locked;
  const FakeConfig& config = locked.state.config;
  if (!config.multicast) return CUDA_ERROR_NOT_SUPPORTED;
  if (properties->flags != 0 || properties->numDevices == 0 || properties->size == 0 ||
      properties->numDevices > emulation::kMaxMulticastMembers ||
      !Multiple(properties->size, config.granularity)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto made = Allocation::CreateMulticast(properties->size, properties->numDevices,
                                          properties->handleTypes);
  if (!made.ok()) return CUDA_ERROR_OPERATING_SYSTEM;
  *handle = locked.Add(std::move(*made));
  return CUDA_SUCCESS;
}

CUresult Calls::cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  const Locked locked;
  const auto object = locked.Find(handle);
  if (object == nullptr || !object->multicast()) return CUDA_ERROR_INVALID_VALUE;
  if (!locked.state.KnownDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  return object->AddGpu(locked.state.devices[static_cast<size_t>(device)].gpu);
}

CUresult Calls::cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
                                   CUmemGenericAllocationHandle memory_handle, size_t memory_offset,
                                   size_t bytes, unsigned long long flags) {
  Locked locked;
  const size_t granularity = locked.state.config.granularity;
  const auto object = locked.Find(handle), memory = locked.Find(memory_handle);
  if (object == nullptr || !object->multicast() || memory == nullptr || memory->multicast() ||
      flags != 0 || bytes == 0 || !Multiple(offset, granularity) ||
      !Multiple(memory_offset, granularity) || !Multiple(bytes, granularity) ||
      offset + bytes > object->bytes() || memory_offset + bytes > memory->bytes()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (object->handle_types() != 0 && memory->handle_types() == 0) return CUDA_ERROR_INVALID_VALUE;
  locked.lock.unlock();
  if (!WaitForTeam(*object)) return CUDA_ERROR_ILLEGAL_STATE;
  locked.lock.lock();
  if (!object->HasGpu(memory->gpu())) return CUDA_ERROR_INVALID_DEVICE;
  return object->Bind(memory, offset, memory_offset, bytes);
}

CUresult Calls::cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device,
                                  size_t offset, size_t bytes) {
  const Locked locked;
  const auto object = locked.Find(handle);
  if (object == nullptr || !object->multicast()) return CUDA_ERROR_INVALID_VALUE;
  if (!locked.state.KnownDevice(device)) return CUDA_ERROR_INVALID_DEVICE;
  return object->Unbind(locked.state.devices[static_cast<size_t>(device)].gpu, offset, bytes);
}

}  // namespace fake
}  // namespace jaxfabric::cuda
