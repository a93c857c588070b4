// The memory behind a fake driver's allocation handles: memfds with a header page behind the bytes,
// so that an import in another process knows what it got. A multicast object is a header alone; it
// names the memory that is bound to it by process and descriptor.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/status.h"
#include "drivers/cuda/abi.h"
#include "drivers/cuda/fake/multicast.h"
#include "os/fd.h"

namespace jaxfabric::cuda::fake {

// Lies in memory that processes share.
struct AllocationHeader {
  static constexpr uint64_t kMagic = 0x6a66'6661'6b65'6d65;
  static constexpr size_t kMaxBindings = 128;
  static constexpr int32_t kHost = -2;  // in place of a GPU: memory of the host

  struct Binding {
    uint32_t live;
    int32_t gpu;
    int32_t pid;
    int32_t fd;
    uint64_t inode;
    uint64_t offset;
    uint64_t memory_offset;
    uint64_t bytes;
  };

  uint64_t magic;
  uint64_t bytes;
  uint64_t handle_types;
  int32_t gpu;
  uint32_t multicast;
  uint32_t team;  // how many devices the multicast object is for
  // Acquire and release: guards what follows, across processes.
  std::atomic<uint32_t> locked;
  uint32_t added;
  int32_t gpus[emulation::kMaxMulticastMembers];
  Binding bindings[kMaxBindings];
  // Release: whoever sees a new value sees the bindings it counts.
  std::atomic<uint32_t> version;
};

class Allocation {
 public:
  static Result<std::shared_ptr<Allocation>> Create(size_t bytes, int gpu, uint64_t handle_types);
  static Result<std::shared_ptr<Allocation>> CreateMulticast(size_t bytes, uint32_t team,
                                                             uint64_t handle_types);
  static Result<std::shared_ptr<Allocation>> Import(UniqueFd fd);
  // Opens a descriptor of another process, or of this one.
  static Result<UniqueFd> OpenOf(int pid, int fd, uint64_t inode);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  int fd() const { return fd_.get(); }
  uint64_t inode() const;
  size_t bytes() const { return header_->bytes; }
  uint64_t handle_types() const { return header_->handle_types; }
  int gpu() const { return header_->gpu; }
  bool multicast() const { return header_->multicast != 0; }

  // Of a multicast object.
  CUresult AddGpu(int gpu);
  bool HasGpu(int gpu);
  bool Complete();  // all devices have been added
  CUresult Bind(const std::shared_ptr<Allocation>& memory, size_t offset, size_t memory_offset,
                size_t bytes);
  CUresult Unbind(int gpu, size_t offset, size_t bytes);
  // The members' memory at `offset`, in device order; empty until every device has bound some.
  emulation::MulticastTargets Targets(size_t offset);

 private:
  struct Bound {  // a binding as this process sees it
    int gpu;
    size_t offset;
    size_t bytes;
    std::byte* at;
    bool own;  // mapped for this purpose
    uint64_t inode;
    size_t memory_offset;
  };

  Allocation(UniqueFd fd, AllocationHeader* header) : fd_(std::move(fd)), header_(header) {}
  static Result<std::shared_ptr<Allocation>> Make(size_t bytes, AllocationHeader** header);
  void Refresh();
  std::byte* Place(const AllocationHeader::Binding& binding, bool* own);

  const UniqueFd fd_;
  AllocationHeader* const header_;
  // What this process has bound: the memory must stay open for others to find it.
  std::map<std::pair<int, size_t>, std::shared_ptr<Allocation>> bound_here_;
  std::mutex mutex_;  // guards what follows
  uint64_t seen_ = 0;
  std::vector<Bound> bound_;
  std::vector<Bound> retired_;  // a fibre may hold targets in them
};

// Where this process has mapped memory (known by its inode): multicast goes there too, so that the
// thread sanitizer, which knows memory by its address, sees one memory and not two.
void NoteMapping(uint64_t inode, std::byte* address);
void ForgetMapping(uint64_t inode, std::byte* address);

}  // namespace jaxfabric::cuda::fake
