// Memory of this process that ranks of other hosts put messages into, and nobody else sees.
//
// Not of the window, which is small and shared by all executions: one that waited there for memory
// could hold up those that would free it, in an order that no rank knows. Here an execution that
// needs a block gets one, so there are as many as have ever been in use at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "os/mapping.h"
#include "transport/message.h"

namespace jaxfabric {

class BlockPool {
 public:
  struct Block {
    std::span<std::byte> memory;
    uint32_t region = 0;  // for the peers
  };

  // Must outlive the endpoint, which writes into the blocks.
  BlockPool() = default;

  // At least so many bytes, with anything in them. Fails only if the system has no memory left.
  Result<Block*> Take(MessageEndpoint& endpoint, size_t bytes);
  // Nothing is on its way into it any more.
  void Give(Block* block);
  // Of all blocks.
  uint64_t bytes() const;

 private:
  struct Owned {
    Mapping mapping;
    Block block;
  };
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Owned>> blocks_;
  std::multimap<size_t, Block*> free_;  // by size
  uint64_t bytes_ = 0;
};

}  // namespace jaxfabric
