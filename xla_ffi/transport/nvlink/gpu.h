// A GPU of this process with the part of its memory that its peers address: a pool of our own, since
// the allocations of others cannot be shared by their address, mapped by every process that gets its
// descriptor.
//
// The pool is physical memory from cuMemCreate. Its descriptor travels over a unix socket; NVLink or
// PCIe carry the accesses. Threads: Allocate from one at a time, the rest from any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "drivers/cuda/api.h"
#include "drivers/cuda/handles.h"
#include "os/fd.h"

namespace jaxfabric {

// Memory at an address of this process that some of its GPUs may read and write.
class MappedMemory {
 public:
  MappedMemory() = default;
  static Result<MappedMemory> Map(const cuda::Api& api, cuda::PhysicalMemory memory,
                                  size_t granularity, std::span<const cuda::CUdevice> devices);
  std::byte* data() const { return reinterpret_cast<std::byte*>(range_.address()); }
  size_t bytes() const { return range_.bytes(); }
  const cuda::PhysicalMemory& memory() const { return memory_; }

 private:
  cuda::PhysicalMemory memory_;
  cuda::AddressRange range_;
};

class Gpu {
 public:
  using Uuid = std::array<char, 16>;

  // `pool_bytes` is rounded up to what the driver can map. The error names what is missing.
  static Result<std::unique_ptr<Gpu>> Open(const cuda::Api& api, int ordinal, size_t pool_bytes,
                                           std::span<const cuda::CUdevice> readers);

  const cuda::Api& api() const { return api_; }
  int ordinal() const { return ordinal_; }
  cuda::CUdevice device() const { return context_.device(); }
  cuda::CUcontext context() const { return context_.context(); }
  // "NVIDIA H200 (GPU 0)"
  const std::string& name() const { return name_; }
  const Uuid& uuid() const { return uuid_; }
  uint32_t multiprocessors() const { return multiprocessors_; }

  const MappedMemory& pool() const { return pool_; }
  size_t pool_free() const { return pool_.bytes() - used_; }
  // The descriptor is the caller's.
  Result<UniqueFd> ExportPool() const { return pool_.memory().ExportFd(); }
  // Zeroed memory of the pool as an offset into it; it stays allocated.
  Result<size_t> Allocate(size_t bytes);

 private:
  Gpu(const cuda::Api& api, int ordinal) : api_(api), ordinal_(ordinal) {}

  const cuda::Api& api_;
  const int ordinal_;
  cuda::PrimaryContext context_;
  std::string name_;
  Uuid uuid_{};
  uint32_t multiprocessors_ = 0;
  MappedMemory pool_;
  size_t used_ = 0;
};

// The pool of another process's GPU, by its descriptor, for `devices` of this process.
Result<MappedMemory> ImportPool(const cuda::Api& api, UniqueFd fd, size_t bytes,
                                std::span<const cuda::CUdevice> devices);

// The devices of these ordinals.
Result<std::vector<cuda::CUdevice>> FindDevices(const cuda::Api& api,
                                                std::span<const int> ordinals);

}  // namespace jaxfabric
