// What the driver hands out, with one owner each: freed when the object goes, moved but not copied.
//
// A handle keeps the table it was made with, which must outlive it. Events, streams, modules and
// pinned memory belong to the context that was current when they were made, which must be there
// still when they are freed; which context is current then does not matter. Not thread-safe.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "drivers/cuda/api.h"
#include "os/fd.h"

namespace jaxfabric::cuda {

// Makes a context current on this thread while it lives.
class ScopedContext {
 public:
  ScopedContext(const Api& api, CUcontext context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  const Status& status() const { return status_; }

 private:
  const Api& api_;
  Status status_;
};

namespace internal {

// A driver object that is freed by one call; null when empty. kNeedsContext: by a call that wants
// the object's context to be current.
template <class Handle, CUresult (*Api::*kFree)(Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(const Api& api, Handle handle, CUcontext context)
      : api_(&api), handle_(handle), context_(context) {}
  ~Owned() { Reset(); }
  Owned(Owned&& other) noexcept
      : api_(other.api_),
        handle_(std::exchange(other.handle_, Handle{})),
        context_(other.context_) {}
  Owned& operator=(Owned&& other) noexcept {
    if (this != &other) {
      Reset();
      api_ = other.api_;
      handle_ = std::exchange(other.handle_, Handle{});
      context_ = other.context_;
    }
    return *this;
  }

  Handle get() const { return handle_; }
  bool valid() const { return handle_ != Handle{}; }
  const Api& api() const { return *api_; }
  void Reset() {
    if (!valid()) return;
    const Handle handle = std::exchange(handle_, Handle{});
    if (context_ == nullptr) {
      (void)(api_->*kFree)(handle);
    } else {
      const ScopedContext current(*api_, context_);
      (void)(api_->*kFree)(handle);
    }
  }

 private:
  const Api* api_ = nullptr;
  Handle handle_{};
  CUcontext context_ = nullptr;
};

}  // namespace internal

// A reference to a device's primary context, the one that JAX uses.
class PrimaryContext {
 public:
  PrimaryContext() = default;
  ~PrimaryContext();
  PrimaryContext(PrimaryContext&& other) noexcept;
  PrimaryContext& operator=(PrimaryContext&& other) noexcept;

  static Result<PrimaryContext> Retain(const Api& api, int ordinal);
  CUdevice device() const { return device_; }
  CUcontext context() const { return context_; }

 private:
  const Api* api_ = nullptr;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

// Memory of a device or of the host without an address, or an import of another process's. Mappings
// keep the memory after the handle has gone.
class PhysicalMemory {
 public:
  PhysicalMemory() = default;

  // `handle_types` says how it can be exported; bytes is a multiple of Granularity().
  static Result<PhysicalMemory> Create(const Api& api, CUmemLocation location, size_t bytes,
                                       unsigned handle_types);
  static Result<PhysicalMemory> Create(const Api& api, CUdevice device, size_t bytes,
                                       unsigned handle_types) {
    return Create(api, {CU_MEM_LOCATION_TYPE_DEVICE, device}, bytes, handle_types);
  }
  static Result<size_t> Granularity(const Api& api, CUmemLocation location, unsigned handle_types);
  static Result<size_t> Granularity(const Api& api, CUdevice device, unsigned handle_types) {
    return Granularity(api, {CU_MEM_LOCATION_TYPE_DEVICE, device}, handle_types);
  }
  // The descriptor stays the caller's.
  static Result<PhysicalMemory> Import(const Api& api, int fd, size_t bytes);
  static Result<PhysicalMemory> Import(const Api& api, const CUmemFabricHandle& handle,
                                       size_t bytes);
  Result<UniqueFd> ExportFd() const;
  Result<CUmemFabricHandle> ExportFabric() const;

  CUmemGenericAllocationHandle handle() const { return handle_.get(); }
  size_t bytes() const { return bytes_; }
  bool valid() const { return handle_.valid(); }
  const Api& api() const { return handle_.api(); }

 private:
  friend class Multicast;
  using Handle = internal::Owned<CUmemGenericAllocationHandle, &Api::cuMemRelease>;
  PhysicalMemory(Handle handle, size_t bytes) : handle_(std::move(handle)), bytes_(bytes) {}

  Handle handle_;
  size_t bytes_ = 0;
};

// A multicast object: memory that stands for that of several devices. Made by one process and
// imported by the others. All devices are added before the first memory is bound.
class Multicast {
 public:
  Multicast() = default;
  ~Multicast() { UnbindAll(); }
  Multicast(Multicast&&) = default;
  Multicast& operator=(Multicast&& other) noexcept;

  static Result<Multicast> Create(const Api& api, unsigned devices, size_t bytes,
                                  unsigned handle_types);
  // The least: what is recommended may be many times a pool.
  static Result<size_t> Granularity(const Api& api, unsigned devices, size_t bytes,
                                    unsigned handle_types);
  // Takes what PhysicalMemory::Import() made of an exported multicast object.
  static Multicast Adopt(PhysicalMemory imported) { return Multicast(std::move(imported)); }
  Status AddDevice(CUdevice device);
  Status Bind(CUdevice device, size_t offset, const PhysicalMemory& memory, size_t memory_offset,
              size_t bytes);
  // For export and for mapping.
  const PhysicalMemory& memory() const { return memory_; }

 private:
  struct Binding {
    CUdevice device;
    size_t offset;
    size_t bytes;
  };
  explicit Multicast(PhysicalMemory memory) : memory_(std::move(memory)) {}
  void UnbindAll();

  PhysicalMemory memory_;
  std::vector<Binding> bindings_;
};

// A range of addresses, the same for the host's bookkeeping and for all devices, to map memory in.
class AddressRange {
 public:
  AddressRange() = default;
  ~AddressRange() { Reset(); }
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;

  static Result<AddressRange> Reserve(const Api& api, size_t bytes, size_t alignment);
  // All of `memory` at [offset, offset + memory.bytes()).
  Status Map(size_t offset, const PhysicalMemory& memory);
  // Lets `devices` read and write what is mapped at [offset, offset + bytes).
  Status SetAccess(size_t offset, size_t bytes, std::span<const CUdevice> devices);
  // Unmaps everything and frees the addresses.
  void Reset();

  CUdeviceptr address() const { return address_; }
  size_t bytes() const { return bytes_; }

 private:
  struct Mapped {
    size_t offset;
    size_t bytes;
  };
  const Api* api_ = nullptr;
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
  std::vector<Mapped> mapped_;
};

class Event {
 public:
  Event() = default;
  static Result<Event> Create(const Api& api, unsigned flags = CU_EVENT_DISABLE_TIMING);
  CUevent get() const { return handle_.get(); }

 private:
  using Handle = internal::Owned<CUevent, &Api::cuEventDestroy>;
  explicit Event(Handle handle) : handle_(std::move(handle)) {}
  Handle handle_;
};

// Does not wait for the legacy default stream. Work that is queued when it goes is still done.
class Stream {
 public:
  Stream() = default;
  enum class Priority { kNormal, kHighest };
  static Result<Stream> Create(const Api& api, Priority priority = Priority::kNormal);
  CUstream get() const { return handle_.get(); }

 private:
  using Handle = internal::Owned<CUstream, &Api::cuStreamDestroy>;
  explicit Stream(Handle handle) : handle_(std::move(handle)) {}
  Handle handle_;
};

class Module {
 public:
  Module() = default;
  // `image` is a cubin, a fatbin or PTX that ends in a zero byte.
  static Result<Module> Load(const Api& api, const void* image);
  Result<CUfunction> Function(const char* name) const;
  CUmodule get() const { return handle_.get(); }

 private:
  using Handle = internal::Owned<CUmodule, &Api::cuModuleUnload>;
  explicit Module(Handle handle) : handle_(std::move(handle)) {}
  Handle handle_;
};

// Page-locked host memory that every device can address.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  static Result<PinnedMemory> Allocate(const Api& api, size_t bytes);
  std::span<std::byte> host() const { return {static_cast<std::byte*>(handle_.get()), bytes_}; }
  CUdeviceptr device_address() const { return address_; }

 private:
  using Handle = internal::Owned<void*, &Api::cuMemFreeHost>;
  PinnedMemory(Handle handle, size_t bytes, CUdeviceptr address)
      : handle_(std::move(handle)), bytes_(bytes), address_(address) {}
  Handle handle_;
  size_t bytes_ = 0;
  CUdeviceptr address_ = 0;
};

// Somebody else's pages of this process, page-locked while this lives: every device can address
// them.
class RegisteredMemory {
 public:
  RegisteredMemory() = default;
  static Result<RegisteredMemory> Register(const Api& api, std::span<std::byte> pages);
  CUdeviceptr device_address() const { return address_; }

 private:
  using Handle = internal::Owned<void*, &Api::cuMemHostUnregister>;
  RegisteredMemory(Handle handle, CUdeviceptr address)
      : handle_(std::move(handle)), address_(address) {}
  Handle handle_;
  CUdeviceptr address_ = 0;
};

}  // namespace jaxfabric::cuda
