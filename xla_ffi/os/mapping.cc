#include "os/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

namespace jaxfabric {

Mapping::~Mapping() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

Mapping::Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(bytes_, other.bytes_);  // what was mapped here goes with `other`
  return *this;
}

Result<Mapping> Mapping::MapShared(int fd, size_t bytes) {
  if (bytes == 0) return Status(Code::kInvalidArgument, "cannot map zero bytes");
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) return ErrnoStatus(StrCat("mmap of ", bytes, " bytes"), errno);
  return Mapping(std::span(static_cast<std::byte*>(address), bytes));
}

Result<Mapping> Mapping::MapPrivate(size_t bytes) {
  if (bytes == 0) return Status(Code::kInvalidArgument, "cannot map zero bytes");
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return ErrnoStatus(StrCat("mmap of ", bytes, " bytes"), errno);
  return Mapping(std::span(static_cast<std::byte*>(address), bytes));
}

Result<UniqueFd> CreateSharedMemory(const char* label, size_t bytes) {
  if (bytes == 0) return Status(Code::kInvalidArgument, "cannot share zero bytes");
  UniqueFd fd(::memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoStatus("memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus(StrCat("ftruncate of shared memory to ", bytes, " bytes"), errno);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoStatus("sealing shared memory", errno);
  }
  return fd;
}

Result<size_t> SealedSize(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & kNeeded) != kNeeded) {
    return Status(Code::kInvalidArgument, "the descriptor is not shared memory of a sealed size");
  }
  struct stat info;
  if (::fstat(fd, &info) != 0) return ErrnoStatus("fstat", errno);
  return static_cast<size_t>(info.st_size);
}

}  // namespace jaxfabric
