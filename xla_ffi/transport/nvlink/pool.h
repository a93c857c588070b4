// Memory that the GPUs of several processes address: where it lies, how another process gets it,
// and its place among the addresses of this one.
//
// A pool is made by one process and mapped by all. What travels is a descriptor over a unix socket,
// or 64 bytes where processes are on several hosts. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/status.h"
#include "drivers/cuda/api.h"
#include "drivers/cuda/handles.h"
#include "os/fd.h"
#include "os/mapping.h"

namespace jaxfabric {

enum class PoolPlace : uint32_t {
  kDevice = 0,      // memory of the GPU
  kHost = 1,        // of the host, by the same functions of the driver
  kRegistered = 2,  // of the host, by the kernel, and page-locked: for drivers that refuse kHost
};

// How memory is to be exportable: by descriptor on one host; between hosts by a fabric handle,
// which the GPU has to offer.
Result<unsigned> HandleTypes(bool one_host, bool fabric_offered);

// A share of memory: one of the two.
struct MemoryHandle {
  UniqueFd fd;
  std::optional<cuda::CUmemFabricHandle> fabric;

  // The fabric handle if there may be one.
  static Result<MemoryHandle> Export(const cuda::PhysicalMemory& memory, unsigned handle_types);
  Result<cuda::PhysicalMemory> Import(const cuda::Api& api, size_t bytes) const;
  // The part that travels as bytes, and back; empty if a descriptor travels beside it.
  std::string Bytes() const;
  static Result<MemoryHandle> FromBytes(const std::string& bytes);
};

// Memory at an address of this process.
class MappedMemory {
 public:
  MappedMemory() = default;
  // No GPU may use it yet.
  static Result<MappedMemory> Map(const cuda::Api& api, cuda::PhysicalMemory memory,
                                  size_t granularity);
  // A sealed memfd, for every GPU. Needs a current context, which must outlive it.
  static Result<MappedMemory> Register(const cuda::Api& api, UniqueFd memory);
  // Lets these GPUs read and write it.
  Status Allow(std::span<const cuda::CUdevice> devices);

  std::byte* data() const {
    return reinterpret_cast<std::byte*>(pages_ ? pages_->registered.device_address()
                                               : range_.address());
  }
  size_t bytes() const { return pages_ ? pages_->mapping.bytes().size() : range_.bytes(); }
  const cuda::PhysicalMemory& memory() const { return memory_; }
  Result<MemoryHandle> Export(unsigned handle_types) const;

 private:
  struct Pages {  // registered before it is unmapped
    UniqueFd fd;
    Mapping mapping;
    cuda::RegisteredMemory registered;
  };
  cuda::PhysicalMemory memory_;
  cuda::AddressRange range_;
  std::unique_ptr<Pages> pages_;
};

// Fresh memory of at least `bytes` for a pool of `device`, whose context is current.
Result<MappedMemory> MakePool(const cuda::Api& api, cuda::CUdevice device, PoolPlace place,
                              size_t bytes, unsigned handle_types);
// Another process's pool. The context of one of the GPUs, `device`, is current.
Result<MappedMemory> ImportPool(const cuda::Api& api, cuda::CUdevice device, PoolPlace place,
                                MemoryHandle handle, size_t bytes);

// Whether a Status of Allow() says that GPUs cannot reach each other, rather than that the driver
// has failed.
bool SaysUnreachable(const Status& allowed);
// "GPU 0 and GPU 1 cannot reach each other's memory", for the first such pair; empty if there is
// none.
Result<std::string> UnreachablePair(const cuda::Api& api, std::span<const cuda::CUdevice> devices);

}  // namespace jaxfabric
