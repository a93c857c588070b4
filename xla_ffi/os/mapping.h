// Mapped memory with one owner, and anonymous shared segments (memfd: no name anywhere, freed with
// the last process that holds it).
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"
#include "os/fd.h"

namespace jaxfabric {

class Mapping {
 public:
  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Maps `bytes` of `fd` shared, readable and writable.
  static Result<Mapping> MapShared(int fd, size_t bytes);

  // Zeroed memory of this process alone; pages that are never touched cost nothing.
  static Result<Mapping> MapPrivate(size_t bytes);

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit Mapping(std::span<std::byte> bytes) : bytes_(bytes) {}
  std::span<std::byte> bytes_;
};

// A zeroed memfd of `bytes` bytes whose size is sealed; `label` shows in /proc/<pid>/maps.
Result<UniqueFd> CreateSharedMemory(const char* label, size_t bytes);

// The size of a descriptor's file, refusing one whose size is not sealed: a peer that could shrink
// it would turn our reads into SIGBUS.
Result<size_t> SealedSize(int fd);

}  // namespace jaxfabric
