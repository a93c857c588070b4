#include "transport/nvlink/gpu.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace jaxfabric {
namespace {

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

Result<std::unique_ptr<Gpu>> Gpu::Open(const cuda::Api& api, int ordinal) {
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
  // Older drivers do not know these attributes.
  const auto has = [&](cuda::CUdevice_attribute attribute) {
    const auto value = Attribute(api, device, attribute);
    return value.ok() && *value != 0;
  };
  gpu->multicast_ =
      api.cuMulticastCreate != nullptr && has(cuda::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
  gpu->fabric_handles_ = has(cuda::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
  return gpu;
}

Status Gpu::MakePool(PoolPlace place, size_t bytes, bool one_host) {
  const cuda::ScopedContext current(api_, context());
  JF_RETURN_IF_ERROR(current.status());
  pool_ = {};
  used_ = 0;
  JF_ASSIGN_OR_RETURN(handle_types_, HandleTypes(one_host, fabric_handles_));
  JF_ASSIGN_OR_RETURN(pool_, jaxfabric::MakePool(api_, device(), place, bytes, handle_types_));
  return OkStatus();
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

Status ProbeFabric(const cuda::Api& api, std::span<const int> ordinals) {
  for (const int ordinal : ordinals) {
    JF_ASSIGN_OR_RETURN(const std::unique_ptr<Gpu> gpu, Gpu::Open(api, ordinal));
    Status shared = gpu->MakePool(PoolPlace::kDevice, 1, /*one_host=*/false);
    if (shared.ok()) shared = gpu->pool().Export(gpu->handle_types()).status();
    if (!shared.ok()) return shared.WithContext(gpu->name());
  }
  return OkStatus();
}

}  // namespace jaxfabric
