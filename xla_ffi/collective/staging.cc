#include "collective/staging.h"

#include <iterator>

#include "base/status.h"

namespace jaxfabric {
namespace {
constexpr uint64_t kUnit = 64;
uint64_t RoundUp(uint64_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }
}  // namespace

StagingPool::StagingPool(uint64_t begin, uint64_t end) : free_bytes_(end - begin) {
  JF_CHECK(begin % kUnit == 0 && end >= begin);
  if (end > begin) free_.emplace(begin, end - begin);
}

std::optional<StagingPool::Block> StagingPool::TryAllocate(uint64_t bytes) {
  bytes = RoundUp(bytes);
  std::lock_guard lock(mutex_);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->second < bytes) continue;
    const Block result{block->first, bytes};
    const uint64_t rest = block->second - bytes;
    free_.erase(block);
    if (rest > 0) free_.emplace(result.offset + bytes, rest);
    free_bytes_ -= bytes;
    return result;
  }
  return std::nullopt;
}

void StagingPool::Free(Block block) {
  if (block.bytes == 0) return;
  std::lock_guard lock(mutex_);
  free_bytes_ += block.bytes;
  auto next = free_.lower_bound(block.offset);
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    JF_CHECK(previous->first + previous->second <= block.offset);
    if (previous->first + previous->second == block.offset) {
      block = {previous->first, previous->second + block.bytes};
      free_.erase(previous);
    }
  }
  if (next != free_.end() && block.offset + block.bytes == next->first) {
    block.bytes += next->second;
    free_.erase(next);
  }
  free_.emplace(block.offset, block.bytes);
}

uint64_t StagingPool::free_bytes() const {
  std::lock_guard lock(mutex_);
  return free_bytes_;
}

CellAllocator::CellAllocator(uint32_t count) {
  for (uint32_t cell = count; cell > 0; --cell) free_.push_back(cell - 1);
}

std::optional<uint32_t> CellAllocator::TryAllocate() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return std::nullopt;
  const uint32_t cell = free_.back();
  free_.pop_back();
  return cell;
}

void CellAllocator::Free(uint32_t cell) {
  std::lock_guard lock(mutex_);
  free_.push_back(cell);
}

}  // namespace jaxfabric
