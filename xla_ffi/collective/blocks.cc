#include "collective/blocks.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace jaxfabric {

Result<BlockPool::Block*> BlockPool::Take(MessageEndpoint& endpoint, size_t bytes) {
  constexpr size_t kPage = 4096;
  constexpr size_t kFitting = 4;  // a larger block is for those who need it
  const size_t size = std::bit_ceil(std::max(bytes, kPage));
  const std::lock_guard lock(mutex_);
  const auto found = free_.lower_bound(size);
  if (found != free_.end() && found->first <= kFitting * size) {
    Block* block = found->second;
    free_.erase(found);
    return block;
  }
  auto owned = std::make_unique<Owned>();
  JF_ASSIGN_OR_RETURN(owned->mapping, Mapping::MapPrivate(size));
  owned->block.memory = owned->mapping.bytes();
  JF_ASSIGN_OR_RETURN(owned->block.region, endpoint.Register(owned->block.memory));
  bytes_ += size;
  blocks_.push_back(std::move(owned));
  return &blocks_.back()->block;
}

void BlockPool::Give(Block* block) {
  const std::lock_guard lock(mutex_);
  free_.emplace(block->memory.size(), block);
}

uint64_t BlockPool::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

}  // namespace jaxfabric
