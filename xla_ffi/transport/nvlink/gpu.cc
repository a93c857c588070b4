#include "transport/nvlink/gpu.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace jaxfabric {
namespace {

// A descriptor can go to any process of this host.
constexpr unsigned kHandleType = cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
// Of what is allocated in a pool: arenas keep their lines apart.
constexpr size_t kAllocationUnit = 4096;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

Result<int> Attribute(const cuda::Api& api, cuda::CUdevice device,
                      cuda::CUdevice_attribute attribute) {
  int value = 0;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuDeviceGetAttribute, &value, attribute, device));
  return value;
}

}  // namespace

Result<MappedMemory> MappedMemory::Map(const cuda::Api& api, cuda::PhysicalMemory memory,
                                       size_t granularity,
                                       std::span<const cuda::CUdevice> devices) {
  MappedMemory mapped;
  mapped.memory_ = std::move(memory);
  const size_t bytes = mapped.memory_.bytes();
  JF_ASSIGN_OR_RETURN(mapped.range_, cuda::AddressRange::Reserve(api, bytes, granularity));
  JF_RETURN_IF_ERROR(mapped.range_.Map(0, mapped.memory_));
  JF_RETURN_IF_ERROR(mapped.range_.SetAccess(0, bytes, devices));
  return mapped;
}

Result<std::unique_ptr<Gpu>> Gpu::Open(const cuda::Api& api, int ordinal, size_t pool_bytes,
                                       std::span<const cuda::CUdevice> readers) {
  std::unique_ptr<Gpu> gpu(new Gpu(api, ordinal));
  JF_ASSIGN_OR_RETURN(gpu->context_, cuda::PrimaryContext::Retain(api, ordinal));
  const cuda::CUdevice device = gpu->device();
  char name[128] = "";
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuDeviceGetName, name, sizeof(name), device));
  gpu->name_ = StrCat(name, " (GPU ", ordinal, ")");
  cuda::CUuuid uuid{};
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuDeviceGetUuid, &uuid, device));
  static_assert(sizeof(uuid) == sizeof(Uuid));
  std::memcpy(gpu->uuid_.data(), &uuid, sizeof(uuid));
  JF_ASSIGN_OR_RETURN(const int count,
                      Attribute(api, device, cuda::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  gpu->multiprocessors_ = static_cast<uint32_t>(count);
  for (const auto& [attribute, what] :
       {std::pair{cuda::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                  "map physical memory"},
        std::pair{cuda::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                  "export memory as a file descriptor"}}) {
    JF_ASSIGN_OR_RETURN(const int supported, Attribute(api, device, attribute));
    if (supported == 0) {
      return Status(Code::kUnimplemented, StrCat(gpu->name_, " cannot ", what));
    }
  }
  JF_ASSIGN_OR_RETURN(const size_t granularity,
                      cuda::PhysicalMemory::Granularity(api, device, kHandleType));
  JF_ASSIGN_OR_RETURN(
      cuda::PhysicalMemory memory,
      cuda::PhysicalMemory::Create(api, device, RoundUp(pool_bytes, granularity), kHandleType));
  auto pool = MappedMemory::Map(api, std::move(memory), granularity, readers);
  if (!pool.ok()) {
    return pool.status().WithContext(
        StrCat("the GPUs of this process cannot address each other's memory (", gpu->name_, ")"));
  }
  gpu->pool_ = *std::move(pool);
  return gpu;
}

Result<size_t> Gpu::Allocate(size_t bytes) {
  const size_t rounded = RoundUp(bytes, kAllocationUnit);
  if (rounded > pool_free()) {
    return Status(Code::kResourceExhausted,
                  StrCat(name_, ": ", bytes, " bytes do not fit into the ", pool_free(),
                         " that are left of its pool of ", pool_.bytes()));
  }
  const cuda::ScopedContext current(api_, context());
  JF_RETURN_IF_ERROR(current.status());
  const auto address = reinterpret_cast<cuda::CUdeviceptr>(pool_.data()) + used_;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api_, cuMemsetD8, address, 0, rounded));
  // A memset of device memory may return before it is done, and peers are told next.
  char last = 1;
  JF_RETURN_IF_ERROR(JF_CUDA_CALL(api_, cuMemcpyDtoH, &last, address + rounded - 1, 1));
  return std::exchange(used_, used_ + rounded);
}

Result<MappedMemory> ImportPool(const cuda::Api& api, UniqueFd fd, size_t bytes,
                                std::span<const cuda::CUdevice> devices) {
  JF_ASSIGN_OR_RETURN(const size_t granularity,
                      cuda::PhysicalMemory::Granularity(api, devices[0], kHandleType));
  JF_ASSIGN_OR_RETURN(cuda::PhysicalMemory memory,
                      cuda::PhysicalMemory::Import(api, fd.get(), bytes));
  return MappedMemory::Map(api, std::move(memory), granularity, devices);
}

Result<std::vector<cuda::CUdevice>> FindDevices(const cuda::Api& api,
                                                std::span<const int> ordinals) {
  std::vector<cuda::CUdevice> devices;
  for (const int ordinal : ordinals) {
    cuda::CUdevice device = 0;
    JF_RETURN_IF_ERROR(JF_CUDA_CALL(api, cuDeviceGet, &device, ordinal));
    // Ranks may share a GPU, and memory is made accessible to each only once.
    if (std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  return devices;
}

}  // namespace jaxfabric
