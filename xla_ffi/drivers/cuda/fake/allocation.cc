#include "drivers/cuda/fake/allocation.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

namespace jaxfabric::cuda::fake {
namespace {

constexpr size_t kHeaderBytes = (sizeof(AllocationHeader) + 4095) / 4096 * 4096;

class HeaderLock {
 public:
  explicit HeaderLock(AllocationHeader& header) : header_(header) {
    // Acquire: what the last owner wrote is seen.
    while (header_.locked.exchange(1, std::memory_order_acquire) != 0) ::sched_yield();
  }
  ~HeaderLock() { header_.locked.store(0, std::memory_order_release); }
  HeaderLock(const HeaderLock&) = delete;

 private:
  AllocationHeader& header_;
};

struct Mappings {
  std::mutex mutex;
  std::multimap<uint64_t, std::byte*> places;  // by inode
  // Relaxed: only tells that something changed; the places are read under the mutex.
  std::atomic<uint32_t> epoch{1};
};
Mappings& AllMappings() {
  static auto* mappings = new Mappings;
  return *mappings;
}

}  // namespace

void NoteMapping(uint64_t inode, std::byte* address) {
  Mappings& all = AllMappings();
  const std::lock_guard lock(all.mutex);
  all.places.emplace(inode, address);
  all.epoch.fetch_add(1, std::memory_order_relaxed);
}

void ForgetMapping(uint64_t inode, std::byte* address) {
  Mappings& all = AllMappings();
  const std::lock_guard lock(all.mutex);
  const auto [begin, end] = all.places.equal_range(inode);
  for (auto place = begin; place != end; ++place) {
    if (place->second != address) continue;
    all.places.erase(place);
    break;
  }
  all.epoch.fetch_add(1, std::memory_order_relaxed);
}

Result<std::shared_ptr<Allocation>> Allocation::Make(size_t bytes, AllocationHeader** header) {
  UniqueFd fd(::memfd_create("jaxfabric-fake-gpu", MFD_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes + kHeaderBytes)) != 0) {
    return ErrnoStatus("ftruncate", errno);
  }
  void* const page = ::mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(),
                            static_cast<off_t>(bytes));
  if (page == MAP_FAILED) return ErrnoStatus("mmap", errno);
  *header = static_cast<AllocationHeader*>(page);
  (*header)->magic = AllocationHeader::kMagic;
  (*header)->bytes = bytes;
  return std::shared_ptr<Allocation>(new Allocation(std::move(fd), *header));
}

Result<std::shared_ptr<Allocation>> Allocation::Create(size_t bytes, int gpu,
                                                       uint64_t handle_types) {
  AllocationHeader* header = nullptr;
  auto made = Make(bytes, &header);
  if (!made.ok()) return made;
  header->gpu = gpu;
  header->handle_types = handle_types;
  return made;
}

Result<std::shared_ptr<Allocation>> Allocation::CreateMulticast(size_t bytes, uint32_t team,
                                                                uint64_t handle_types) {
  AllocationHeader* header = nullptr;
  auto made = Make(bytes, &header);
  if (!made.ok()) return made;
  header->gpu = -1;
  header->handle_types = handle_types;
  header->multicast = 1;
  header->team = team;
  return made;
}

Result<std::shared_ptr<Allocation>> Allocation::Import(UniqueFd fd) {
  struct stat status{};
  if (::fstat(fd.get(), &status) != 0) return ErrnoStatus("fstat", errno);
  const Status alien(Code::kInvalidArgument, "not a fake GPU's memory");
  if (status.st_size < static_cast<off_t>(kHeaderBytes)) return alien;
  const auto bytes = static_cast<size_t>(status.st_size) - kHeaderBytes;
  void* const page = ::mmap(nullptr, kHeaderBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(),
                            static_cast<off_t>(bytes));
  if (page == MAP_FAILED) return alien;
  auto* header = static_cast<AllocationHeader*>(page);
  if (header->magic != AllocationHeader::kMagic || header->bytes != bytes) {
    ::munmap(page, kHeaderBytes);
    return alien;
  }
  return std::shared_ptr<Allocation>(new Allocation(std::move(fd), header));
}

Result<UniqueFd> Allocation::OpenOf(int pid, int fd, uint64_t inode) {
  const std::string path = StrCat("/proc/", pid, "/fd/", fd);
  UniqueFd opened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!opened.valid()) return ErrnoStatus(path, errno);
  struct stat status{};
  if (::fstat(opened.get(), &status) != 0 || status.st_ino != inode) {
    return Status(Code::kNotFound, StrCat(path, " is another file by now"));
  }
  return opened;
}

Allocation::~Allocation() {
  retired_.insert(retired_.end(), bound_.begin(), bound_.end());
  for (const Bound& bound : retired_) {
    if (bound.own) ::munmap(bound.at, bound.bytes);
  }
  ::munmap(header_, kHeaderBytes);
}

uint64_t Allocation::inode() const {
  struct stat status{};
  return ::fstat(fd_.get(), &status) == 0 ? status.st_ino : 0;
}

CUresult Allocation::AddGpu(int gpu) {
  const HeaderLock lock(*header_);
  if (header_->added == header_->team) return CUDA_ERROR_INVALID_VALUE;
  for (uint32_t i = 0; i < header_->added; ++i) {
    if (header_->gpus[i] == gpu) return CUDA_ERROR_INVALID_DEVICE;
  }
  header_->gpus[header_->added++] = gpu;
  return CUDA_SUCCESS;
}

bool Allocation::HasGpu(int gpu) {
  const HeaderLock lock(*header_);
  return std::find(header_->gpus, header_->gpus + header_->added, gpu) !=
         header_->gpus + header_->added;
}

bool Allocation::Complete() {
  const HeaderLock lock(*header_);
  return header_->added == header_->team;
}

CUresult Allocation::Bind(const std::shared_ptr<Allocation>& memory, size_t offset,
                          size_t memory_offset, size_t bytes) {
  const HeaderLock lock(*header_);
  AllocationHeader::Binding* place = nullptr;
  for (auto& binding : header_->bindings) {
    if (binding.live == 0) {
      if (place == nullptr) place = &binding;
    } else if (binding.gpu == memory->gpu() && offset < binding.offset + binding.bytes &&
               binding.offset < offset + bytes) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (place == nullptr) return CUDA_ERROR_OUT_OF_MEMORY;
  *place = {1,
            memory->gpu(),
            static_cast<int32_t>(::getpid()),
            memory->fd(),
            memory->inode(),
            offset,
            memory_offset,
            bytes};
  bound_here_[{memory->gpu(), offset}] = memory;
  header_->version.fetch_add(1, std::memory_order_release);
  return CUDA_SUCCESS;
}

CUresult Allocation::Unbind(int gpu, size_t offset, size_t bytes) {
  const HeaderLock lock(*header_);
  for (auto& binding : header_->bindings) {
    if (binding.live == 0 || binding.gpu != gpu || binding.offset != offset) continue;
    if (binding.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
    binding.live = 0;
    bound_here_.erase({gpu, offset});
    header_->version.fetch_add(1, std::memory_order_release);
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

std::byte* Allocation::Place(const AllocationHeader::Binding& binding, bool* own) {
  {
    Mappings& all = AllMappings();
    const std::lock_guard lock(all.mutex);
    const auto place = all.places.find(binding.inode);
    *own = place == all.places.end();
    if (!*own) return place->second + binding.memory_offset;
  }
  for (const Bound& old : retired_) {
    if (old.own && old.inode == binding.inode && old.memory_offset == binding.memory_offset &&
        old.bytes == binding.bytes) {
      *own = false;
      return old.at;
    }
  }
  const Result<UniqueFd> fd = OpenOf(binding.pid, binding.fd, binding.inode);
  if (!fd.ok()) return nullptr;
  void* const mapped = ::mmap(nullptr, binding.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(),
                              static_cast<off_t>(binding.memory_offset));
  return mapped == MAP_FAILED ? nullptr : static_cast<std::byte*>(mapped);
}

void Allocation::Refresh() {
  for (const Bound& bound : bound_) {
    if (bound.own) retired_.push_back(bound);
  }
  bound_.clear();
  const HeaderLock lock(*header_);
  for (const auto& binding : header_->bindings) {
    if (binding.live == 0) continue;
    bool own = false;
    std::byte* const at = Place(binding, &own);
    if (at == nullptr) continue;
    bound_.push_back({binding.gpu, binding.offset, binding.bytes, at, own, binding.inode,
                      binding.memory_offset});
  }
  std::sort(bound_.begin(), bound_.end(),
            [](const Bound& a, const Bound& b) { return a.gpu < b.gpu; });
}

emulation::MulticastTargets Allocation::Targets(size_t offset) {
  const std::lock_guard guard(mutex_);
  // Acquire: the bindings that the version counts are seen.
  const uint64_t version = header_->version.load(std::memory_order_acquire);
  const uint64_t seen = version << 32 | AllMappings().epoch.load(std::memory_order_relaxed);
  if (std::exchange(seen_, seen) != seen) Refresh();
  emulation::MulticastTargets targets;
  for (const Bound& bound : bound_) {
    if (offset < bound.offset || offset >= bound.offset + bound.bytes) continue;
    targets.push_back(bound.at + (offset - bound.offset));
  }
  return targets.size() == header_->team ? targets : emulation::MulticastTargets();
}

}  // namespace jaxfabric::cuda::fake
