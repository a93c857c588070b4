#include "transport/nvlink/multicast.h"

#include <utility>

namespace jaxfabric {

Result<std::unique_ptr<MulticastPools>> MulticastPools::Create(const cuda::Api& api,
                                                               unsigned devices, size_t bytes,
                                                               unsigned handle_types) {
  JF_ASSIGN_OR_RETURN(const size_t granularity,
                      cuda::Multicast::Granularity(api, devices, bytes, handle_types));
  const size_t whole = bytes / granularity * granularity;
  if (whole == 0) {
    return Status(Code::kResourceExhausted,
                  StrCat("pools of ", bytes, " bytes are smaller than the ", granularity,
                         " that multicast needs"));
  }
  JF_ASSIGN_OR_RETURN(cuda::Multicast object,
                      cuda::Multicast::Create(api, devices, whole, handle_types));
  return std::unique_ptr<MulticastPools>(
      new MulticastPools(std::move(object), handle_types, granularity));
}

Result<std::unique_ptr<MulticastPools>> MulticastPools::Import(const cuda::Api& api,
                                                               unsigned devices,
                                                               const MemoryHandle& handle,
                                                               size_t bytes,
                                                               unsigned handle_types) {
  JF_ASSIGN_OR_RETURN(const size_t granularity,
                      cuda::Multicast::Granularity(api, devices, bytes, handle_types));
  JF_ASSIGN_OR_RETURN(cuda::PhysicalMemory imported, handle.Import(api, bytes));
  return std::unique_ptr<MulticastPools>(
      new MulticastPools(cuda::Multicast::Adopt(std::move(imported)), handle_types, granularity));
}

Status MulticastPools::Bind(cuda::CUdevice device, const MappedMemory& pool) {
  return object_.Bind(device, 0, pool.memory(), 0, bytes());
}

Status MulticastPools::Map(std::span<const cuda::CUdevice> devices) {
  JF_ASSIGN_OR_RETURN(range_,
                      cuda::AddressRange::Reserve(object_.memory().api(), bytes(), granularity_));
  JF_RETURN_IF_ERROR(range_.Map(0, object_.memory()));
  return range_.SetAccess(0, bytes(), devices);
}

}  // namespace jaxfabric
