// A process's staging pool and cells: offsets into its own window, handed out on slow paths only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace jaxfabric {

// First fit over a range of bytes, in units of cache lines; freed blocks merge with their
// neighbours. Thread-safe.
class StagingPool {
 public:
  StagingPool(uint64_t begin, uint64_t end);

  struct Block {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  // Empty when no free block is large enough.
  std::optional<Block> TryAllocate(uint64_t bytes);
  void Free(Block block);
  uint64_t free_bytes() const;

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes
  uint64_t free_bytes_;
};

// Cell indices 0..count-1. Thread-safe.
class CellAllocator {
 public:
  explicit CellAllocator(uint32_t count);
  std::optional<uint32_t> TryAllocate();
  void Free(uint32_t cell);

 private:
  std::mutex mutex_;
  std::vector<uint32_t> free_;
};

}  // namespace jaxfabric
