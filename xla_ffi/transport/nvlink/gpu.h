// A GPU of this process with its pool: the memory that its peers address, since the allocations of
// others cannot be shared by their address.
//
// Threads: MakePool and Allocate from one at a time, the rest from any.
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
#include "transport/nvlink/pool.h"

namespace jaxfabric {

class Gpu {
 public:
  using Uuid = std::array<char, 16>;

  // The error names what is missing.
  static Result<std::unique_ptr<Gpu>> Open(const cuda::Api& api, int ordinal);

  const cuda::Api& api() const { return api_; }
  int ordinal() const { return ordinal_; }
  cuda::CUdevice device() const { return context_.device(); }
  cuda::CUcontext context() const { return context_.context(); }
  // "NVIDIA H200 (GPU 0)"
  const std::string& name() const { return name_; }
  const Uuid& uuid() const { return uuid_; }
  uint32_t multiprocessors() const { return multiprocessors_; }
  bool multicast() const { return multicast_; }
  bool fabric_handles() const { return fabric_handles_; }

  // In place of the one there was. `bytes` is rounded up to what the driver can map.
  Status MakePool(PoolPlace place, size_t bytes, bool one_host);
  MappedMemory& pool() { return pool_; }
  const MappedMemory& pool() const { return pool_; }
  size_t pool_free() const { return pool_.bytes() - used_; }
  unsigned handle_types() const { return handle_types_; }
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
  bool multicast_ = false;
  bool fabric_handles_ = false;
  MappedMemory pool_;
  unsigned handle_types_ = 0;  // of the pool
  size_t used_ = 0;
};

// The devices of these ordinals.
Result<std::vector<cuda::CUdevice>> FindDevices(const cuda::Api& api,
                                                std::span<const int> ordinals);
// Whether these GPUs can give memory to other hosts at all: makes a little of it. Which hosts it
// reaches is known to those only.
Status ProbeFabric(const cuda::Api& api, std::span<const int> ordinals);

}  // namespace jaxfabric
