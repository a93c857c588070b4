#include "transport/nvlink/pool.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace jaxfabric {
namespace {

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Of what the kernel maps, on every machine.
constexpr size_t kPageUnit = 64 << 10;

Result<cuda::CUmemLocation> Locate(const cuda::Api& api, cuda::CUdevice device, PoolPlace place) {
  if (place == PoolPlace::kDevice) {
    return cuda::CUmemLocation{cuda::CU_MEM_LOCATION_TYPE_DEVICE, device};
  }
  int node = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuDeviceGetAttribute, &node,
                                  cuda::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device));
  // Without NUMA there is node 0, and the answer -1.
  return cuda::CUmemLocation{cuda::CU_MEM_LOCATION_TYPE_HOST_NUMA, std::max(node, 0)};
}

}  // namespace

Result<unsigned> HandleTypes(bool one_host, bool fabric_offered) {
  if (one_host) return unsigned{cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
  if (fabric_offered) return unsigned{cuda::CU_MEM_HANDLE_TYPE_FABRIC};
  return Status(Code::kUnimplemented, "it offers no fabric handles");
}

Result<MemoryHandle> MemoryHandle::Export(const cuda::PhysicalMemory& memory,
                                          unsigned handle_types) {
  MemoryHandle handle;
  if ((handle_types & cuda::CU_MEM_HANDLE_TYPE_FABRIC) != 0) {
    JF_ASSIGN_OR_RETURN(handle.fabric, memory.ExportFabric());
  } else {
    JF_ASSIGN_OR_RETURN(handle.fd, memory.ExportFd());
  }
  return handle;
}

Result<cuda::PhysicalMemory> MemoryHandle::Import(const cuda::Api& api, size_t bytes) const {
  return fabric ? cuda::PhysicalMemory::Import(api, *fabric, bytes)
                : cuda::PhysicalMemory::Import(api, fd.get(), bytes);
}

std::string MemoryHandle::Bytes() const {
  return fabric ? std::string(reinterpret_cast<const char*>(fabric->data), sizeof(fabric->data))
                : std::string();
}

Result<MemoryHandle> MemoryHandle::FromBytes(const std::string& bytes) {
  MemoryHandle handle;
  if (bytes.empty()) return handle;
  if (bytes.size() != sizeof(cuda::CUmemFabricHandle)) {
    return Status(Code::kInvalidArgument, StrCat("a fabric handle of ", bytes.size(),
                                                 " bytes, not ", sizeof(cuda::CUmemFabricHandle)));
  }
  std::memcpy(handle.fabric.emplace().data, bytes.data(), bytes.size());
  return handle;
}

Result<MappedMemory> MappedMemory::Map(const cuda::Api& api, cuda::PhysicalMemory memory,
                                       size_t granularity) {
  MappedMemory mapped;
  mapped.memory_ = std::move(memory);
  JF_ASSIGN_OR_RETURN(mapped.range_,
                      cuda::AddressRange::Reserve(api, mapped.memory_.bytes(), granularity));
  JF_RETURN_IF_ERROR(mapped.range_.Map(0, mapped.memory_));
  return mapped;
}

Result<MappedMemory> MappedMemory::Register(const cuda::Api& api, UniqueFd memory) {
  MappedMemory mapped;
  mapped.pages_ = std::make_unique<Pages>();
  Pages& pages = *mapped.pages_;
  pages.fd = std::move(memory);
  JF_ASSIGN_OR_RETURN(const size_t bytes, SealedSize(pages.fd.get()));
  JF_ASSIGN_OR_RETURN(pages.mapping, Mapping::MapShared(pages.fd.get(), bytes));
  JF_ASSIGN_OR_RETURN(pages.registered,
                      cuda::RegisteredMemory::Register(api, pages.mapping.bytes()));
  return mapped;
}

Status MappedMemory::Allow(std::span<const cuda::CUdevice> devices) {
  return pages_ ? OkStatus() : range_.SetAccess(0, bytes(), devices);
}

Result<MemoryHandle> MappedMemory::Export(unsigned handle_types) const {
  if (!pages_) return MemoryHandle::Export(memory_, handle_types);
  MemoryHandle handle;
  handle.fd = UniqueFd(::fcntl(pages_->fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!handle.fd.valid()) return ErrnoStatus("fcntl", errno);
  return handle;
}

Result<MappedMemory> MakePool(const cuda::Api& api, cuda::CUdevice device, PoolPlace place,
                              size_t bytes, unsigned handle_types) {
  if (place == PoolPlace::kRegistered) {
    JF_ASSIGN_OR_RETURN(UniqueFd memory,
                        CreateSharedMemory("jaxfabric-gpu-pool", RoundUp(bytes, kPageUnit)));
    return MappedMemory::Register(api, std::move(memory));
  }
  JF_ASSIGN_OR_RETURN(const cuda::CUmemLocation location, Locate(api, device, place));
  JF_ASSIGN_OR_RETURN(const size_t granularity,
                      cuda::PhysicalMemory::Granularity(api, location, handle_types));
  JF_ASSIGN_OR_RETURN(
      cuda::PhysicalMemory memory,
      cuda::PhysicalMemory::Create(api, location, RoundUp(bytes, granularity), handle_types));
  return MappedMemory::Map(api, std::move(memory), granularity);
}

Result<MappedMemory> ImportPool(const cuda::Api& api, cuda::CUdevice device, PoolPlace place,
                                MemoryHandle handle, size_t bytes) {
  if (place == PoolPlace::kRegistered) {
    JF_ASSIGN_OR_RETURN(MappedMemory mapped, MappedMemory::Register(api, std::move(handle.fd)));
    if (mapped.bytes() == bytes) return mapped;
    return Status(Code::kInvalidArgument,
                  StrCat("a pool of ", mapped.bytes(), " bytes, not ", bytes));
  }
  JF_ASSIGN_OR_RETURN(const cuda::CUmemLocation location, Locate(api, device, place));
  JF_ASSIGN_OR_RETURN(const size_t granularity,
                      cuda::PhysicalMemory::Granularity(
                          api, location,
                          handle.fabric ? cuda::CU_MEM_HANDLE_TYPE_FABRIC
                                        : cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  JF_ASSIGN_OR_RETURN(cuda::PhysicalMemory memory, handle.Import(api, bytes));
  return MappedMemory::Map(api, std::move(memory), granularity);
}

bool SaysUnreachable(const Status& allowed) {
  // CUDA_ERROR_INVALID_DEVICE from some drivers, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED from others.
  return allowed.code() == Code::kInvalidArgument || allowed.code() == Code::kUnimplemented;
}

Result<std::string> UnreachablePair(const cuda::Api& api, std::span<const cuda::CUdevice> devices) {
  for (const cuda::CUdevice from : devices) {
    for (const cuda::CUdevice to : devices) {
      int can = 1;
      if (from != to) {
        JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuDeviceCanAccessPeer, &can, from, to));
      }
      if (can == 0) {
        return StrCat("GPU ", from, " and GPU ", to, " cannot reach each other's memory");
      }
    }
  }
  return std::string();
}

}  // namespace jaxfabric
