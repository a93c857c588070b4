// Multicast memory over the pools of all GPUs of a domain: an address that stands for the same
// offset in every pool, for kernels that let the switch add and copy.
//
// One process creates the object and the others import it. Then, in this order, and each step only
// once every process has done the one before, or the driver waits for ever: all GPUs are added;
// pools are bound and the object is mapped. It is of use when all have done that. Not thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/status.h"
#include "drivers/cuda/api.h"
#include "drivers/cuda/handles.h"
#include "transport/nvlink/pool.h"

namespace jaxfabric {

class MulticastPools {
 public:
  // For the first bytes of pools whose smallest has `bytes`.
  static Result<std::unique_ptr<MulticastPools>> Create(const cuda::Api& api, unsigned devices,
                                                        size_t bytes, unsigned handle_types);
  static Result<std::unique_ptr<MulticastPools>> Import(const cuda::Api& api, unsigned devices,
                                                        const MemoryHandle& handle, size_t bytes,
                                                        unsigned handle_types);
  Result<MemoryHandle> Export() const {
    return MemoryHandle::Export(object_.memory(), handle_types_);
  }
  Status Add(cuda::CUdevice device) { return object_.AddDevice(device); }
  Status Bind(cuda::CUdevice device, const MappedMemory& pool);
  // For `devices` of this process.
  Status Map(std::span<const cuda::CUdevice> devices);

  std::byte* data() const { return reinterpret_cast<std::byte*>(range_.address()); }
  size_t bytes() const { return object_.memory().bytes(); }

 private:
  MulticastPools(cuda::Multicast object, unsigned handle_types, size_t granularity)
      : handle_types_(handle_types), granularity_(granularity), object_(std::move(object)) {}

  const unsigned handle_types_;
  const size_t granularity_;
  cuda::Multicast object_;
  cuda::AddressRange range_;
};

}  // namespace jaxfabric
